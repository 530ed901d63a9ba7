"""Noise on a public grid: the exact rounding of a real Gaussian, safe against floating-point attacks.

The low bits of a floating-point sum g + z tell more about g than the theorem about real numbers allows (Mironov 2012;
Holohan and Braghin 2021). Here the sum is rounded to a public grid h Z, and the noise is an integer number of grid steps:

    output = h (rint(g / h) + n),   n = rint(scale Z / h),   Z an exact standard Gaussian,   h = 2^floor(log2 scale) / 2^26.

n is computed in double precision with an error bound; where the bound cannot decide between two integers (about once in a
million numbers), further random bits are drawn and the number is computed again in 320-bit arithmetic. So n has exactly
the distribution of a rounded Gaussian (up to 2⁻¹⁹⁰ and the cipher), on every machine the same.

**Formal guarantee.** Let g have sensitivity D in L2 norm and d coordinates in all. Since rint(g / h) is whole, the output
is h rint((g' + scale Z) / h) with g' = h rint(g / h): a function of the Gaussian mechanism in real numbers on g', whose
sensitivity is at most D + h sqrt(d). It is therefore at least as private as ``Gaussian(noise_multiplier=s')``, where
s' = s / (1 + s 2⁻²⁶ sqrt(d)) for scale = s D (:func:`effective_noise_multiplier`).

Not promised: that g itself, a sum of clipped gradients in floating point, has the sensitivity of the real sum
(Casacuberta et al. 2022); anything about correlated rows, which are not on one grid; anything about running time.
"""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np

from hushgrad import _check
from hushgrad.noise._keystream import KeyStream
from hushgrad.noise._transform import GROUP, PAIRS

__all__ = ["GRID_BITS", "SecureNoise", "effective_noise_multiplier", "grid"]

GRID_BITS = 26
_GROUP_BYTES = 4 * 4 * PAIRS  # 64 bits of radius and 64 bits of angle for each pair
_EXTRA_BYTES = 64  # 256 further bits for each, in doubt
_MP = mpmath.MPContext()  # arithmetic of our own: the global precision belongs to whoever else uses mpmath, in other threads too
_MP.prec = 400
_LIMIT = 2.0**51  # whole numbers of grid steps that double precision adds exactly


def grid(scale: float) -> float:
    """The public grid for noise of standard deviation ``scale``: a power of two, between scale/2²⁷ and scale/2²⁶.

    >>> grid(1.5) == 2.0**-26
    True
    """
    scale = _check.positive(scale=scale)
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)


def effective_noise_multiplier(noise_multiplier: float, *, parameters: int) -> float:
    """The noise multiplier to account with: s / (1 + s 2⁻²⁶ sqrt(d)), for d parameters of the whole model.

    >>> round(1 - effective_noise_multiplier(1.0, parameters=10_000_000), 7)
    4.71e-05
    """
    s = _check.positive(noise_multiplier=noise_multiplier)
    return s / (1 + s * 2.0**-GRID_BITS * math.sqrt(_check.positive_int(parameters=parameters)))


