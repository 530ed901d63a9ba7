"""Convex estimators on real data: accuracy at small epsilon, and fitting time beside scikit-learn's non-private fit.

    python benchmarks/estimators.py [--data FOLDER] [--seeds 10] [--quick] [--json PATH] [--table PATH]

FOLDER holds adult/ and mnist/ (default: ../shared/data beside the project, else scikit-learn's bundled sets).
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import normalize

from hushgrad.estimators import DPLogisticRegression

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
# Public ranges of the numeric columns, from the data set's description.
NUMERIC = {0: (17, 90), 2: (0, 1.5e6), 4: (1, 16), 10: (0, 1e5), 11: (0, 5000), 12: (1, 99)}
TARGETS = {"adult": {0.1: 82.8, 0.3: 83.6, 1.0: 84.2}, "mnist": {1.0: 89.5}}


def adult(folder: Path):
    def rows(name: str) -> list[list[str]]:
        with gzip.open(folder / "adult" / name, "rt") as file:
            cells = [[cell.strip() for cell in line.strip().rstrip(".").split(",")] for line in file]
        return [row for row in cells if len(row) == 15]

    train, test = rows("adult.data.gz"), rows("adult.test.gz")
    categories = {j: sorted({row[j] for row in train}) for j in range(14) if j not in NUMERIC}

    def encode(table: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
        columns = []
        for j in range(14):
            values = [row[j] for row in table]
            if j in NUMERIC:
                low, high = NUMERIC[j]
                columns.append((np.array(values, dtype=float)[:, None] - low) / (high - low))
            else:
                columns.append(np.array(values)[:, None] == np.array(categories[j])[None])
        return normalize(np.hstack(columns).astype(float)), np.array([row[14] == ">50K" for row in table])

    return *encode(train), *encode(test)


def mnist(folder: Path):
    def read(name: str, header: int) -> np.ndarray:
        with gzip.open(folder / "mnist" / name, "rb") as file:
            return np.frombuffer(file.read(), dtype=np.uint8, offset=header)

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        X = read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 784) / 255.0
        return normalize(X - X.mean(axis=1, keepdims=True)), read(f"{name}-labels-idx1-ubyte.gz", 8).astype(int)

    return *part("train"), *part("t10k")


def bundled(load):
    X, y = load(return_X_y=True)
    X, X_test, y, y_test = train_test_split(normalize(X - X.max() / 2), y, random_state=0)
    return X, y, X_test, y_test


def seconds(fit) -> float:
    start = time.process_time()
    fit()
    return time.process_time() - start


def accuracies(data, epsilon: float, seeds: int) -> np.ndarray:
    X, y, X_test, y_test = data
    models = (DPLogisticRegression(epsilon, delta=1e-5, data_norm=1.0, random_state=s) for s in range(seeds))
    return np.array([100 * model.fit(X, y).score(X_test, y_test) for model in models])


def measure(name: str, data, epsilons: list[float], seeds: int, repeats: int) -> dict:
    X, y, X_test, y_test = data
    plain = LogisticRegression(max_iter=1000)
    private = DPLogisticRegression(1.0, delta=1e-5, data_norm=1.0)
    times = [(seconds(lambda: plain.fit(X, y)), seconds(lambda: private.fit(X, y))) for _ in range(repeats)]
    row = {
        "non_private": 100 * plain.score(X_test, y_test),
        "sklearn_seconds": min(t for t, _ in times),
        "hushgrad_seconds": min(t for _, t in times),
        "accuracy": {},
    }
    for epsilon in epsilons:
        found = accuracies(data, epsilon, seeds)
        row["accuracy"][epsilon] = [float(found.mean()), float(found.std(ddof=1)) if seeds > 1 else 0.0]
        target = TARGETS.get(name, {}).get(epsilon)
        verdict = "" if target is None else f"  target {target}  {'PASS' if found.mean() >= target else 'MISS'}"
        print(f"{name:<14} eps {epsilon:<4} {found.mean():6.2f} +- {row['accuracy'][epsilon][1]:.2f}{verdict}", flush=True)
    ratio = row["hushgrad_seconds"] / row["sklearn_seconds"]
    print(
        f"{name:<14} fit {row['hushgrad_seconds']:.2f} s, scikit-learn non-private {row['sklearn_seconds']:.2f} s, ratio {ratio:.2f}"
    )
    return row


def table(row: dict) -> str:
    epsilons = list(row["accuracy"])
    head = "| | " + " | ".join(f"eps {e}" for e in epsilons) + " | non-private |"
    cells = " | ".join(f"{mean:.2f} ± {std:.2f}" for mean, std in row["accuracy"].values())
    return f"{head}\n|{'---|' * (len(epsilons) + 2)}\n| `DPLogisticRegression` | {cells} | {row['non_private']:.2f} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="bundled data and two seeds only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="write the Adult row as a Markdown table")
    args = parser.parse_args()
    results = {}
    if args.quick or not (args.data / "adult").is_dir():
        print("Real data not asked for or not found: using scikit-learn's bundled sets.")
        results["breast_cancer"] = measure("breast_cancer", bundled(load_breast_cancer), [0.3, 1.0], 2, 3)
        results["digits"] = measure("digits", bundled(load_digits), [1.0], 2, 1)
    else:
        results["adult"] = measure("adult", adult(args.data), [0.1, 0.3, 1.0], args.seeds, 5)
        results["mnist"] = measure("mnist", mnist(args.data), [0.1, 1.0], 2, 1)
        if args.table:
            args.table.parent.mkdir(parents=True, exist_ok=True)
            args.table.write_text(table(results["adult"]))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
