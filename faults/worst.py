"""The record that moves a clipped sum most, looked for on every path by which a gradient reaches the sum: ``make worst``.

Each path is a small model, a set of ordinary examples with aligned gradients (there is much to absorb), and one record that is
searched for. The loss of an example is <output, target>, so that the record chooses the gradient of the output freely. Every path is
searched whole, replicated in two processes and sharded over two, and in both modes, ordinary and certified.
Everything that a run checks is on: a record that is refused moves nothing, and refusals are counted.

    python faults/worst.py --tries 100000 --seed 7          # tries over all searches together
    python faults/worst.py --tries 2000 --only users --places whole
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hushgrad.audit.worst_record_search import Record, worst_record
from hushgrad.clipping import Capture
from hushgrad.clipping.certificate import KAPPA, Certificate
from hushgrad.errors import HushgradError
from hushgrad.events import Relation
from hushgrad.release.placement import Replicated, Sharded, Whole
from hushgrad.release.placement.lockstep import CheckedTogether, split_evenly
from hushgrad.release.placement.world import World
from hushgrad.sampling.batch import Batch
from hushgrad.sampling.batch_loader import stamp
from hushgrad.train.invariant_sizes import InvariantSizes

sys.path.insert(0, str(File(__file__).parent))
from worst_paths import PATHS, Path

BOUND = 1 + 1e-4
PLACES = {"whole": 1, "replicated": 2, "sharded": 2}  # processes
ONE_PROCESS = {"embedding, rows", *(name for name, path in PATHS.items() if path.threads > 1)}  # lazy tables; two threads each
_WHOLE = 2**31  # a batch is one micro-batch


class Sums:
    """The clipped sums of one path's other examples and a record, in one placement; as a run would have them, but without noise."""

    def __init__(self, path: Path, *, place: str = "whole", certified: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.path, self.certified, self.place = path, certified, place
        torch.set_num_threads(path.threads)
        self.model = path.model().to(path.dtype)
        self._sizes = InvariantSizes.of(self.model, certified=certified).sizes
        self.each = path.inputs[0] if "units" in path.how else 1
        self.others = _examples(path, path.others * self.each)
        self.world = World.here() if place != "whole" else World()
        self.refused = 0
        self._capture: Capture | None = None
        if place == "sharded":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world.size,)))
        self._placement = {"whole": Whole, "replicated": Replicated, "sharded": Sharded}[place](
            dict(self.model.named_parameters()), self.world
        )

    def first(self) -> Record:
        """An ordinary record."""
        return _examples(self.path, self.each) if "units" in self.path.how else tuple(t[0] for t in _examples(self.path, 1))

    def __call__(self, record: Record | None) -> dict[str, Tensor]:
        """The sums; of the others alone where the record is refused."""
        try:
            return self._added(self._share(record))
        except HushgradError:
            if record is None:
                raise
            self.refused += 1
            self.detach()
            return self._added(self._share(None))

    def detach(self) -> None:
        """Leave the model as it was; the next call attaches, and proves, anew."""
        if self._capture is not None:
            self._gate.remove()
            self._capture.detach()
            self._capture = None

    def _share(self, record: Record | None) -> Batch:
        """This process's examples: units are dealt, and the record is in the first process."""
        x, y = self.others
        units = torch.arange(len(x)) // self.each
        mine = units % self.world.size == self.world.rank
        x, y, units = x[mine], y[mine], units[mine]
        if record is not None and self.world.rank == 0:
            rows = record if "units" in self.path.how else tuple(t.unsqueeze(0) for t in record)
            x, y = torch.cat([rows[0], x]), torch.cat([rows[1], y])  # before the others: all have other places then
            units = torch.cat([units.new_full((len(rows[0]),), self.path.others), units])
        owners = units if "units" in self.path.how else None
        return stamp([x, y], step=0, examples=len(x), units=owners, sizes=self._sizes)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """As a run cuts it, and fills it up."""
        size = self.path.cut * self.each if "micro" in self.path.how else _WHOLE
        return split_evenly(batch, size, self.world) if self.place == "sharded" else batch.split(size)

    def _added(self, batch: Batch) -> dict[str, Tensor]:
        capture = self._attached()
        capture.discard()
        with self.world.together():  # all take the record, or none
            for part in self._parts(batch):
                self._passes(capture, part)
                if "micro" in self.path.how and self.place != "sharded":  # there folding sends
                    capture.fold(self.path.clip)
            capture.check()
        sums = capture.collect(self.path.clip).raw_sums
        self._placement.add_up(sums)
        placed = self._placement
        return {name: placed.join(name, t) for name, t in sums.items()} if isinstance(placed, Sharded) else sums

    def _attached(self) -> Capture:
        """With everything that a run checks, proved on the others: they are the first batch of a run."""
        if self._capture is None:
            certificate = Certificate(1024, 1024 // self.world.size) if self.certified else None
            self._capture = Capture(self.model, loss_reduction="sum", certificate=certificate, held=self._placement)
            together = self.place == "sharded"
            self._gate = CheckedTogether(self.model, self.world, self._capture) if together else _Nothing()
            self._capture.attach()
            (first,) = self._share(None).split(_WHOLE)
            self._gate.before(first.examples)
            self._passes(self._capture, first)
            self._capture.discard()
            if self.path.how == "rows":
                self._capture.keep_rows(self._capture.scattered)
        return self._capture

    def _passes(self, capture: Capture, part: Any) -> None:
        path, (x, y) = self.path, part
        x, y = x if path.ids else x.to(path.dtype), y.to(path.dtype)
        for k, sign in enumerate((1.0, -1.0) if path.how == "probes" else ()):
            with capture.probe(sign):
                capture.examples(len(x), padding=part.padding, dim=0)
                (self.model(x) * (sign * y[:, k])).sum().backward()
        if path.how != "probes":
            capture.examples(len(x), padding=part.padding, dim=0)
            if part.units is not None:
                capture.units(part.units)
            (self.model(x) * y).sum().backward()


class _Nothing:
    """No gate: a whole model is proved by its capture."""

    def before(self, examples: int) -> None:
        pass

    def remove(self) -> None:
        pass


class Found(NamedTuple):
    """A search's result, and how many records were refused."""

    moved: float
    record: Record
    found: int
    refused: int


def search(name: str, *, tries: int, seed: int, certified: bool = False, place: str = "whole") -> Found:
    """The worst record of one path, in clip norms."""
    path = PATHS[name]
    sums = Sums(path, place=place, certified=certified, seed=seed)
    try:
        worst = worst_record(sums, sums.first(), clip_norm=path.clip.sensitivity(Relation.ADD_REMOVE), tries=tries, seed=seed)
        return Found(*worst, sums.refused)
    finally:
        sums.detach()
        torch.set_num_threads(1)


def _examples(path: Path, count: int) -> tuple[Tensor, Tensor]:
    """Ordinary examples whose gradients point the same way; of units, one example of each."""
    inputs, target = (path.inputs[1:], path.target[1:]) if "units" in path.how else (path.inputs, path.target)
    x = torch.randint(path.ids, (count, *inputs)) if path.ids else 0.1 + 0.05 * torch.randn(count, *inputs)
    y = 1 + 0.1 * torch.randn(count, *target)
    if path.how == "probes":
        y[:, 1] *= -0.5
    return _cancelling(path, x, y) if "cancelling" in path.how else (x, y)


def _cancelling(path: Path, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A unit's second example, or a record's second position, is nearly minus the first: what is left of a large gradient is rounding."""
    for t, sign in ((x, 1 + 1e-7), (y, -1.0)):
        parts = t.view(-1, path.inputs[0], *t.shape[1:]) if "units" in path.how else t
        parts[:, 1] = parts[:, 0] * sign
    y[2 :: path.inputs[0]] *= 1e-6 if "units" in path.how else 1.0
    return x, y * 1e6


# All searches -------------------------------------------------------------------------------------------------------------


def _searched(place: str, names: list[str], each: int, seed: int) -> int:
    """Search these paths in both modes; how many failed. In every process of the placement, and told by the first."""
    torch.set_num_threads(1)
    failed, speaks = 0, not dist.is_initialized() or dist.get_rank() == 0
    for name in names if place == "whole" else [name for name in names if name not in ONE_PROCESS]:
        for certified in (False, True):
            bound, mode = (1 + KAPPA, "certified") if certified else (BOUND, "ordinary")
            try:
                worst = search(name, tries=each, seed=seed, certified=certified, place=place)
            except HushgradError as error:
                held = place == "sharded"  # whose rows are whose is not proved there: what is unusual may be refused
                told = f"refused: {error}"[:120]
            else:
                held = worst.moved <= bound
                told = f"worst {worst.moved:.10g} C, found after {worst.found} of {each} tries, {worst.refused} refused"
            failed += not held
            if speaks:
                print(f"{'held' if held else 'FAILED':7} {place:10} {mode:9} {name:28} {told}", flush=True)
    return failed


def _one_of_two(rank: int, folder: str, place: str, names: list[str], each: int, seed: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    failed = _searched(place, names, each, seed)
    if rank == 0:
        (File(folder) / "failed").write_text(str(failed))
    dist.destroy_process_group()


def _in_two_processes(*what: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_one_of_two, args=(folder, *what), nprocs=2)
        return int((File(folder) / "failed").read_text())


def main(words: Sequence[str] | None = None) -> int:
    """Search every path in every placement; 0 if nothing moves a sum by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=2 * len(PATHS) * len(PLACES) * 20, help="over all searches together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--places", nargs="*", choices=PLACES, default=[*PLACES])
    parser.add_argument("--only", default="", help="paths whose name contains this")
    args = parser.parse_args(words)
    names, start = [name for name in PATHS if args.only in name], time.time()
    searches = 2 * len(names) * len(args.places)
    each, failed = -(-args.tries // max(1, searches)), 0
    for place in args.places:
        run = _searched if PLACES[place] == 1 else _in_two_processes
        failed += run(place, names, each, args.seed)
    print(f"{failed} of {searches} searches failed; {each * searches} tries, seed {args.seed}, {time.time() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
