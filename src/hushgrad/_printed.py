"""How epsilons, deltas and bounds are printed: a printed guarantee must not promise more than holds.

All of hushgrad prints through this module. An upper bound (epsilon, delta, what was spent) is rounded up, a lower bound (an audit's, what
is left of a budget) down, an interval outwards. Rounding is exact, in decimal: with p the printed number, float(p) >= x for
:func:`at_most` and float(p) <= x for :func:`at_least`, whatever x is. A number that has no more digits than are printed is
printed unchanged, so 1e-05 stays 1e-05.
"""

from __future__ import annotations

import math
import re
import sys
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any


def at_most(x: float, digits: int = 4) -> str:
    """An upper bound in ``digits`` significant digits, rounded up.

    >>> at_most(2.99964), at_most(4.3772), at_most(1e-5), at_most(0.1), at_most(123456.7), at_most(math.inf)
    ('3', '4.378', '1e-05', '0.1', '123457', 'inf')
    """
    return _rounded(x, digits, ROUND_CEILING)


def at_least(x: float, digits: int = 4) -> str:
    """A lower bound in ``digits`` significant digits, rounded down.

    >>> at_least(2.99964), at_least(4.3772), at_least(1e-5), at_least(123456.7)
    ('2.999', '4.377', '1e-05', '123456')
    """
    return _rounded(x, digits, ROUND_FLOOR)


def above(exact: Fraction) -> float:
    """The least double that is not below ``exact``.

    >>> above(Fraction(3, 2)), above(Fraction(1) + Fraction(1, 10**30)) > 1
    (1.5, True)
    """
    if exact > Fraction(sys.float_info.max):
        return math.inf
    return found if Fraction(found := float(exact)) >= exact else math.nextafter(found, math.inf)


def below(exact: Fraction) -> float:
    """The largest double that is not above ``exact``."""
    return 0.0 - above(-exact)


def times(k: int, x: float) -> float:
    """The least double that is not below k x: what k steps of an upper bound cost together.

    >>> times(3, 0.5), times(3, math.inf), 3 * 0.7 < times(3, 0.7)
    (1.5, inf, True)
    """
    return above(k * Fraction(x)) if math.isfinite(x) else x


def _rounded(x: float, digits: int, how: str) -> str:
    x = float(x)
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    exact = Decimal(repr(x))  # the shortest decimal for this float, so that 0.1 is exactly a tenth
    if abs(x) >= 10.0**digits:  # an integer in full is easier to read than an exponent
        return str(int(exact.to_integral_value(how)))
    rounded = Context(prec=digits, rounding=how).plus(exact)
    return f"{float(rounded):.{digits}g}" if float(rounded) else f"{rounded:g}"


def plain(value: Any) -> Any:
    """``value`` in types that JSON has: lists for tuples and arrays, and strings for infinity and NaN."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if type(value).__module__ == "numpy":
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def size(count: float) -> str:
    """A number of bytes in readable units.

    >>> size(8_000_000)
    '8 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def reason(error: Exception) -> str:
    """The reason of an OS or decoding error, without its error number, to be used inside a sentence.

    >>> reason(FileNotFoundError(2, "No such file or directory", "x.csv"))
    'No such file or directory'
    >>> reason(UnicodeDecodeError("utf-8", "name".encode("utf-16"), 0, 1, "invalid start byte"))
    'it is UTF-16, not UTF-8 text. Save it as UTF-8'
    """
    if isinstance(error, UnicodeDecodeError):
        found = (
            "UTF-16, not UTF-8 text" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else f"not UTF-8 text (byte {error.start})"
        )
        return f"it is {found}. Save it as UTF-8"
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.sub(r" \(os error \d+\)", "", told).rstrip(".")
