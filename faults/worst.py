"""The record that moves a clipped sum most, looked for on every path by which a gradient reaches the sum: ``make worst``.

Each path is a small model, a set of ordinary examples with aligned gradients (there is much to absorb), and one record that is
searched for. The loss of an example is <output, target>, so that the record chooses the gradient of the output freely.

    python faults/worst.py --tries 100000 --seed 7          # tries over all paths together
    python faults/worst.py --tries 2000 --only users
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hushgrad.audit.worst import Record, Worst, worst_record
from hushgrad.clipping import Adaptive, Automatic, Capture, Clipper, Flat, PerLayer
from hushgrad.clipping.certificate import Certificate
from hushgrad.events import Relation

BOUND = 1 + 1e-4
_OTHERS = 24


class Path(NamedTuple):
    """How a record gets into the sum. ``shapes``: of one record's inputs (or of ids, with their number) and of its target."""

    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    target: tuple[int, ...]
    ids: int = 0  # inputs are ids below this number
    clip: Clipper = Flat(1.0)
    how: str = "batch"  # or units, probes, micro-batches, rows
    dtype: torch.dtype = torch.float32
    others: int = _OTHERS


class _First(nn.Module):
    """The first output of a layer, from a single input that may be wanted three times."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(*[x] * self.times)
        return y[0] if isinstance(y, tuple) else y


class _Twice(nn.Module):
    """One layer on each position by itself: as many calls as positions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(part) for part in x.unbind(1)], 1)


