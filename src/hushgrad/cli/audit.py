"""``hushgrad audit``: attack the plan of a run with canaries and bound its epsilon from below."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hushgrad._printed import at_least, at_most, reason
from hushgrad.cli._parser import Parser, UsageError, say, table, whole
from hushgrad.cli._paths import require_picture
from hushgrad.cli._waiting import waiting
from hushgrad.errors import ArgumentError

if TYPE_CHECKING:
    from hushgrad.audit import AuditReport


def _parser() -> Parser:
    parser = Parser(
        "audit",
        "Attack the plan of a run: canaries of known gradient go through the real path of capture, clipping, noise and optimizer.\n"
        "Prints lower bounds on epsilon beside the claimed one. It can refute the claim; it never proves privacy.\n"
        "With --deep the run's own model, data, optimizer and loss are audited, every layer, early and late steps, noise and batches.\n"
        "Exit code 0: not refuted; 1: refuted.",
        example="hushgrad audit runs/demo --deep",
    )
    parser.takes("path RUN", "folder of hushgrad train, or a plan.json")
    parser.takes("--canaries N", "how many (default 1000)", type=whole, default=1000)
    parser.takes("--steps N", "how many steps at most (default 50)", type=whole, default=50)
    parser.takes("--confidence P", "of the verdict and of each bound (default 0.95)", type=float, default=0.95)
    parser.takes("--seed N", "the same seed, the same report", type=whole, default=0)
    parser.flag("--deep", "audit the run itself: its model, data, noise and batches")
    parser.takes("--plot PATH", "save a picture (needs matplotlib)")
    parser.flag("--quiet", "no progress")
    return parser


def run(words: list[str]) -> int:
    """Audit; see ``hushgrad audit --help``."""
    options = _parser().parse(words)
    require_picture(options.plot)
    if options.deep:
        return _deep(options)
    text = _plan_text(Path(options.path))
    from hushgrad.audit import Auditor  # torch: imported after the words have been understood
    from hushgrad.train import Plan

    try:
        plan = Plan.from_json(text)
    except ArgumentError as error:
        raise UsageError(f"{options.path} holds no plan. Give the --out of hushgrad train, or a plan.json. {error}") from None
    asked = {name: vars(options)[name] for name in ("canaries", "steps", "confidence", "seed")}
    report = Auditor(plan, **asked, progress=not (options.quiet or options.json)).run()
    if options.plot:
        report.plot(options.plot)
    say(options, {**report.summary(), "plan_digest": plan.digest}, _text(report))
    return 1 if report.refuted else 0


def _deep(options: argparse.Namespace) -> int:
    if options.plot:
        raise UsageError("--plot shows the canaries' scores, which --deep has none of. Leave one of them out.")
    if not (Path(options.path) / "recipe.json").is_file():
        raise UsageError(
            f"Expected {options.path} to be a folder of hushgrad train, with its recipe.json: --deep runs its model again."
        )
    with waiting("Attacking the run"):
        from hushgrad.audit.folder_audit import audit_folder
        from hushgrad.train import Plan

        report = audit_folder(options.path, seed=options.seed, confidence=options.confidence)
        digest = Plan.from_json(_plan_text(Path(options.path))).digest
    say(options, {**report.to_json(), "plan_digest": digest}, report)
    return 1 if report.refuted else 0


def _plan_text(path: Path) -> str:
    file = path / "plan.json" if path.is_dir() else path
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} holds no plan that can be read ({reason(error)}). Give the --out of hushgrad train, or a plan.json."
        ) from None


def _text(report: AuditReport) -> str:
    rows = [("lower bound on epsilon", "", "assumes")]
    rows += [(bound.method, at_least(bound.epsilon), bound.assumption) for bound in report.lower_bounds]
    rows += [("claimed (upper bound)", at_most(report.claimed.epsilon), f"{report.claimed.event}, {report.claimed.relation}")]
    lines = [table(rows), ""]
    for threat in dict.fromkeys(bound.threat for bound in report.lower_bounds):
        methods = ", ".join(bound.method for bound in report.lower_bounds if bound.threat == threat)
        lines.append(f"{methods}: {threat}.")
    checks = table([("ok" if check.passed else "FAILED", check.name, check.seen) for check in report.checks], headed=False)
    return "\n".join([*lines, "", checks, "", str(report)])
