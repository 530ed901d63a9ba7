"""CPU time to 97 % on MNIST at epsilon 3, delta 1e-5: hushgrad's recipe and Opacus, one after the other in one run, one thread.

    python benchmarks/time_to_accuracy.py --data FOLDER [--records 8000] [--steps 40] [--limit 120] [--validate] [--json out.json]

| row | what is timed |
|---|---|
| hushgrad | what ``--auto`` does: advice, features of the training images, a private mean, a linear model, the first proof |
| Opacus, the same features | the same model, rows, plan and rates, in each of its modes; features and mean count as much as above |
| Opacus, CNN on pixels | the network of its MNIST example with tanh, batches of 512, momentum 0.9, clip norm 0.1, all images |

Runs of the first two kinds have the noise for ``steps`` steps and are over after them. The CNN has the noise for 40 epochs (Tramer and
Boneh 2021), and its time is that of the first look, four an epoch, at which 97 % is reached; it is stopped after ``limit`` seconds.
Looks are not timed. ``records`` and ``steps`` were chosen with ``--validate``, which looks at 10,000 other training images.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hushgrad.advice import Advice, advise, read_codebook, rules
from hushgrad.recipes import Recipe
from hushgrad.recipes.allocator import keep_large_blocks
from hushgrad.recipes.data import mnist
from hushgrad.recipes.dataset import Data
from hushgrad.recipes.encoders import Encoder
from hushgrad.recipes.image_features import ImageFeatures
from hushgrad.recipes.learning import learn
from hushgrad.recipes.models import linear
from hushgrad.recipes.patches import CELLS, PATCHES
from hushgrad.recipes.scattering import MAPS
from hushgrad.train import Plan, fit

EPSILON, DELTA, GOAL = 3.0, 1e-5, 0.97
BOOK = Path(__file__).parent.parent / "accuracy" / "mnist.toml"
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """A line of the table: CPU seconds, the accuracy at their end, and what was done in them."""

    name: str
    seconds: float
    accuracy: float
    about: str


def minutes_for(records: int, steps: int) -> float:
    """How many minutes to ask for, so that the advice has ``steps`` steps."""
    batch, width = rules.batch_for("images", records=records), MAPS * 7 * 7 + PATCHES * CELLS**2
    tried = (float(minutes) for minutes in np.geomspace(0.005, 60.0, 400))
    return next(m for m in tried if rules.steps_for("images", batch=batch, width=width, minutes=m) >= steps)


def share_right(model: nn.Module, rows: Tensor, labels: Tensor) -> float:
    """The accuracy; the rows may be in half precision."""
    with torch.no_grad():
        return sum(
            (model(x.float()).argmax(1) == y).sum().item() for x, y in zip(rows.split(500), labels.split(500), strict=True)
        ) / len(rows)


@dataclass(frozen=True)
class Features:
    """What is advised, rows of training images and of those to look at; the CPU seconds that advice and training rows took."""

    advice: Advice
    data: Data
    seconds: float

    @property
    def looks(self) -> Labelled:
        """Rows and labels to look at."""
        return self.data.test.tensors  # type: ignore[return-value]


def encoded(images: Labelled, looks: Labelled, steps: int) -> Features:
    """The features that are advised, with a mean that is released before the run."""
    minutes = minutes_for(len(images[0]), steps)
    began = time.process_time()
    book = read_codebook(BOOK)
    advice = advise(book, epsilon=EPSILON, delta=DELTA, records=len(images[0]), minutes=minutes)
    encoder = Encoder.from_json(advice.tables["data"]["encoder"])
    assert isinstance(encoder, ImageFeatures)
    prepared = encoder.prepared(images[0].numpy())
    fitted = learn(encoder, prepared, np.arange(len(prepared)), records=len(prepared), secret=bytes(16))
    assert isinstance(fitted, ImageFeatures)
    train = TensorDataset(fitted.finished(prepared), images[1])
    seconds = time.process_time() - began
    test = TensorDataset(fitted.finished(fitted.prepared(looks[0].numpy())), looks[1])
    return Features(advice, Data(train=train, test=test, classes=10, encoder=fitted, names=book.classes), seconds)


def by_hushgrad(features: Features) -> Row:
    """The recipe of the advice."""
    advice, began = features.advice, time.process_time()
    recipe = Recipe.from_tables({**advice.recipe("-").tables(), "run": {"seed": 0}})
    model = linear(features.data)
    optimizer = recipe.make_optimizer(model)
    schedule = recipe.make_schedule(optimizer, advice.plan.steps)
    spent = fit(model, F.cross_entropy, optimizer, features.data.train, advice.plan, scheduler=schedule, progress=False, seed=0)
    assert spent.epsilon <= EPSILON
    seconds = features.seconds + time.process_time() - began
    return Row(
        "hushgrad",
        seconds,
        share_right(model, *features.looks),
        f"{advice.plan.steps} steps of {advice.plan.batch_size}; features {features.seconds:.1f} s",
    )


class Opacus:
    """Opacus' engine in one of its modes: an iterator over steps."""

    def __init__(self, mode: str, model: nn.Module, plan: Plan, data: TensorDataset, **sgd: float) -> None:
        from opacus import PrivacyEngine

        torch.manual_seed(0)
        self.model, self.ghost = model, mode == "ghost"
        optimizer = torch.optim.SGD(model.parameters(), **sgd)  # type: ignore[arg-type]
        loader: Any = DataLoader(data, batch_size=plan.batch_size)
        about = {"noise_multiplier": plan.noise_multiplier, "max_grad_norm": plan.max_grad_norm, "poisson_sampling": True}
        if self.ghost:
            about |= {"criterion": nn.CrossEntropyLoss(), "grad_sample_mode": "ghost"}
        made = PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader, **about)
        self.model, self.optimizer, *criterion, self.loader = made
        self.criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
        self.base = [group["lr"] for group in self.optimizer.param_groups]

    def steps(self, count: int, *, falling: bool) -> Iterator[int]:
        """Take ``count`` steps; yields the number of each when it is done."""
        done = 0
        while done < count:
            for x, y in self.loader:
                for group, rate in zip(self.optimizer.param_groups, self.base, strict=True):
                    group["lr"] = rate * (1 - done / count) if falling else rate
                self.optimizer.zero_grad()
                self.criterion(self.model(x.float()), y).backward()
                self.optimizer.step()
                done += 1
                yield done
                if done == count:
                    return


