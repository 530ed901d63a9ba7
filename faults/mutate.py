"""Small defects in the privacy-critical files, one at a time: does a test see each? ``make mutate``.

A mutant is one file with one change: a comparison, sum or product turned into its neighbour, a condition negated, `and` for `or`, `max` for
`min`, a number made larger, a truth turned round, a statement left out. The tests that reach the statement run on it
(``mutant_trials.py``). A mutant that no test sees is a *survivor*: a test is missing, or the change changes nothing (EQUIVALENT says why).

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
ANY = ""
# (file, line of code without its comment, what it becomes, as Python writes it, or ANY) -> why no test can see it.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "guarantee.py",
        "costs.append((_FORKED, 1))",
        "costs.append((_FORKED, 2))",
    ): "an event that nobody analysed is as infinite twice as once",
    (
        "sampling/balls_in_bins.py",
        "of_epoch = lru_cache(maxsize=2)(lambda epoch: parts(n, self.bins, draws.at(epoch * self.bins)))",
        "of_epoch = lru_cache(maxsize=3)(lambda epoch: parts(n, self.bins, draws.at(epoch * self.bins)))",
    ): "how many deals are remembered changes no deal",
    (
        "clipping/adaptive.py",
        "count = (wide <= here).to(wide.dtype).sub_(0.5).masked_fill_(wide < 0, 0.0).sum(0, keepdim=True)",
        "count = (wide <= here).to(wide.dtype).sub_(0.5).masked_fill_(wide < 0, 0.0).sum(0, keepdim=False)",
    ): "a number without dimensions meets the clip norm of one element in the same way",
    (
        "noise/sensitivity.py",
        "return int(nonzero[-1]) + 1 if len(nonzero) else 0",
        "return int(nonzero[-1]) + 1 if len(nonzero) else 1",
    ): ("without a coefficient nothing moves, by either way"),
    (
        "noise/sensitivity.py",
        "if banded_toeplitz_support(c) <= gap:",
        "if banded_toeplitz_support(c) < gap:",
    ): "the general sum below has the same value",
    (
        "noise/sensitivity.py",
        "squares = np.r_[0.0, np.cumsum(np.square(c))]",
        "squares = np.r_[1.0, np.cumsum(np.square(c))]",
    ): "nobody reads the first of them",
    (
        "noise/sensitivity.py",
        "return float(np.sqrt(sum(squares[n - i] for i in range(0, pattern.times * gap, gap) if i < n)))",
        "return float(np.sqrt(sum((squares[n - i] for i in range(0, pattern.times * gap, gap) if i <= n))))",
    ): "the column after the last one is empty",
    ("noise/sensitivity.py", "blocks = -(-n // gap)", "blocks = -(-n * gap)"): "more room for zeros",
    **{
        (
            "noise/sensitivity.py",
            "total[pattern.times :] -= total[: -pattern.times].copy() if pattern.times < blocks else 0.0",
            f"total[pattern.times:] -= total[:-pattern.times].copy() if pattern.times {wrong}",
        ): "with as many participations as blocks there is nothing to take away from"
        for wrong in ("<= blocks else 0.0", "< blocks else 1.0")
    },
    (
        "noise/sensitivity.py",
        "if pattern.gap == 1 and pattern.times >= n:",
        "if pattern.gap == 1 and pattern.times > n:",
    ): "the dynamic programme has the same value",
    (
        "noise/sensitivity.py",
        "return float(np.sqrt(best[0, pattern.times]))",
        "return float(np.sqrt(best[1, pattern.times]))",
    ): "both rows are the same",
    ("accounting/filter_rules.py", "high = 1.0", "high = 2.0"): "where the search for rho begins",
    ("accounting/filter_rules.py", "high *= 4.0", "high *= 5.0"): "where the search for rho begins",
    (
        "accounting/filter_rules.py",
        "return ZCDPLoss(1.0 / inverse).epsilon(delta) <= epsilon",
        "return ZCDPLoss(1.0 / inverse).epsilon(delta) < epsilon",
    ): "the search ends within 1e-9 of the border, on its safe side",
    (
        "accounting/filter_rules.py",
        "if self._bound <= 0.0 and order is None:",
        "if self._bound < 0.0 and order is None:",
    ): "no room is exactly 0",
    ("accounting/filter_rules.py", "if self._bound <= 0.0:", "if self._bound < 0.0:"): "no room is exactly 0",
    (
        "accounting/filter_rules.py",
        "return loss.renyi(order) / room if room > 0.0 else math.inf",
        "return loss.renyi(order) / room if room >= 0.0 else math.inf",
    ): "no room is exactly 0",
    (
        "accounting/filter_rules.py",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-2])",
    ): "where no order has room the filter is refused, whichever it is",
    (
        "accounting/filter_rules.py",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[1])",
    ): "where no order has room the filter is refused, whichever it is",
    (
        "accounting/filter_rules.py",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])",
        "return min((order for order, room in rooms.items() if room > HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])",
    ): "no room is exactly that share",
    (
        "accounting/filter_rules.py",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 15)]",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-15, 15)]",
    ): "one order more to choose from",
    (
        "accounting/filter_rules.py",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 15)]",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 16)]",
    ): "one order more to choose from",
    (
        "accounting/filter_rules.py",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 15)]",
        "around = [1.0 + (best - 1.0) / math.exp(0.01 * k) for k in range(-14, 15)]",
    ): "the same orders, from the other end",
    (
        "accounting/filter_rules.py",
        "good = [order for order, used in shares.items() if used <= (wide if wide <= 1.0 else max(least, 1.0))]",
        "good = [order for order, used in shares.items() if used <= (wide if wide < 1.0 else max(least, 1.0))]",
    ): "no share is exactly 1",
    (
        "release/run_state.py",
        "self._ahead = False",
        "self._ahead = True",
    ): "the rows so far are drawn once more, and are the same",
    (
        "release/core.py",
        "if self._plan.secure or (self._plan.certified and not self.placement.finishes):",
        "if self._plan.secure or (self._plan.certified or not self.placement.finishes):",
    ): "whether a sum is added to its noise or the noise to the sum changes what is held in memory, and no number",
    (
        "release/core.py",
        "if self._first is None:",
        "if not self._first is None:",
    ): "whether a sum is added to its noise or the noise to the sum changes what is held in memory, and no number",
    (
        "release/run_state.py",
        "self.source.z(step, index, count, out=count, scale=options.count_noise or 0.0)",
        "self.source.z(step, index, count, out=count, scale=options.count_noise or 1.0)",
    ): "the noise of a count is positive; the 0 is for the type",
    (
        "release/core.py",
        "drawn = {name: row for (name, _, _), row in zip(own, rows, strict=True)}",
        "drawn = {name: row for (name, _, _), row in zip(own, rows, strict=False)}",
    ): "a stream gives as many rows as it is asked for",
    **{
        ("accounting/calibration.py", line, ANY): "where the search begins; what it ends with is evaluated"
        for line in ("few = min(100, most)", "guess = math.floor(few * math.exp(min(max(-2 * g(few), -600.0), 30.0)))")
    },
    **{
        (
            "accounting/calibration.py",
            "found, neighbour = search.crossing(min(max(guess, low), high), tolerance)",
            f"found, neighbour = search.crossing({wrong}, tolerance)",
        ): "where the search begins; what it ends with is evaluated"
        for wrong in ("max(max(guess, low), high)", "min(min(guess, low), high)")
    },
    **{
        (
            "accounting/calibration.py",
            "guess = _check.number(start=start) if start is not None else 1.0 if bracket is None else math.sqrt(low * high)",
            f"guess = _check.number(start=start) if start is not None else {wrong}",
        ): "where the search begins; what it ends with is evaluated"
        for wrong in (
            "1.0 if not bracket is None else math.sqrt(low * high)",
            "2.0 if bracket is None else math.sqrt(low * high)",
            "1.0 if bracket is None else math.sqrt(low / high)",
        )
    },
    (
        "release/journal.py",
        "self._before, self._half = 0, False",
        "self._before, self._half = (1, False)",
    ): "whoever enters says where it was",
    **{
        ("release/journal_frames.py", line, wrong): "a file is cut once more to the length that it has"
        for line, wrong in (
            ("self._torn = False", "self._torn = True"),
            ("self._end, self._torn = _End(), False", "self._end, self._torn = (_End(), True)"),
        )
    },
    (
        "release/journal_frames.py",
        "self._begun, self._told = 0, False",
        "self._begun, self._told = (1, False)",
    ): "who becomes the writer says both, before anything is flushed",
    (
        "release/journal_frames.py",
        "self._block, self._flushed_at, self._took = 1, 0.0, 0.0",
        "self._block, self._flushed_at, self._took = (1, 1.0, 0.0)",
    ): "a clock's beginning means nothing",
    (
        "release/journal_frames.py",
        "if _MAGIC.startswith(data[: len(_MAGIC)]) and len(data) < len(_MAGIC):",
        "if _MAGIC.startswith(data[:len(_MAGIC)]) and len(data) <= len(_MAGIC):",
    ): "without a frame there is none to read",
    **{
        ("release/journal_place.py", line, wrong): reason
        for line, wrong, reason in (
            (
                'self._name, self._about = _OURS + secrets.token_hex(4), b""',
                "self._name, self._about = (_OURS + secrets.token_hex(5), b'')",
                "a longer name is as new",
            ),
            (
                "return zlib.crc32(boot_identity().encode()) or 1",
                "return zlib.crc32(boot_identity().encode()) or 2",
                "a number that is not 0",
            ),
            ('_REPLACE = getattr(os, "XATTR_REPLACE", 0)', "_REPLACE = getattr(os, 'XATTR_REPLACE', 1)", "Linux has it"),
            (
                "if any(a == b for a, b in zip(numbers, mine, strict=True)):",
                "if any((a == b for a, b in zip(numbers, mine, strict=False))):",
                "both are two numbers",
            ),
        )
    },
    ("train/guard.py", "_registrations, _changes = 0, count(1)", ANY): "only whether the number has changed is asked",
    (
        "train/books.py",
        "self.plan.noise.event(1.0, participation, self.plan.steps)",
        "self.plan.noise.event(2.0, participation, self.plan.steps)",
    ): "whether there is a theorem does not depend on how much noise there is",
    **{
        (
            "estimators/objective.py",
            "high = largest / gaussian_mu(epsilon - price, delta / total) * (1 + 1e-9)",
            f"high = largest / gaussian_mu(epsilon - price, delta / total) * {wrong}",
        ): "where the search ends; the root between is the same"
        for wrong in ("(1 + 1.000000001)", "(2 + 1e-09)")
    },
    (
        "estimators/objective.py",
        "sigma = low if excess(low) <= 0 else float(brentq(excess, low, high, xtol=1e-12 * high, rtol=1e-13))",
        "sigma = low if excess(low) < 0 else float(brentq(excess, low, high, xtol=1e-12 * high, rtol=1e-13))",
    ): "a search that begins at its root ends there",
    (
        "estimators/objective.py",
        "sigma = low if excess(low) <= 0 else float(brentq(excess, low, high, xtol=1e-12 * high, rtol=1e-13))",
        "sigma = low if excess(low) <= 0 else float(brentq(excess, low, high, xtol=1e-12 / high, rtol=1e-13))",
    ): "rtol ends the search; the root is the same within the margin that is added",
    **{
        (
            "estimators/objective.py",
            "low = largest / gaussian_mu(epsilon, delta) * (1 - 1e-9)",
            f"low = largest / gaussian_mu(epsilon, delta) {wrong}",
        ): "the noise is larger by 2e-9 of itself, if at all"
        for wrong in ("/ (1 - 1e-09)", "* (1 + 1e-09)")
    },
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
