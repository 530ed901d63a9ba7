"""The page docs/compatibility.md, whose tables the zoo writes and nobody edits by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from zoo.examine import Finding, Verdict

__all__ = ["count", "verdict_of", "write"]

_ORDER = (Verdict.WRONG, Verdict.FOREIGN, Verdict.SLOW, Verdict.ATTRIBUTABLE, Verdict.RIGHTLY, Verdict.EXACT, Verdict.SKIPPED)
_SHOWN = (Verdict.EXACT, Verdict.RIGHTLY, Verdict.ATTRIBUTABLE, Verdict.WRONG, Verdict.FOREIGN, Verdict.SLOW, Verdict.SKIPPED)


def verdict_of(findings: list[Finding]) -> Verdict:
    """The worst of a model's verdicts over all relations of sizes; those at which it cannot run by itself do not count."""
    verdicts = {finding.verdict for finding in findings}
    return next(verdict for verdict in _ORDER if verdict in verdicts)


def count(findings: list[Finding]) -> dict[str, Counter[Verdict]]:
    """Models of each family, by verdict."""
    counts: dict[str, Counter[Verdict]] = {}
    for name, own in _by_model(findings).items():
        counts.setdefault(name.partition("/")[0], Counter())[verdict_of(own)] += 1
    return counts


def _by_model(findings: list[Finding]) -> dict[str, list[Finding]]:
    models: dict[str, list[Finding]] = {}
    for finding in findings:
        models.setdefault(finding.name, []).append(finding)
    return models


def write(page: Path, findings: list[Finding], missing: dict[str, str], *, asked: int) -> None:
    """Replace what stands between the marks of ``page``; ``asked`` comparisons are all that there are."""
    begin, end = "<!-- zoo: begin -->", "<!-- zoo: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no marks {begin} ... {end}.")
    whole = f"Written by `make zoo`: {len(findings):,} comparisons."
    part = (
        f"Written by `python -m zoo --findings` from several runs: {len(findings):,} of {asked:,} comparisons; every model at its usual "
        "sizes, not yet at all of the others."
    )
    lines = [whole if len(findings) >= asked else part, "", *_summary(findings)]
    for family, reason in missing.items():
        lines += ["", f"Not tried here: **{family}** ({reason})."]
    for family in count(findings):
        lines += ["", f"### {family}", "", *(_kinds(findings) if family == "layers" else _family(family, findings))]
    page.write_text("\n".join([before + begin, "", *lines, "", end + after]), encoding="utf-8")


def _summary(findings: list[Finding]) -> list[str]:
    lines = ["| family | models | " + " | ".join(v.value for v in _SHOWN) + " |", "|---|---:|" + "---:|" * len(_SHOWN)]
    for family, verdicts in count(findings).items():
        numbers = " | ".join(str(verdicts[v]) for v in _SHOWN)
        lines.append(f"| {family} | {sum(verdicts.values())} | {numbers} |")
    return lines


def _family(family: str, findings: list[Finding]) -> list[str]:
    own = {name: f for name, f in _by_model(findings).items() if name.partition("/")[0] == family}
    exact = [name.partition("/")[2] for name, f in own.items() if verdict_of(f) is Verdict.EXACT]
    lines = [f"Exact: {', '.join(exact)}."] if exact else []
    others = {name: f for name, f in own.items() if verdict_of(f) is not Verdict.EXACT}
    if others:
        lines += ["", "| model | verdict | at | what was said |", "|---|---|---|---|"]
        for name, all_of in others.items():
            worst = verdict_of(all_of)
            there = [f for f in all_of if f.verdict is worst]
            at = "all sizes" if len(there) == len(all_of) else ", ".join(f.relation for f in there)
            said = there[0].message or f"relative error {there[0].error:.1e}"
            lines.append(f"| {name.partition('/')[2]} | {worst.value} | {at} | {_cell(said)} |")
    return lines


def _kinds(findings: list[Finding]) -> list[str]:
    """Layers are counted by kind: each has dozens of drawn configurations."""
    kinds: dict[str, Counter[Verdict]] = {}
    for finding in findings:
        family, _, name = finding.name.partition("/")
        if family == "layers":
            kinds.setdefault(name.split()[0], Counter())[finding.verdict] += 1
    lines = ["| layer | comparisons | " + " | ".join(v.value for v in _SHOWN) + " |", "|---|---:|" + "---:|" * len(_SHOWN)]
    for kind, verdicts in kinds.items():
        lines.append(f"| {kind} | {sum(verdicts.values())} | " + " | ".join(str(verdicts[v]) for v in _SHOWN) + " |")
    return lines


def _cell(text: str) -> str:
    """One line without anything that a table or a stranger's machine would mind: paths are cut to their last part."""
    words = [word if "/" not in word else "…/" + word.rsplit("/", 1)[-1] for word in text.replace("|", "¦").split()]
    line = " ".join(words).replace("<", "&lt;")
    return line if len(line) <= 240 else line[:239] + "…"
