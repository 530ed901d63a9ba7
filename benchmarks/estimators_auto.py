"""What method="auto" chooses, beside this library's own gradient descent, on spambase-, MAGIC- and bank-like data.

    python benchmarks/estimators_auto.py [--data FOLDER] [--seeds 10]

FOLDER holds spambase/, magic/ and bank-marketing/ (default: ../shared/data beside the project). Accuracy on a fifth of the rows.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
from pathlib import Path

import numpy as np
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    print("| data | rows | eps | logistic gd | logistic auto | SVC gd | SVC auto |\n|---|---|---|---|---|---|---|")
    for name, place in FILES.items():
        if not (options.data / place).exists():
            continue
        X, y = columns(options.data / place)
        order = np.random.default_rng(0).permutation(len(y))
        X, y, cut = X[order], y[order], int(0.8 * len(y))
        shifted = (X - X.min(0)) / (np.ptp(X, axis=0) + 1e-12)
        for how, rows in (("centred", normalize(scale(X))), ("in [0, 1]", normalize(shifted))):
            for epsilon in (0.03, 0.1, 0.3, 1.0, 3.0):
                cells = []
                for kind in (DPLogisticRegression, DPLinearSVC):
                    for method in ("gd", "auto"):
                        options_ = {"data_norm": 1.0, "method": method, "classes": [0, 1]}
                        models = [
                            kind(epsilon, random_state=s, **options_).fit(rows[:cut], y[:cut]) for s in range(options.seeds)
                        ]
                        scores = [100 * model.score(rows[cut:], y[cut:]) for model in models]
                        cells.append(f"{np.mean(scores):.1f} ± {np.std(scores):.1f}")
                print(f"| {name} | {how} | {epsilon:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
