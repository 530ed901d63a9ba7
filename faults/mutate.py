"""Small defects in the privacy-critical files, one at a time: does a test see each? ``make mutate``.

A mutant is one file with one change: a comparison, sum or product turned into its neighbour, a condition negated, `and` for `or`, `max` for
`min`, a number made larger, a truth turned round, a statement left out. The tests that reach the statement run on it
(``mutant_trials.py``). A mutant that no test sees is a *survivor*: a test is missing, or the change changes
nothing (``harmless_mutants.py`` says why).

    python faults/mutate.py --only sampling/poisson.py --limit 50
    python faults/mutate.py --seconds 3000 --docs docs/reliability.md
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

from harmless_mutants import ANY, EQUIVALENT
from mutant_trials import caught_quickly, caught_slowly
from mutants import Mutant, mutants
from table import between, cell

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "hushgrad"
LAWS, GOLDEN = "tests/laws/test_", "tests/golden/test_"

ARGUMENTS = f"{LAWS}values_arguments.py"
SAMPLERS = [ARGUMENTS, f"{GOLDEN}sampling_batches.py", f"{LAWS}sampling_loader.py", "tests/statistics/test_sampling_promises.py"]
FILTERS = [f"{GOLDEN}accounting_filters.py", f"{LAWS}accounting_answers.py", f"{LAWS}accounting_pool.py"]
JOURNALS = [f"{LAWS}journal.py", f"{LAWS}journal_promises.py", f"{LAWS}journal_history.py", f"{LAWS}frames.py"]
CLIPPERS = [ARGUMENTS, f"{GOLDEN}clipping_clippers.py", f"{LAWS}clipping_clippers.py"]

# The privacy-critical files, and the quick tests that hold them; tests that start processes would run them on the file as it is.
TESTS = {
    "guarantee.py": [f"{LAWS}guarantee.py", f"{LAWS}printed.py"],
    "release/core.py": [f"{LAWS}release_core.py"],
    "release/run_state.py": [f"{LAWS}release_core.py"],
    "release/journal.py": JOURNALS,
    "release/journal_frames.py": JOURNALS,
    "release/journal_history.py": JOURNALS,
    "release/journal_place.py": JOURNALS,
    "release/key_reuse.py": JOURNALS,
    "noise/sensitivity.py": [f"{LAWS}noise_sensitivity.py"],
    "noise/participation.py": [f"{LAWS}noise_mechanisms.py"],
    "accounting/participation.py": [f"{LAWS}accounting_participation.py"],
    "accounting/calibration.py": [f"{LAWS}accounting_limits.py", f"{LAWS}accounting_answers.py"],
    "accounting/filters.py": FILTERS,
    "accounting/filter_rules.py": FILTERS,
    "sampling/poisson.py": SAMPLERS,
    "sampling/fixed_size.py": SAMPLERS,
    "sampling/cyclic_poisson.py": SAMPLERS,
    "sampling/balls_in_bins.py": SAMPLERS,
    "sampling/round_robin.py": SAMPLERS,
    "sampling/full_batch.py": SAMPLERS,
    "clipping/flat.py": CLIPPERS,
    "clipping/automatic.py": CLIPPERS,
    "clipping/adaptive.py": CLIPPERS,
    "clipping/per_layer.py": CLIPPERS,
    "estimators/objective.py": [f"{GOLDEN}estimators_objective.py"],
    "train/guard.py": [f"{LAWS}train_guard.py"],
    "train/books.py": [f"{LAWS}train_books.py", f"{LAWS}train_before.py"],
}
_HEAD = [
    "| file | mutants | change nothing | tried | seen | score | unseen (line, change) |",
    "|---|---:|---:|---:|---:|---:|---|",
]


def _known(mutant: Mutant) -> bool:
    """Whether it is known to change nothing."""
    mine = [into for file, text, into in EQUIVALENT if (file, text) == (mutant.file, mutant.text)]
    return ANY in mine or (bool(mine) and mutant.into in mine)


def _chosen(files: list[str], limit: int, seed: int) -> list[Mutant]:
    """So many mutants of each file, drawn by the seed; those that change nothing are left out."""
    found = []
    for file in files:
        alive = [mutant for mutant in mutants(PACKAGE, file) if not _known(mutant)]
        found += random.Random(seed).sample(alive, min(limit, len(alive)))
    return found


def examine(files: list[str], limit: int, seed: int, deadline: float) -> dict[Mutant, bool]:
    """Whether a test sees each of the chosen mutants that there was time for; survivors are told as they are found."""
    chosen, found = _chosen(files, limit, seed), dict[Mutant, bool]()
    tests = sorted({test for file in files for test in TESTS[file]})

    def said(index: int, word: str) -> None:
        mutant = chosen[index]
        path = PACKAGE / mutant.file
        found[mutant] = word == "caught" or (word == "unknown" and caught_slowly(mutant, path, TESTS[mutant.file], 600.0))
        if not found[mutant]:
            print(f"survived: {mutant.file}:{mutant.line} {mutant.change}: {mutant.text}   ->   {mutant.into}", flush=True)

    caught_quickly([(mutant, PACKAGE / mutant.file) for mutant in chosen], tests, deadline, said)
    return found


def _row(file: str, found: dict[Mutant, bool]) -> str:
    mine = {mutant: seen for mutant, seen in found.items() if mutant.file == file}
    unseen = ", ".join(f"{mutant.line} {mutant.change}" for mutant, seen in mine.items() if not seen)
    same = sum(map(_known, mutants(PACKAGE, file)))
    score = f"{sum(mine.values()) / len(mine):.1%}".replace("100.0%", "100%")
    print(f"{file}: {sum(mine.values())} of {len(mine)} caught", flush=True)
    return (
        f"| `{file}` | {len(mutants(PACKAGE, file))} | {same} | {len(mine)} | {sum(mine.values())} | {score} | {cell(unseen)} |"
    )


def _write(page: Path, rows: dict[str, str], command: str) -> None:
    """Rows of files that were not tried this time stay as they are."""
    before, inside, after = between(page, "mutate")
    old = {line.split("`")[1]: line for line in inside.splitlines() if line.startswith("| `")}
    known = [row for file in TESTS if (row := rows.get(file) or old.get(file))]
    written = f"Written by `{command}`" + (", and the rows of other files before." if len(known) > len(rows) else ".")
    page.write_text("\n".join([before, "", written, "", *_HEAD, *known, "", after]), encoding="utf-8")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TESTS, help="these files; the page's other rows stay")
    parser.add_argument("--limit", type=int, default=10_000, help="mutants of a file, drawn at random")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, help="the page whose table is written")
    options = parser.parse_args()
    os.chdir(ROOT)
    import hypothesis  # noqa: F401 (imported once, here, for all children)
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    files = options.only or list(TESTS)
    found = examine(files, options.limit, options.seed, time.monotonic() + options.seconds)
    rows = {file: _row(file, found) for file in files if any(mutant.file == file for mutant in found)}
    if options.docs:
        _write(options.docs, rows, f"python faults/mutate.py --limit {options.limit} --seed {options.seed}")
    print(f"{sum(found.values())} of {len(found)} mutants caught ({sum(found.values()) / max(1, len(found)):.1%}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
