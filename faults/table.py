"""The tables of docs/reliability.md, which the commands write and nobody edits by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

__all__ = ["Row", "Trial", "between", "cell", "write_table"]

_HEAD = ["| what | tried | survived | deaths | seed | seen |", "|---|---:|---:|---:|---:|---|"]


class Trial(NamedTuple):
    """How one trial ended: whether the house survived, what was seen, and how many processes were killed in it."""

    survived: bool
    seen: str
    deaths: int = 0


@dataclass(frozen=True)
class Row:
    """One kind of fault: how often it was tried, how often the house survived, what was seen last, and who died."""

    name: str
    tried: int = 0
    survived: int = 0
    seen: str = ""
    deaths: int = 0

    def counted(self, survived: bool, seen: str, deaths: int = 0) -> Row:
        """With one more trial."""
        return replace(self, tried=self.tried + 1, survived=self.survived + survived, seen=seen, deaths=self.deaths + deaths)


def write_table(
    page: Path, section: str, rows: list[Row], command: str, seconds: float, *, seed: int | None = None, part: bool = False
) -> None:
    """Replace what stands between the marks of ``section`` in ``page``; with ``part``, add to the rows that are there."""
    before, inside, after = between(page, section)
    known = _rows_in(inside) if part else {}
    for row in rows:
        old, seeds = known.get(row.name, (Row(row.name), ()))
        counts = {name: getattr(row, name) + getattr(old, name) for name in ("tried", "survived", "deaths")}
        known[row.name] = replace(row, **counts), (*seeds, *([] if seed is None else [str(seed)]))
    total = sum(row.deaths for row, _ in known.values())
    written = f"Written by `{command}`" + (", and parts of it before" if part else f" in {seconds:.0f} s") + "."
    written += f" {total:,} processes were killed." if total else ""
    lines = [_line(*entry) for entry in known.values()]
    page.write_text("\n".join([before, "", written, "", *_HEAD, *lines, "", after]), encoding="utf-8")


def between(page: Path, section: str) -> tuple[str, str, str]:
    """What stands in ``page`` up to the first mark of ``section``, between its marks, and from the second one on."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    inside, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no marks {begin} ... {end}.")
    return before + begin, inside, end + after


def _line(row: Row, seeds: tuple[str, ...]) -> str:
    deaths = f"{row.deaths:,}" if row.deaths else ""
    return f"| {row.name} | {row.tried:,} | {row.survived:,} | {deaths} | {', '.join(seeds)} | {cell(row.seen)} |"


def _rows_in(text: str) -> dict[str, tuple[Row, tuple[str, ...]]]:
    """What :func:`write_table` wrote: name to (row, seeds)."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if line.startswith("| ") and len(cells) == len(_HEAD[0].split("|")) - 2 and line not in _HEAD:
            tried, survived, deaths = (int(cell.replace(",", "") or 0) for cell in cells[1:4])
            found[cells[0]] = Row(cells[0], tried, survived, cells[5], deaths), tuple(cells[4].split(", ") if cells[4] else ())
    return found


def cell(text: str) -> str:
    """One line without anything that a table or a stranger's machine would mind: paths are cut to their last part."""
    words = [word if "/" not in word else "…/" + word.rsplit("/", 1)[-1] for word in text.replace("|", "/ ").split()]
    line = " ".join(words)
    return line if len(line) <= 150 else line[:149] + "…"
