"""From random words to Gaussians by Box-Muller, with its own logarithm, sine and cosine.

A *group* of 256 numbers comes from 3 x 128 words of 32 bits, A, B and T, one of each for every pair (x, y):

    v = (A' 2³¹ + B' + 1/2) / 2⁶³ in (0, 1/2),  u = v or 1 - v by A's top bit     A' = A mod 2³¹, B' = B div 2
    r = sqrt(-2 ln u),  angle = (π/4) s + a multiple of π/2 by T's two top bits   s = T's other bits, signed, in (-1, 1)
    x = r cos(angle),  y = r sin(angle)

Only IEEE additions, multiplications, square roots and integer operations occur, in a fixed order, so the C kernel and this
file give the same bits on every machine. ``-ln u`` is a sum of non-negative terms (never a difference), so it keeps its
relative accuracy at both ends: the radius reaches sqrt(2 · 64 ln 2) = 9.42 and never becomes 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PAIRS = 128
GROUP = 2 * PAIRS
GROUP_BYTES = 3 * 4 * PAIRS

# Chebyshev interpolants, lowest coefficient first: ln(1+f)/f on [-1/2, 0]; sin(πs/4)/s and cos(πs/4) in s² on [0, 1].
# Relative errors 2^-27.9, 2^-37.6, 2^-33.8 (float32) and 2^-56.8, 2^-68.8, 2^-75.3 (float64), before rounding.
LOG32 = (1.0, -0.5000012, 0.33325517, -0.2519568, 0.17544077, -0.34074646, -0.5900887, -1.9598706, -2.458962, -1.733612)
SIN32 = (0.7853982, -0.08074551, 0.0024903931, -3.6572394e-05, 3.0899668e-07)
COS32 = (1.0, -0.30842513, 0.015854325, -0.0003259386, 3.5297971e-06)
LOG64 = (
    1.0, -0.49999999999999023, 0.3333333333361931, -0.2499999996684111, 0.20000002031370526, -0.16666590679409987,
    0.14287606118661553, -0.12466842774185391, 0.1153620293486034, -0.05905289935040555, 0.3928002967931491,
    1.641118843588303, 7.760628433535017, 26.68059902636099, 72.58379957646765, 151.4655282034524, 239.6381824056025,
    277.58570995112507, 223.12436325902686, 111.5016083008295, 26.45998799395012,
)  # fmt: skip
SIN64 = (
    0.7853981633974483, -0.08074551218828079, 0.0024903945701927163, -3.6576204182147085e-05, 3.133616889192818e-07,
    -1.7572474204808876e-09, 6.948154114367228e-12, -2.0225906185890113e-14,
)  # fmt: skip
COS64 = (
    1.0, -0.30842513753404244, 0.015854344243815502, -0.0003259918869273893, 3.59086044858802e-06, -2.461136949485674e-08,
    1.1501157415860445e-10, -3.897903725211399e-13, 9.928366448096768e-16,
)  # fmt: skip


class _Format:
    """What differs between float32 and float64: the bit layout and the coefficients."""

    def __init__(self, real: Any, bits: Any, mantissa: int, bias: int, log: Any, sin: Any, cos: Any) -> None:
        self.real, self.bits, self.mantissa, self.bias = real, bits, mantissa, bias
        self.log, self.sin, self.cos = ([real(c) for c in series] for series in (log, sin, cos))
        self.fraction_mask = bits((1 << mantissa) - 1)
        self.half = bits((bias - 1) << mantissa)
        self.ln2, self.half_word = real(0.6931471805599453), real(0.5)


_FORMATS = {
    np.dtype(np.float32): _Format(np.float32, np.int32, 23, 127, LOG32, SIN32, COS32),
    np.dtype(np.float64): _Format(np.float64, np.int64, 52, 1023, LOG64, SIN64, COS64),
}


def _horner(coefficients: list[Any], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        total *= x
        total += c
    return total


def _radius(a: np.ndarray, b: np.ndarray, form: _Format) -> np.ndarray:
    """sqrt(-2 ln u) with u from the words a and b."""
    v = (a & np.uint32(0x7FFFFFFF)).view(np.int32).astype(form.real)
    v *= form.real(2.0**-32)
    low = (b >> np.uint32(1)).view(np.int32).astype(form.real)
    low += form.half_word
    low *= form.real(2.0**-63)
    v += low
    upper = (a.view(np.int32) >> np.int32(31)).astype(form.bits)  # all ones where u = 1 - v, so that ln u = ln(1 - v)
    pattern = v.view(form.bits)
    fraction = ((pattern & form.fraction_mask) | form.half).view(form.real)
    fraction -= form.real(1.0)
    halvings = form.bits(form.bias - 1) - (pattern >> form.bits(form.mantissa))
    halvings &= ~upper
    np.negative(v, out=v)
    f = _select(upper, v, fraction, form)
    halvings = halvings.astype(form.real)
    halvings *= form.ln2
    exponential = _horner(form.log, f)
    exponential *= np.negative(f, out=f)
    exponential += halvings
    exponential += exponential
    return np.sqrt(exponential, out=exponential)


def _angle(t: np.ndarray, form: _Format) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of a uniform angle from the words t."""
    s = ((t << np.uint32(2)) | np.uint32(2)).view(np.int32).astype(form.real)
    s *= form.real(2.0**-31)
    square = s * s
    sine = _horner(form.sin, square)
    sine *= s
    cosine = _horner(form.cos, square)
    sign = t.view(np.int32) & np.int32(-(1 << 31))
    cosine.view(form.bits)[...] ^= sign.astype(form.bits) << form.bits(8 * form.real().itemsize - 32)
    swap = -((t >> np.uint32(30)) & np.uint32(1)).view(np.int32).astype(form.bits)
    return _select(swap, sine, cosine, form), _select(swap, cosine, sine, form)


def _select(mask: np.ndarray, x: np.ndarray, y: np.ndarray, form: _Format) -> np.ndarray:
    """``x`` where the mask is all ones, ``y`` where it is 0: as bits, which is much faster than np.where."""
    difference = x.view(form.bits) ^ y.view(form.bits)
    difference &= mask
    difference ^= y.view(form.bits)
    return difference.view(form.real)


def gaussians(words: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` (float32 or float64, whole groups) from ``words`` (uint32, 384 for each group)."""
    form = _FORMATS[out.dtype]
    a, b, t = np.moveaxis(words.reshape(-1, 3, PAIRS), 1, 0)
    a, b, t = np.ascontiguousarray(a), np.ascontiguousarray(b), np.ascontiguousarray(t)
    radius = _radius(a, b, form)
    x, y = _angle(t, form)
    pairs = out.reshape(-1, 2, PAIRS)
    np.multiply(radius, x, out=pairs[:, 0])
    np.multiply(radius, y, out=pairs[:, 1])
