"""Which check of the deep audit catches which planted defect, how often it is wrong, and how close its bounds come.

    make audit-power        (RUNS=200 right runs, ONLY=text for some of the defects)

Writes the tables of docs/audit-power.md. Exit code 1 where a defect is missed, or more than one right run in 200 is refuted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from audit_figures import Figure, figures

from hushgrad.testing.defects import BEDS, DEFECTS, SERVERS, Defect, audited

ALLOWED = 1 / 200  # of the right runs


class Caught(NamedTuple):
    """What the audit of one defect found."""

    defect: Defect
    checks: tuple[str, ...]
    seconds: float


def attacked(defect: Defect) -> Caught:
    """The deep audit of one defect's run."""
    began = time.process_time()
    with defect.plant():
        report = audited(defect.bed)
    return Caught(defect, report.refuted_by, time.process_time() - began)


def false_alarms(runs: int) -> tuple[list[str], float]:
    """What right runs were refuted by, and the seconds of one audit."""
    began, found = time.process_time(), []
    beds = [*BEDS, *SERVERS]
    for run in range(runs):
        report = audited(beds[run % len(beds)], seed=run)
        if report.refuted:
            found.append(f"{beds[run % len(beds)]}: {', '.join(report.refuted_by)}")
        if run % 20 == 19:
            print(f"{run + 1} right runs, {len(found)} refuted", flush=True)
    return found, (time.process_time() - began) / max(1, runs)


def power_table(rows: list[Caught], alarms: list[str], runs: int, seconds: float) -> list[str]:
    """Who catches what."""
    missed = [row.defect.name for row in rows if not row.checks]
    lines = [
        f"{len(rows) - len(missed)} of {len(rows)} planted defects were caught; {len(alarms)} of {runs} right runs were "
        f"refuted{f' ({alarms[0]})' if alarms else ''}; one audit of a right run took {seconds:.1f} s of processor time.",
        "",
        "| defect | what it breaks | run | caught by | s |",
        "|---|---|---|---|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.defect.name} | {row.defect.law} | {row.defect.bed} | {', '.join(row.checks) or '**missed**'} | {row.seconds:.1f} |"
        )
    return lines


def figure_table(rows: list[Figure]) -> list[str]:
    """Bounds beside certified intervals; the attackers are explained below."""
    letters = {threat: "abcdefgh"[k] for k, threat in enumerate(dict.fromkeys(row.threat for row in rows))}
    lines = [
        "| run | certified | f-DP | GDP | larger / certified | s | with half the noise | attacker |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        fdp = "–" if row.fdp is None else f"{row.fdp:.2f}"
        share = max(row.gdp, row.fdp or 0.0) / row.upper
        halved = f"{row.halved:.2f}, {'refuted' if row.halved > row.upper else 'not refuted'}"
        lower = "–" if not row.lower else f"{row.lower:.3f}"
        lines.append(
            f"| {row.name} | [{lower}, {row.upper:.3f}] | {fdp} | {row.gdp:.2f} | {share:.2f} | {row.seconds:.1f} | {halved} "
            f"| {letters[row.threat]} |"
        )
    return [*lines, "", *(f"* {letter}: {threat}." for threat, letter in letters.items())]


def write(page: Path, section: str, lines: list[str]) -> None:
    """Replace what stands between the marks of ``section``."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no marks {begin} ... {end}.")
    page.write_text("\n".join([before + begin, "", *lines, "", end + after]), encoding="utf-8")


def shown(run: Callable[[], Caught]) -> Caught:
    """Run, and print a line."""
    row = run()
    print(f"{row.defect.name:58} {row.seconds:5.1f} s  {', '.join(row.checks) or 'MISSED'}", flush=True)
    return row


def main() -> int:
    """All defects, the right runs, the figures."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--runs", type=int, default=200, help="right runs")
    options.add_argument("--only", default="", help="defects whose name holds this text; no table is written")
    options.add_argument("--docs", type=Path, default=None, help="page whose tables are replaced")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    rows = [shown(partial(attacked, d)) for name, d in DEFECTS.items() if chosen.only in name]
    missed = [row.defect.name for row in rows if not row.checks]
    if chosen.only:
        return 1 if missed else 0
    alarms, seconds = false_alarms(chosen.runs)
    print(f"{len(alarms)} of {chosen.runs} right runs refuted {alarms}", flush=True)
    found = []
    for row in figures():
        print(row, flush=True)
        found.append(row)
    if chosen.docs is not None:
        write(chosen.docs, "audit-power", power_table(rows, alarms, chosen.runs, seconds))
        write(chosen.docs, "audit-figures", figure_table(found))
    print("all caught" if not missed else f"MISSED: {', '.join(missed)}")
    return 1 if missed or len(alarms) > ALLOWED * chosen.runs else 0


if __name__ == "__main__":
    sys.exit(main())