class _Tied(nn.Module):
    """A table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 16), nn.Linear(16, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))  # type: ignore[no-any-return]


class _Scale(nn.Module):
    """A layer without a rule: the fallback's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Cells(nn.Module):
    """A cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), 8), []
        for part in x.unbind(1):
            h = self.cell(part, h)
            out.append(h)
        return torch.stack(out, 1)


def _linear() -> nn.Module:
    return nn.Linear(64, 64, bias=False)


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


_ADAPTIVE = Adaptive(1.0, batch_size=_OTHERS)
PATHS: dict[str, Path] = {
    "one position": Path(_linear, (64,), (64,)),
    "one position, small C": Path(lambda: nn.Linear(784, 1, bias=False), (784,), (1,), clip=Flat(1e-3)),
    "one position, few outputs": Path(lambda: nn.Linear(64, 10), (64,), (10,), clip=Flat(1e-2)),
    "two layers": Path(_small, (8,), (8,)),
    "positions, Gram": Path(_linear, (4, 64), (4, 64)),
    "positions, Gram, wide": Path(lambda: nn.Linear(128, 128), (16, 128), (16, 128)),
    "positions, kept": Path(lambda: nn.Linear(8, 8), (16, 8), (16, 8)),
    "positions, pieces": Path(lambda: nn.Linear(256, 256), (64, 256), (64, 256), others=8),
    "positions in two dimensions": Path(lambda: nn.Linear(8, 8), (4, 4, 8), (4, 4, 8)),
    "double precision": Path(_linear, (4, 64), (4, 64), dtype=torch.float64),
    "bfloat16": Path(lambda: nn.Linear(32, 32), (4, 32), (4, 32), dtype=torch.bfloat16),
    "convolution": Path(lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 6), (3, 6, 6)),
    "convolution, Gram": Path(lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 3, 3), (64, 3, 3), others=8),
    "convolution, 1 dimension": Path(lambda: nn.Conv1d(4, 4, 3, groups=2), (4, 10), (4, 8)),
    "convolution, 3 dimensions": Path(lambda: nn.Conv3d(2, 3, 2), (2, 4, 3, 4), (3, 3, 2, 3)),
    "transposed convolution": Path(lambda: nn.ConvTranspose2d(2, 3, 3), (2, 4, 4), (3, 6, 6)),
    "embedding": Path(lambda: nn.Embedding(12, 8), (8,), (8, 8), ids=12),
    "embedding, rows": Path(lambda: nn.Embedding(12, 8), (8,), (8, 8), ids=12, how="rows"),
    "embedding, padding": Path(lambda: nn.Embedding(12, 8, padding_idx=0), (8,), (8, 8), ids=12),
    "bag": Path(lambda: nn.EmbeddingBag(12, 8, mode="sum"), (8,), (8,), ids=12),
    "layer norm": Path(lambda: nn.LayerNorm(16), (8, 16), (8, 16)),
    "group norm": Path(lambda: nn.GroupNorm(2, 4), (4, 12), (4, 12)),
    "instance norm": Path(lambda: nn.InstanceNorm1d(4, affine=True), (4, 12), (4, 12)),
    "rms norm": Path(lambda: nn.RMSNorm(16), (8, 16), (8, 16)),
    "recurrent": Path(lambda: _First(nn.LSTM(8, 8, batch_first=True)), (6, 8), (6, 8)),
    "cell": Path(_Cells, (6, 8), (6, 8)),
    "attention": Path(lambda: _First(nn.MultiheadAttention(8, 2, batch_first=True), 3), (6, 8), (6, 8)),
    "fallback": Path(_Scale, (8, 16), (8, 16)),
    "called twice": Path(lambda: _Twice(nn.Linear(32, 32)), (2, 32), (2, 32)),
    "called often": Path(lambda: _Twice(nn.Linear(32, 32)), (8, 32), (8, 32)),
    "tied weights": Path(_Tied, (6,), (6, 12), ids=12),
    "users": Path(_small, (4, 8), (4, 8), how="units"),
    "users with many examples": Path(lambda: nn.Linear(16, 16), (32, 16), (32, 16), how="units"),
    "users over micro-batches": Path(lambda: nn.Linear(16, 16), (4, 16), (4, 16), how="units, micro-batches"),
    "users, positions": Path(lambda: nn.Linear(32, 32), (4, 4, 32), (4, 4, 32), how="units"),
    "users, tables": Path(lambda: nn.Embedding(12, 8), (4, 3), (4, 3, 8), ids=12, how="units"),
    "probes": Path(_linear, (64,), (2, 64), how="probes"),
    "probes, positions": Path(_linear, (4, 64), (2, 4, 64), how="probes"),
    "probes, fallback": Path(_Scale, (8, 16), (2, 8, 16), how="probes"),
    "micro-batches": Path(_linear, (4, 64), (4, 64), how="micro-batches"),
    "per layer": Path(_small, (4, 8), (4, 8), clip=PerLayer(1.0)),
    "automatic": Path(_linear, (4, 64), (4, 64), clip=Automatic(1.0)),
    "adaptive": Path(_linear, (4, 64), (4, 64), clip=_ADAPTIVE),
}  # fmt: skip


def search(name: str, *, tries: int, seed: int, certified: bool = False) -> Worst:
    """The worst record of one path, in clip norms."""
    path = PATHS[name]
    torch.manual_seed(seed)
    model = path.model().to(path.dtype)
    others = _examples(path, path.others * (path.inputs[0] if "units" in path.how else 1))
    first = _examples(path, path.inputs[0]) if "units" in path.how else tuple(t[0] for t in _examples(path, 1))
    clip_norm = path.clip.sensitivity(Relation.ADD_REMOVE)

    def sums(record: Record | None) -> dict[str, Tensor]:
        return clipped(path, model, others, record, certified=certified)

    return worst_record(sums, first, clip_norm=clip_norm, tries=tries, seed=seed)


def _examples(path: Path, count: int) -> tuple[Tensor, Tensor]:
    """Ordinary examples whose gradients point the same way; of units, one example of each."""
    inputs, target = (path.inputs[1:], path.target[1:]) if "units" in path.how else (path.inputs, path.target)
    x = torch.randint(path.ids, (count, *inputs)) if path.ids else 0.1 + 0.05 * torch.randn(count, *inputs)
    y = 1 + 0.1 * torch.randn(count, *target)
    if path.how == "probes":
        y[:, 1] *= -0.5
    return x, y


def clipped(
    path: Path, model: nn.Module, others: tuple[Tensor, Tensor], record: Record | None, *, certified: bool = False
) -> dict[str, Tensor]:
    """The clipped sum of the others and the record."""
    each = path.inputs[0] if "units" in path.how else 1
    x, y = others
    if record is not None:
        rows = record if "units" in path.how else tuple(t.unsqueeze(0) for t in record)
        x, y = torch.cat([x, rows[0]]), torch.cat([y, rows[1]])
    units = torch.arange(len(x)) // each if "units" in path.how else None
    certificate = Certificate(1024, 1024) if certified else None
    capture = Capture(model, loss_reduction="sum", check_isolation=False, certificate=certificate)
    capture.attach()
    try:
        # What the capture proves of a model it proves on ordinary data, once; the search is for records of later batches.
        _passes(path, model, capture, *others, None if units is None else torch.arange(len(others[0])) // each)
        capture.discard()
        capture._root._again = lambda structure: False  # type: ignore[method-assign]
        if path.how == "rows":
            capture.keep_rows(capture.scattered)
        for some in _parts(path, len(x)):
            _passes(path, model, capture, x[some], y[some], None if units is None else units[some])
            if "micro" in path.how:
                capture.fold(path.clip)
        return capture.collect(path.clip).raw_sums
    finally:
        capture.detach()


def _parts(path: Path, count: int) -> list[slice]:
    size = -(-count // 3) if "micro" in path.how else count
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _passes(path: Path, model: nn.Module, capture: Capture, x: Tensor, y: Tensor, units: Tensor | None) -> None:
    x, y = x if path.ids else x.to(path.dtype), y.to(path.dtype)
    signs = (1.0, -1.0) if path.how == "probes" else ()
    for k, sign in enumerate(signs):
        with capture.probe(sign):
            (model(x) * (sign * y[:, k])).sum().backward()
    if not signs:
        if units is not None:
            capture.units(units)
        (model(x) * y).sum().backward()


def main(words: Sequence[str] | None = None) -> int:
    """Search every path; 0 if nothing moves a sum by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=len(PATHS) * 200, help="over all paths together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--certified", action="store_true", help="sums in double precision with a certificate")
    parser.add_argument("--only", default="", help="paths whose name contains this")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    names, start, failed = [name for name in PATHS if args.only in name], time.time(), 0
    each = -(-args.tries // max(1, len(names)))
    for name in names:
        worst = search(name, tries=each, seed=args.seed, certified=args.certified)
        bad = not worst.moved <= BOUND
        failed += bad
        print(
            f"{'FAILED' if bad else 'held':7} {name:28} worst {worst.moved:.10g} C, found after {worst.found} of {each} tries",
            flush=True,
        )
    print(f"{failed} of {len(names)} paths failed; {each * len(names)} tries, seed {args.seed}, {time.time() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
