"""Banded noise with cyclic sampling against DP-SGD where noise limits: small batches, many steps, the last iterate, a constant rate.

    python -m accuracy.mechanisms --data FOLDER [--seeds 10]

Adult, a linear model from 0, batches of 64, 2,048 steps. The number of bands is the planner's (``planner.compare``, public numbers only).
Each way has the best of three rates lr C = kappa B / rmse, found with other seeds on the last tenth of the training file; then all
seeds once on the test file. A difference is that of two runs with the same seed.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from accuracy.tasks import TASKS
from hushgrad import planner
from hushgrad.planner import Candidate
from hushgrad.recipes import evaluate
from hushgrad.recipes.dataset import Data
from hushgrad.train.fitting import fit

EPSILONS, KAPPAS, BATCH, STEPS, CLIP = (0.5, 2.0, 8.0), (0.1, 0.3, 1.0), 64, 2048, 0.5
RESULTS = Path(__file__).parent / "mechanisms.json"


def candidates(epsilon: float, records: int) -> dict[str, Candidate]:
    """DP-SGD and the best of the banded plans, as the planner ranks them."""
    found = planner.compare(epsilon=epsilon, delta=1e-5, dataset_size=records, batch_size=BATCH, steps=STEPS, max_grad_norm=CLIP)
    banded = next(c for c in found if c.name.startswith("Banded"))
    return {"DP-SGD": next(c for c in found if c.name == "DP-SGD"), banded.name: banded}


def accuracy(candidate: Candidate, kappa: float, train: Any, test: Any, *, width: int, seed: int) -> float:
    """Test accuracy of the last iterate."""
    model = nn.Linear(width, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    rate = kappa * BATCH / (candidate.rmse * CLIP)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    fit(model, F.cross_entropy, optimizer, train, candidate.plan, progress=False, seed=seed)
    return float(evaluate(model, test)["test_accuracy"])


def best_rate(candidate: Candidate, data: Data, *, seeds: int) -> float:
    """Kappa with the best mean on the last tenth of the training rows."""
    cut = len(data.train) * 9 // 10
    train, held = (TensorDataset(*(t[part] for t in data.train.tensors)) for part in (slice(cut), slice(cut, None)))
    width = data.train.tensors[0].shape[1]
    means = {k: mean(accuracy(candidate, k, train, held, width=width, seed=1000 + s) for s in range(seeds)) for k in KAPPAS}
    return max(means, key=lambda kappa: means[kappa])


def measure(data: Data, epsilon: float, seeds: int) -> dict[str, Any]:
    """The accuracies of both ways, seed by seed."""
    row: dict[str, Any] = {"epsilon": epsilon}
    width = data.train.tensors[0].shape[1]
    for name, candidate in candidates(epsilon, len(data.train)).items():
        kappa = best_rate(candidate, data, seeds=2)
        values = [accuracy(candidate, kappa, data.train, data.test, width=width, seed=seed) for seed in range(seeds)]
        row[name] = {"kappa": kappa, "rmse": candidate.rmse, "accuracy": values}
        print(epsilon, name, kappa, f"{mean(values):.4f}", flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Lines of a Markdown table: means, and the mean difference with its standard error."""
    lines = ["| epsilon | DP-SGD | banded | bands | banded minus DP-SGD | predicted noise |", "|---|---|---|---|---|---|"]
    for row in rows:
        plain = row["DP-SGD"]
        name = next(key for key in row if key.startswith("Banded"))
        banded = row[name]
        gains = [100 * (b - p) for b, p in zip(banded["accuracy"], plain["accuracy"], strict=True)]
        error = stdev(gains) / math.sqrt(len(gains))
        figures = [f"{100 * mean(way['accuracy']):.2f}" for way in (plain, banded)]
        bands = name.removeprefix("Banded(").removesuffix(")")
        ratio = banded["rmse"] / plain["rmse"]
        lines.append(
            f"| {row['epsilon']:g} | {figures[0]} | {figures[1]} | {bands} | {mean(gains):+.2f} ± {error:.2f} | x {ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


_PAGE = """
## Correlated noise with amplification

Where noise limits a model (adult, batches of 64, 2,048 steps, a constant rate, the last iterate), banded noise with cyclic sampling beside
DP-SGD at the same budget; test accuracy, mean of {seeds} seeds. The planner chose the number of bands; each way has the best of three
rates, found with other seeds on a tenth of the training rows. The last column is the planner's prediction of the noise in the weights.
`python -m accuracy.mechanisms --data FOLDER`

{table}"""


def page() -> str:
    """The section of docs/accuracy.md, from the figures of the last time."""
    rows = json.loads(RESULTS.read_text())
    return _PAGE.format(seeds=len(rows[0]["DP-SGD"]["accuracy"]), table=table(rows))


def main() -> None:
    """Run, keep the figures; ``make accuracy`` puts them on its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = TASKS["adult"].load(options.data)[0](0, 1.0)
    rows = [measure(data, epsilon, options.seeds) for epsilon in EPSILONS]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
