"""``hushgrad compare``: two runs side by side."""

from __future__ import annotations

from pathlib import Path

from hushgrad import _check
from hushgrad.cli._parser import Parser, say, table
from hushgrad.cli._waiting import waiting


def _parser() -> Parser:
    parser = Parser(
        "compare",
        "Two finished runs side by side: what each promises, how it was made, what it reached. Epsilons are computed again from the\n"
        "runs' ledgers, and at one delta where the runs' differ.",
        example="hushgrad compare runs/one runs/two",
    )
    parser.takes("first A", "the folder of a run")
    parser.takes("second B", "the folder of another run")
    return parser


def run(words: list[str]) -> int:
    """Compare; see ``hushgrad compare --help``."""
    options = _parser().parse(words)
    for run in (options.first, options.second):  # both are there before the first one's epsilon is computed
        if not (Path(run) / "plan.json").is_file():
            _check.fail("run", run, "to be the folder of a run, with plan.json in it", "Give the --out of hushgrad train.")
    with waiting("Computing both epsilons again"):
        from hushgrad.report import compare_runs

        found = compare_runs(options.first, options.second)
    return say(options, found.to_json(), table([("", *found.names), *found.rows]), "\n".join(found.remarks))