def on_features(mode: str, features: Features) -> Row:
    """The same recipe by Opacus."""
    advice, train, began = features.advice, features.data.train, time.process_time()
    engine = Opacus(mode, linear(features.data), advice.plan, train, lr=advice.tables["optimizer"]["lr"])
    for _ in engine.steps(advice.plan.steps, falling=True):
        pass
    seconds = features.seconds + time.process_time() - began
    return Row(f"Opacus {mode}, the same features", seconds, share_right(engine.model, *features.looks), "")


def network() -> nn.Module:
    """The network of Opacus' MNIST example, with tanh (Papernot et al. 2021)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def on_pixels(images: Labelled, looks: Labelled, limit: float) -> Row:
    """The CNN by the faster of Opacus' modes."""
    n, batch = len(images[0]), 512
    plan = Plan.dpsgd(epsilon=EPSILON, delta=DELTA, batch_size=batch, dataset_size=n, steps=40 * n // batch, max_grad_norm=0.1)
    data = TensorDataset(images[0].view(-1, 1, 28, 28) / 255, images[1])
    rates = {"lr": 0.5, "momentum": 0.9}
    mode = min(("hooks", "ghost"), key=lambda mode: _seconds(Opacus(mode, network(), plan, data, **rates)))
    engine = Opacus(mode, network(), plan, data, **rates)
    seconds, began = 0.0, time.process_time()
    for step in engine.steps(plan.steps, falling=False):
        now = time.process_time()
        if step % (n // batch // 4) == 0 or seconds + now - began > limit:
            seconds += now - began
            found = share_right(engine.model, looks[0].view(-1, 1, 28, 28) / 255, looks[1])
            if found >= GOAL or seconds > limit:
                break
            began = time.process_time()
    return Row(f"Opacus {mode}, CNN on pixels", seconds, found, f"{step * batch / n:.1f} epochs")


def _seconds(engine: Opacus) -> float:
    """Of six steps after a first one."""
    steps = engine.steps(7, falling=False)
    next(steps)
    began = time.process_time()
    for _ in steps:
        pass
    return time.process_time() - began


def table(rows: list[Row]) -> str:
    """Lines of a Markdown table."""
    lines = ["| | CPU s | accuracy | hushgrad's time over this | |", "|---|---|---|---|---|"]
    for row in rows:
        reached = "" if row.accuracy >= GOAL else "not reached in "
        ratio = f"{'below ' if reached else ''}{rows[0].seconds / row.seconds:.2f}"
        lines.append(f"| {row.name} | {reached}{row.seconds:.1f} | {100 * row.accuracy:.2f} | {ratio} | {row.about} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds mnist")
    parser.add_argument("--records", type=int, default=8_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=float, default=120.0, help="CPU seconds for the CNN")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--only", choices=("hushgrad", "features", "all"), default="all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_blocks()  # for everybody
    raw = mnist(path=str(options.data / "mnist"))
    images, labels = ((255 * raw.train.tensors[0]).round(), raw.train.tensors[1])
    looks = ((255 * raw.test.tensors[0]).round(), raw.test.tensors[1])
    if options.validate:
        looks, images, labels = (images[-10_000:], labels[-10_000:]), images[:-10_000], labels[:-10_000]
    first = (images[: options.records], labels[: options.records])
    features = encoded(first, looks, options.steps)
    makers: list[Callable[[], Row]] = [partial(by_hushgrad, features)]
    makers += [] if options.only == "hushgrad" else [partial(on_features, mode, features) for mode in ("hooks", "ghost")]
    makers += [partial(on_pixels, (images, labels), looks, options.limit)] if options.only == "all" else []
    rows: list[Row] = []
    for maker in makers:
        rows.append(maker())
        print(rows[-1], flush=True)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
