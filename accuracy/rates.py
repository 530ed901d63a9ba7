"""Banded noise beside DP-SGD where each takes a rate of its own: is a loss there the noise's, or that of choosing rates?

    python -m accuracy.rates --data FOLDER [--seeds 80]

The protocol was fixed before the first run, which was the only one: adult's first nine tenths are trained on, at eleven rates from 1 to 32,
by both ways, on seeds that nothing else has used. Through the mean test accuracies of a way goes a polynomial of degree four in the
logarithm of the rate, weighted by their errors; its top is what the way can reach with the best rate. The standard error of the difference
of tops comes from seeds drawn again with replacement, the same for both. What choosing costs is measured on the test rows: as many of them
as there were held rows choose a rate for each way, the others say what it gives; drawn anew 400 times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.mechanisms import EPSILONS, Rows, plans, right_rows, rows_of, trained
from accuracy.tasks import TASKS

RATES = tuple(2.0 ** (k / 2) for k in range(11))
FIRST, DEGREE, DRAWS = 5000, 4, 400
RESULTS = Path(__file__).parent / "rates.json"


def top(accuracies: np.ndarray) -> tuple[float, float]:
    """The highest point of the curve through the means over seeds, (seeds, rates), and its rate.

    >>> logs = np.log2(RATES)
    >>> height, rate = top(80 - (logs - 3) ** 2 + np.array([[-0.1], [0.1]]) * (1 + logs))
    >>> round(height, 6), round(rate, 2)
    (80.0, 8.0)
    """
    logs = np.log2(RATES)
    errors = accuracies.std(axis=0, ddof=1) / np.sqrt(len(accuracies))
    curve = np.polynomial.Polynomial.fit(logs, accuracies.mean(axis=0), DEGREE, w=1 / np.maximum(errors, 1e-9))
    fine = np.linspace(logs[0], logs[-1], 1001)
    heights = curve(fine)
    return float(heights.max()), float(2.0 ** fine[heights.argmax()])


def compared(plain: np.ndarray, banded: np.ndarray) -> tuple[float, float]:
    """Banded's top minus DP-SGD's, and its standard error over seeds."""
    rng = np.random.default_rng(27)
    drawn = [rng.integers(0, len(plain), len(plain)) for _ in range(DRAWS)]
    spread = np.std([top(banded[s])[0] - top(plain[s])[0] for s in drawn], ddof=1)
    return top(banded)[0] - top(plain)[0], float(spread)


def chosen(right: dict[str, np.ndarray], held: int) -> list[float]:
    """Banded minus DP-SGD in points where ``held`` of the rows choose the rate of each way, and the others tell; for each draw."""
    rng, gains = np.random.default_rng(28), []
    for _ in range(DRAWS):
        order = rng.permutation(right["DP-SGD"].shape[1])
        few, rest = order[:held], order[held:]
        means = {kind: rows[rows[:, few].mean(axis=1).argmax(), rest].mean() for kind, rows in right.items()}
        gains.append(100 * float(means["banded"] - means["DP-SGD"]))
    return gains


def measure(train: Rows, test: Rows, epsilon: float, seeds: range) -> dict[str, Any]:
    """All figures of one epsilon."""
    cut = len(train[0]) * 9 // 10
    first, held = ((train[0][part], train[1][part]) for part in (slice(cut), slice(cut, None)))
    found = plans(epsilon, cut)
    ways = {"DP-SGD": found["DP-SGD"], "banded": list(found.values())[-1]}
    by_seed: dict[str, np.ndarray] = {}
    by_row: dict[str, np.ndarray] = {}
    row: dict[str, Any] = {"epsilon": epsilon, "seeds": len(seeds)}
    for kind, plan in ways.items():
        weights = trained(plan, RATES, first, seeds)
        right = right_rows(weights, test)
        by_seed[kind], by_row[kind] = 100 * right.mean(axis=2), right.mean(axis=0)
        on_held = 100 * right_rows(weights, held).mean(axis=(0, 2))
        height, rate = top(by_seed[kind])
        best = int(on_held.argmax())
        curve = {"test": by_seed[kind].mean(axis=0).round(4).tolist(), "held": on_held.round(4).tolist()}
        row[kind] = {**curve, "top": round(height, 4), "rate": round(rate, 2), "chosen": RATES[best]}
        row[kind]["at chosen"] = round(float(by_seed[kind][:, best].mean()), 4)
        print(epsilon, kind, row[kind], flush=True)
    row["difference"], row["error"] = (round(x, 4) for x in compared(by_seed["DP-SGD"], by_seed["banded"]))
    gains = chosen(by_row, len(held[0]))
    row["choosing"] = [round(gain, 4) for gain in gains]
    return row


def page() -> str:
    """What the page on accuracy says of it, from the figures of the last time."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    lines = []
    for row in rows:
        plain, banded = row["DP-SGD"], row["banded"]
        gains = np.array(row["choosing"])
        lines.append(
            f"| {row['epsilon']:g} | {plain['top']:.2f} at {plain['rate']:.1f} | {banded['top']:.2f} at {banded['rate']:.1f} | "
            f"{row['difference']:+.2f} ± {row['error']:.2f} | {plain['chosen']:.1f}, {banded['chosen']:.1f}: "
            f"{banded['at chosen'] - plain['at chosen']:+.2f} | {gains.mean():+.2f} ± {gains.std(ddof=1):.2f}; {(gains < 0).mean():.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run once, keep the figures; ``make accuracy`` puts them on its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--seeds", type=int, default=80)
    options = parser.parse_args()
    data = TASKS["adult"].load(options.data)[0](0, 1.0)
    train, test = rows_of(data.train), rows_of(data.test)
    rows = [measure(train, test, epsilon, range(FIRST, FIRST + options.seeds)) for epsilon in EPSILONS]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(page())


if __name__ == "__main__":
    main()
