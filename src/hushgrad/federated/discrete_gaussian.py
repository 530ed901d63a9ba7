"""Discrete Gaussian noise: drawn by clients, and by the server in place of missing clients."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cache

import mpmath
import numpy as np

_BITS, _FINE = 62, 256  # of a first look, and of a second one where these do not decide
_TAIL = 14  # standard deviations, beyond which lies less than 2^-138


def discrete_gaussian(std: int, size: int, draw: Callable[[int], bytes]) -> np.ndarray:
    """``size`` independent numbers k with probability proportional to exp(-k² / (2 ``std``²)), from the bytes that ``draw`` gives.

    **Formal guarantee.** For uniform bytes, each number's distribution is this one up to 2^-130 in total variation. It is the first k
    at which the distribution function exceeds a uniform number u. 62 bits of u decide, unless they are also the first bits of a value
    of the function; then 256 bits do. Beyond 14 standard deviations nothing is drawn.

    Args:
        std: the distribution's parameter, which is its standard deviation up to exp(-19 ``std``²).
        size: how many.
        draw: gives that many random bytes.

        >>> import os
        >>> numbers = discrete_gaussian(256, 1000, os.urandom)
        >>> numbers.dtype, bool(200 < numbers.std() < 310)
        (dtype('int64'), True)
    """
    edges = _edges(std, _BITS)
    looks = np.frombuffer(draw(8 * size), dtype="<u8") >> np.uint64(64 - _BITS)
    numbers = np.searchsorted(edges, looks, side="right").astype(np.int64) - _TAIL * std
    for place in np.flatnonzero(np.isin(looks, edges)):
        numbers[place] = _looked_closer(std, int(looks[place]), draw)
    return numbers


@cache
def _edges(std: int, bits: int) -> np.ndarray:
    """The first ``bits`` of the distribution function at -14 std, ..., 14 std, but for the last, beyond which nothing is drawn."""
    return np.array([value >> (_FINE - bits) for value in _distribution(std)], dtype=np.uint64)


@cache
def _distribution(std: int) -> list[int]:
    """P(X <= k) 2^256 for k = -14 std, ..., 14 std - 1."""
    far = _TAIL * std
    context = mpmath.MPContext()  # of its own: the precision of mpmath itself belongs to everybody
    context.prec = _FINE + 64
    half = [context.exp(-context.mpf(k * k) / (2 * std * std)) for k in range(far + 1)]
    unit = context.mpf(2) ** _FINE / (2 * context.fsum(half[1:]) + 1)
    so_far, values = context.mpf(0), []
    for k in range(-far, far):
        so_far += half[abs(k)]
        values.append(int(context.floor(so_far * unit)))
    return values


def _looked_closer(std: int, look: int, draw: Callable[[int], bytes]) -> int:
    """The number whose first bits did not decide: compares 256 bits of it with 256 bits of the distribution function."""
    more = _FINE - _BITS
    point = (look << more) + (int.from_bytes(draw(_FINE // 8), "big") >> (_FINE - more))
    return bisect_right(_distribution(std), point) - _TAIL * std
