"""What method="auto" chooses, beside this library's own gradient descent, on spambase-, MAGIC- and bank-like data.

    python benchmarks/estimators_auto.py [--data FOLDER] [--seeds 10]

FOLDER holds spambase/, magic/ and bank-marketing/ (default: ../shared/data beside the project). Accuracy on a fifth of the rows; each
seed draws a split of its own as well as the noise, and the two methods are compared seed by seed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.preprocessing import normalize, scale

from hushgrad.estimators import DPLinearSVC, DPLogisticRegression

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
FILES = {"spambase": "spambase/spambase.dat.gz", "magic": "magic/magic.dat.gz", "bank": "bank-marketing/bank-full.csv.gz"}


def columns(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Numbers as they are, words as one column each; the last column is the label."""
    with gzip.open(path, "rt") as file:
        rows = [row for row in csv.reader(io.StringIO(file.read())) if row and not row[0].startswith(("@", "poutcome"))]
    found = []
    for values in list(zip(*rows, strict=True))[:-1]:
        try:
            found.append(np.array(values, dtype=float)[:, None])
        except ValueError:
            found.append((np.array(values)[:, None] == np.array(sorted(set(values)))[None]).astype(float))
    labels = np.array([row[-1].strip() for row in rows])
    return np.hstack(found), (labels == sorted(set(labels))[-1]).astype(int)


def scored(model: Any, X: np.ndarray, y: np.ndarray, seeds: int) -> np.ndarray:
    """Test accuracy for each seed, which draws a split of its own as well as the noise."""
    found = []
    for seed in range(seeds):
        order, cut = np.random.default_rng(seed).permutation(len(y)), int(0.8 * len(y))
        train, test = order[:cut], order[cut:]
        found.append(100 * clone(model).set_params(random_state=seed).fit(X[train], y[train]).score(X[test], y[test]))
    return np.array(found)


def compared(kind: type, epsilon: float, X: np.ndarray, y: np.ndarray, seeds: int) -> tuple[str, str]:
    """(the cells of a row, how auto compares): "+" and "-" beyond two standard errors of the paired differences."""
    gd, auto = (scored(kind(epsilon, data_norm=1.0, method=m, classes=[0, 1]), X, y, seeds) for m in ("gd", "auto"))
    difference, error = float((auto - gd).mean()), float((auto - gd).std(ddof=1)) / seeds**0.5
    verdict = "+" if difference > 2 * error else "-" if difference < -2 * error else "="
    return (
        f"{gd.mean():.1f} ± {gd.std():.1f} | {auto.mean():.1f} ± {auto.std():.1f} | {difference:+.2f} ± {2 * error:.2f}",
        verdict,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    titles = [f"{kind} {what}" for kind in ("logistic", "SVC") for what in ("gd", "auto", "auto - gd")]
    print(f"| data | rows | eps | {' | '.join(titles)} |\n|{'---|' * 9}")
    verdicts = []
    for name, place in FILES.items():
        if not (options.data / place).exists():
            continue
        X, y = columns(options.data / place)
        shifted = (X - X.min(0)) / (np.ptp(X, axis=0) + 1e-12)
        for how, rows in (("centred", normalize(scale(X))), ("in [0, 1]", normalize(shifted))):
            for epsilon in (0.03, 0.1, 0.3, 1.0, 3.0):
                found = [compared(kind, epsilon, rows, y, options.seeds) for kind in (DPLogisticRegression, DPLinearSVC)]
                verdicts += [verdict for _, verdict in found]
                print(f"| {name} | {how} | {epsilon:g} | {' | '.join(cells for cells, _ in found)} |", flush=True)
    counts = {sign: verdicts.count(sign) for sign in "+=-"}
    print(
        f"\nauto beside gd: {counts['+']} better, {counts['=']} alike, {counts['-']} worse (beyond two standard errors)",
        flush=True,
    )


if __name__ == "__main__":
    main()
