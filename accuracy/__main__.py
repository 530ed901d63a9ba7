"""``make accuracy``: every row of docs/accuracy.md, measured by the code that ``hushgrad train --auto`` runs.

    python -m accuracy --data FOLDER [--only bank adult ...] [--seeds 5] [--docs docs/accuracy.md]

FOLDER holds the data sets as ``accuracy/tasks.py`` names them; a task whose files are missing keeps its rows of the last time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from accuracy.page import written
from accuracy.tasks import TASKS
from accuracy.training import measure
from hushgrad.recipes.allocator import keep_large_blocks

RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    """Run the tasks that were asked for, keep their figures, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--only", nargs="*", default=sorted(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="*")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures of several times are kept together")
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_blocks()
    for name in options.only:
        task = TASKS[name]
        if not (options.data / task.needs).exists():
            print(f"{name}: {task.needs} is not there; its rows stay as they were")
            continue
        data_of, plain = task.load(options.data)
        rows = {}
        for epsilon in options.epsilons or task.epsilons:
            rows[str(epsilon)] = measure(task, data_of, epsilon, range(options.seeds))
            print(
                name,
                epsilon,
                [f"{row['accuracy']:.4f}/{row['auc']:.4f}/{row['seconds']:.0f}s" for row in rows[str(epsilon)]],
                flush=True,
            )
            keep(options.results, name, rows, plain)
    if options.docs is not None:
        options.docs.write_text(written(json.loads(options.results.read_text())), encoding="utf-8")


def keep(place: Path, name: str, rows: dict[str, list[dict[str, float]]], plain: dict[str, float] | None) -> None:
    """Add a task's figures to those of other times."""
    known = json.loads(place.read_text()) if place.exists() else {}
    known[name] = {"plain": plain, "runs": {**known.get(name, {}).get("runs", {}), **rows}}
    place.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
