"""The tables of docs/reliability.md, which the commands write and nobody edits by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Row", "write_table"]


@dataclass(frozen=True)
class Row:
    """One kind of fault: how often it was tried, how often the house survived, and what was seen last."""

    name: str
    tried: int = 0
    survived: int = 0
    seen: str = ""

    def counted(self, survived: bool, seen: str, times: int = 1) -> Row:
        """With one more trial (or several alike)."""
        return replace(self, tried=self.tried + times, survived=self.survived + (times if survived else 0), seen=seen)


def write_table(page: Path, section: str, rows: list[Row], command: str, seconds: float) -> None:
    """Replace what stands between the marks of ``section`` in ``page``."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no marks {begin} ... {end}.")
    lines = ["| what | tried | survived | seen |", "|---|---:|---:|---|"]
    lines += [f"| {row.name} | {row.tried:,} | {row.survived:,} | {_cell(row.seen)} |" for row in rows]
    written = f"Written by `{command}` in {seconds:.0f} s.\n"
    page.write_text("\n".join([before + begin, "", written, *lines, "", end + after]), encoding="utf-8")


def _cell(text: str) -> str:
    """One line without anything that a table or a stranger's machine would mind: paths are cut to their last part."""
    words = [word if "/" not in word else "…/" + word.rsplit("/", 1)[-1] for word in text.replace("|", "/ ").split()]
    line = " ".join(words)
    return line if len(line) <= 150 else line[:149] + "…"
