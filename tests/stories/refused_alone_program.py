"""Two processes, one of which meets something that the other does not: a refusal, a foreign error, Ctrl-C, its end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from patience import wait_until
from torch import Tensor, nn
from torch.utils.data import Dataset

from hushgrad.train import Checkpoint, Plan, make_private


class Model(nn.Module):
    """Two layers; ``fault`` is what its next pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.fault = nn.Linear(4, 6), nn.Linear(6, 2), ""
        self.register_buffer("kept", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.fault == "foreign":
            raise IndexError("record 17 is too long")
        if self.fault == "interrupted":
            raise KeyboardInterrupt
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "mixing":
            h = h - h.mean(0)
        if self.fault == "buffer":
            self.kept.add_(x.mean())
        return self.last(h.tanh())


class Data(Dataset):
    """Sixteen records; reading one of them may end in an error."""

    def __init__(self) -> None:
        self.fault = ""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if self.fault == "reading":
            raise OSError("a file is gone")
        return torch.sin(torch.arange(4.0) * (number + 1)), number % 2


class Run:
    """A loop whose process ``odd`` meets ``what`` in step ``at``."""

    def __init__(self, options: dict) -> None:
        self.what, self.at, self.odd = options["what"], options["at"], options["odd"] == dist.get_rank()
        self.closure, self.folder = options["closure"], Path(options["folder"])
        torch.manual_seed(0)
        self.model, self.data = Model(), Data()
        if options["sharded"]:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model.first)
            fully_shard(self.model)

    def whole(self) -> None:
        """The run to its end."""
        if self.odd and self.what == "begun":
            for p in self.model.parameters():
                p.requires_grad_(False)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=14, dataset_size=16, steps=4)
        self.private = make_private(self.model, optimizer, plan, seed=1)
        if self.what == "folder" and self.odd:
            (self.folder / "key.json").mkdir(parents=True)
        if self.what in ("folder", "saved", "unshared"):
            self.saved = Checkpoint(self.folder, self.private)
        loss = self.private.loss(nn.functional.cross_entropy)
        for step, batch in enumerate(self.private.loader(self.data)):
            struck = self.odd and step == self.at
            self.before(struck)

            def passes(batch=batch, struck=struck) -> Tensor:
                x, y = batch
                if struck and self.what == "examples":
                    x, y = x[:1], y[:1]
                for _ in range(2 if struck and self.what == "twice" else 1):
                    found = loss(self.model(x), y)
                    found.backward()
                return found

            if self.closure:
                optimizer.step(passes)
            else:
                passes()
                optimizer.step()
            if self.what == "saved":
                if struck:
                    self.private.state_dict = self._fails
                self.saved.save()
            if struck and self.what == "unshared":
                self.saved.save()

    def before(self, struck: bool) -> None:
        """What the odd one does before its passes."""
        if not struck:
            return
        self.model.fault = self.data.fault = self.what
        if self.what == "threads":
            torch.set_num_threads(3)
        if self.what == "frozen":
            self.model.last.bias.requires_grad_(False)
        if self.what == "leaked":
            for p in self.model.parameters():
                p.grad = torch.zeros_like(p)
        if self.what == "journal":
            self.private._journal.released = self._fails
        if self.what == "detached":
            self.private.detach()

    def _fails(self, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")


def main(options: dict) -> dict:
    """What this process raised; then it stays until the other one is done, which so is not woken by its end."""
    run, raised = Run(options), None
    try:
        run.whole()
    except BaseException as error:  # noqa: BLE001 (Ctrl-C as well)
        raised = error
    found = {"kind": type(raised).__name__, "says": str(raised)}
    found["steps"] = run.private.steps if hasattr(run, "private") else 0
    done = [Path(options["folder"]).with_name(f"found.{rank}") for rank in range(2)]
    replacing = Path(options["folder"]).with_name(f"new.{dist.get_rank()}")
    replacing.write_text(json.dumps(found))
    replacing.rename(done[dist.get_rank()])
    wait_until(lambda: all(path.exists() for path in done))
    os._exit(0)  # a message may still be open