class SecureNoise:
    """Whole numbers n = rint(ratio Z), addressed like the source's Gaussians."""

    def __init__(self, key: bytes) -> None:
        self._first = KeyStream(key, b"hushgrad secure")
        self._further = KeyStream(key, b"hushgrad exact")

    def write(self, step: int, index: int, start: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        """``out = h n`` if fresh, else ``out = h (rint(out / h) + n)``, with ``out`` in float64."""
        h = grid(scale)
        n = self.integers(step, index, start, out.size, scale / h)
        if not fresh:
            # Clamping moves two neighbouring sums no further apart, and depends on no secret but through g'.
            n += np.rint(np.clip(out / h, -_LIMIT, _LIMIT))
        np.multiply(n, h, out=out)

    def integers(self, step: int, index: int, start: int, count: int, ratio: float) -> np.ndarray:
        """rint(ratio Z) for ``count`` numbers from ``start`` on; ``ratio`` below 2²⁷."""
        first, last = start // GROUP, -(-(start + count) // GROUP)
        words = self._first.words(step, index, first * (_GROUP_BYTES // 16), (last - first) * _GROUP_BYTES)
        words = words.reshape(-1, 4, PAIRS).copy()
        z, error = _doubles(words)
        scaled = ratio * z
        n = np.rint(scaled)
        for place in zip(*np.nonzero(np.abs(scaled - n) >= 0.5 - ratio * error), strict=True):
            n[place] = self._exact(step, index, first, words, place, ratio)
        return n.reshape(-1)[start - first * GROUP :][:count]

    def _exact(self, step: int, index: int, first: int, words: np.ndarray, place: tuple[int, ...], ratio: float) -> float:
        """The rounding of one number from 320 bits of radius and of angle."""
        group, component, i = (int(p) for p in place)
        pair = (first + group) * PAIRS + i
        blocks = _EXTRA_BYTES // 16
        extra = self._further.words(step, index, pair * blocks, _EXTRA_BYTES).tobytes()
        a, b, t, s = (int(w) for w in words[group, :, i])
        ratio_z = ratio * _exact_pair((a << 32) | b, (t << 32) | s, extra)[component]
        n = _MP.nint(ratio_z)
        if abs(abs(ratio_z - n) - 0.5) < _MP.mpf(2) ** -200:
            raise ArithmeticError("320 random bits do not decide a rounding: the key stream is broken")
        return float(n)


def _doubles(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of Gaussians from the first bits, (groups, 2, PAIRS), and a bound of what rounding and missing bits change.

    The bits that are still missing move v by at most 2⁻⁶⁴, hence r by 2⁻⁶⁴ / (v r), and the angle by 2⁻⁶². log, sin, cos
    and sqrt are off by less than 4 units in the last place (2⁻⁵¹); with the few products between them 2⁻⁴⁸ r is generous.
    """
    a, b, t, s = (words[:, k].astype(np.float64) for k in range(4))
    upper = words[:, 0] >> 31 != 0
    v = (np.where(upper, a - 2.0**31, a) * 2.0**32 + b + 0.5) * 2.0**-64
    r = np.sqrt(-2 * np.where(upper, np.log1p(-v), np.log(v)))
    quadrant = words[:, 2] >> 30
    angle = math.pi / 4 * (((t - quadrant * 2.0**30) * 2.0**32 + s + 0.5) * 2.0**-61 - 1)
    cosine, sine = np.where(quadrant & 2, -np.cos(angle), np.cos(angle)), np.sin(angle)
    swap = quadrant & 1 != 0
    z = np.stack([r * np.where(swap, sine, cosine), r * np.where(swap, cosine, sine)], axis=1)
    error = 2.0**-48 * r + 2.0**-64 / (v * r)
    return z, error[:, None, :]


def _exact_pair(radius: int, angle: int, extra: bytes) -> tuple[Any, Any]:
    """The pair whose first 64 + 64 bits are ``radius`` and ``angle``, with the rest from ``extra``, to 400 bits."""
    more = [int.from_bytes(extra[k : k + 32], "big") + _MP.mpf(0.5) for k in (0, 32)]
    v = (_MP.mpf(radius & ((1 << 63) - 1)) + more[0] / 2**256) / 2**64
    r = _MP.sqrt(-2 * (_MP.log1p(-v) if radius >> 63 else _MP.log(v)))
    theta = _MP.pi / 4 * ((_MP.mpf(angle & ((1 << 62) - 1)) + more[1] / 2**256) / 2**61 - 1)
    cosine, sine = _MP.cos(theta) * (-1 if angle >> 63 else 1), _MP.sin(theta)
    return (r * sine, r * cosine) if angle >> 62 & 1 else (r * cosine, r * sine)
