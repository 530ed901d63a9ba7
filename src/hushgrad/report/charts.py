"""Small line charts as SVG: no script, no inline style, colours from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from hushgrad._printed import at_least, at_most

_WIDTH, _HEIGHT = 360.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 22.0, 10.0, 42.0
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(x: float | str | None, digits: int = 3) -> str:
    """A number formatted for people: 1200000 is 1.2 million, 1e-06 is 10⁻⁶.

    >>> number(0.000001), number(60000), number(2.5e9), number(float("inf"))
    ('10⁻⁶', '60,000', '2.5 billion', '∞')
    """
    if x is None or x != x:
        return "–"
    if isinstance(x, str) or math.isinf(x):  # infinity comes as a word from JSON
        return "∞"
    for size, word in ((1e9, " billion"), (1e6, " million")):
        if abs(x) >= size and abs(x) < 1e15:
            return f"{x / size:.{digits}g}{word}"
    if 1000 <= abs(x) < 1e15 and float(x).is_integer():
        return f"{x:,.0f}"
    if abs(x) >= 10**digits and abs(x) < 1e6:
        return f"{x:,.0f}"
    if x and (abs(x) < 1e-3 or abs(x) >= 1e15):
        mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        power = f"10{str(int(exponent)).translate(_SUPERSCRIPT)}"
        return power if mantissa == "1" else f"{mantissa}·{power}"
    return f"{x:.{digits}g}"


def upper(x: float | str | None, digits: int = 3) -> str:
    """:func:`number` of an epsilon or a delta, rounded up.

    >>> upper(2.99964, 4), upper(1e-6), upper("inf"), upper(None)
    ('3', '10⁻⁶', '∞', '–')
    """
    return _outwards(x, digits, at_most)


def lower(x: float | str | None, digits: int = 3) -> str:
    """:func:`number` of what is left of a budget, rounded down."""
    return _outwards(x, digits, at_least)


def _outwards(x: float | str | None, digits: int, printed: Callable[[float, int], str]) -> str:
    if x is None or isinstance(x, str) or not math.isfinite(x):
        return number(x)
    return printed(x, digits) if abs(x) >= 1e6 else number(float(printed(x, digits)), digits)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One line over one axis; with an optional mark (where the plan is), limit (a budget), and dashed second line."""

    title: str
    words: str
    x: str
    y: str
    points: Sequence[tuple[float, float]]
    mark: tuple[float, float] | None = None
    limit: float | None = None
    log_x: bool = False
    log_y: bool = False
    until: float | None = None
    second: Sequence[tuple[float, float]] = ()

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Some of the points as text, for readers who cannot see the picture."""
        every = max(1, -(-len(self.points) // 12))
        shown = list(self.points[::every])
        if self.points and shown[-1] != self.points[-1]:
            shown.append(self.points[-1])
        return [(number(x), number(y, 4)) for x, y in shown]

    def svg(self) -> str:
        """The chart as SVG text."""
        seen = [*self.points, *self.second, *([self.mark] if self.mark else [])]
        across = [x for x, _ in seen] + ([self.until] if self.until else [])
        up = [y for _, y in seen] + ([] if self.limit is None else [self.limit])
        horizontal = _Axis.over(across, log=self.log_x, low=_LEFT, high=_WIDTH - _RIGHT)
        vertical = _Axis.over(up, log=self.log_y, low=_HEIGHT - _BOTTOM, high=_TOP)
        parts = [*_grid(horizontal, vertical), *self._content(horizontal.at, vertical.at)]
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(_text(middle, _HEIGHT - 6, self.x, "middle", "axis"))
        box = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}"'
        return f'<svg class="chart" {box} role="img" aria-label="{escape(self.words)}">{"".join(parts)}</svg>'

    def _content(self, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
        parts = []
        if self.limit is not None:
            level = y(self.limit)
            parts.append(f'<line class="limit" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{level:.1f}" y2="{level:.1f}"/>')
        if self.second:
            parts.append(f'<polyline class="second" points="{" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in self.second)}"/>')
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in self.points)
        if len(self.points) > 1:
            ends = x(self.points[0][0]), x(self.points[-1][0])
            floor = _HEIGHT - _BOTTOM
            parts.append(f'<polygon class="area" points="{ends[0]:.1f},{floor:g} {path} {ends[1]:.1f},{floor:g}"/>')
            parts.append(f'<polyline class="line" points="{path}"/>')
        mark = self.mark if self.mark else self.points[-1] if self.points else None
        if mark is not None:
            parts.append(f'<circle class="mark" cx="{x(mark[0]):.1f}" cy="{y(mark[1]):.1f}" r="4.5"/>')
        return parts


@dataclass(frozen=True)
class _Axis:
    """A scale from numbers to positions, with its ticks."""

    at: Callable[[float], float]
    ticks: list[float]

    @classmethod
    def over(cls, values: Sequence[float], *, log: bool, low: float, high: float) -> _Axis:
        first, last = min(values), max(values)
        if log:
            first, last = math.log10(first), math.log10(last)
            first, last = (first - 0.5, last + 0.5) if last - first < 1e-9 else (first, last)
            return cls(lambda v: low + (math.log10(v) - first) / (last - first) * (high - low), _log_ticks(first, last))
        first = min(0.0, first)
        last = last if last > first else first + 1
        return cls(lambda v: low + (v - first) / (last - first) * (high - low), _ticks(first, last))


def _ticks(first: float, last: float) -> list[float]:
    """Round numbers, about four of them."""
    raw = (last - first) / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    return [k * step for k in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1)]


def _log_ticks(first: float, last: float) -> list[float]:
    decades = last - first
    steps = (1,) if decades > 3 else (1, 3) if decades > 1.4 else (1, 2, 5) if decades > 0.7 else (1, 1.5, 2, 3, 5, 7)
    found = [m * 10.0**k for k in range(math.floor(first), math.ceil(last) + 1) for m in steps]
    found = [tick for tick in found if first - 1e-9 <= math.log10(tick) <= last + 1e-9]
    every = -(-len(found) // 6) if found else 1
    return found[::every]


def _grid(horizontal: _Axis, vertical: _Axis) -> list[str]:
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in vertical.ticks:
        y = vertical.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, number(tick), "end"))
    for tick in horizontal.ticks:
        parts.append(_text(horizontal.at(tick), floor + 17, number(tick), "middle"))
    parts.append(f'<line class="base" x1="{_LEFT:g}" x2="{right:g}" y1="{floor:g}" y2="{floor:g}"/>')
    return parts


def _text(x: float, y: float, words: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def smoothed(points: Sequence[tuple[float, float]], *, most: int = 48) -> list[tuple[float, float]]:
    """Means of neighbouring points if there are too many to tell apart, because single batches vary.

    >>> smoothed([(1, 0.0), (2, 4.0), (3, 2.0), (4, 6.0)], most=2)
    [(2, 2.0), (4, 4.0)]
    """
    size = -(-len(points) // most)
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def above(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The upper left corners of a staircase, and its end: the line through them is nowhere below the stairs.

    A run states for each step the epsilon of a later one, which is computed once for many steps.

    >>> above([(1, 0.5), (2, 0.5), (3, 0.8), (4, 0.8), (5, 0.9)])
    [(1, 0.5), (3, 0.8), (5, 0.9)]
    """
    corners = [now for before, now in zip([None, *points], points, strict=False) if before is None or now[1] != before[1]]
    return [*corners, *(points[-1:] if corners[-1:] != list(points[-1:]) else ())]


def bar(share: float, *, reserved: float = 0.0, words: str) -> str:
    """A bar that is filled to ``share`` (0..1), and then to ``reserved`` more in a lighter tone."""
    full = max(0.0, min(1.0, share))
    more = max(0.0, min(1.0 - full, reserved))
    over = " over" if share > 1 else ""
    return (
        f'<svg class="bar{over}" viewBox="0 0 200 8" preserveAspectRatio="none" role="img" aria-label="{escape(words)}">'
        f'<rect class="empty" width="200" height="8"/><rect class="more" width="{200 * (full + more):.1f}" height="8"/>'
        f'<rect class="full" width="{200 * full:.1f}" height="8"/></svg>'
    )
