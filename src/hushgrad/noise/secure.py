r"""Noise that is safe against floating-point attacks: the real sum plus a real Gaussian, rounded once to a public grid.

The low bits of a floating-point sum S + z tell more about S than the theorem about real numbers allows (Mironov 2012; Holohan
and Braghin 2021). Here the output is

    h rint((S + scale Z) / h),      Z an exact standard Gaussian,   h = 2^floor(log2 scale) / 2^6, a public power of two:

it is *correctly rounded*, that is, computed as if S + scale Z were a real number.

**Formal guarantee.** Let S, numbers in double precision, have the L2 sensitivity D in real numbers. Rounding to a grid is a
function of the Gaussian mechanism's output, so the result is exactly as private as ``Gaussian(scale / D)``: no term for the grid
is due, S need not lie on it, and it may be coarse (h adds 2e-5 of the variance at most). Sums beyond 2^30 h, eight million times
the noise, are clamped, which moves two of them no further apart. Z has 2^-300 resolution; AES-256 is taken for a pseudorandom
permutation.

Not promised: that S *has* the sensitivity D in floating point, which is what certified sums are for; anything about correlated
rows, whose recursion would need an error bound that grows with the steps; anything about running time.

**How it is computed, and why that is exact.** Z is Box-Muller of infinitely many random bits, of which the first 62 + 32 (see
``_box_muller``) are used at once and further ones only in doubt. Let r be the radius of a pair (x, y), so that r <= |x| + |y|. A
computed z is off by at most

    | in single precision, with w = 2^-24 | 10.5 w (|x| + |y|) + 0.2 w  | if |x| + |y| <= 7.4 |
    | in double precision                 | 7.5e-10 (|x| + |y|) + 2e-10 | if |x| + |y| <= 7   |

*Proof, single precision.* v is a sum of two positive terms, each of at most two roundings, and one more: off by 3.01 w v. L = -ln u
is the sum of two terms that are not negative: k ln 2, off by 2 w, and -f p(f) with -1/2 <= f <= 0. The polynomial p >= 1 is off by
0.07 w as a series and by sum_i (2 i + 1) |c_i| 2^-i w = 3.2 w as computed (a term of degree i takes part in 2 i + 1 roundings). So
for a given v, L is off by 5.3 w L. From v it inherits 3.01 w if u = v, where r >= 1.17, and at most 1.45 x 3.01 w L if u = 1 - v.
The square root halves this and adds w: r is off by 5.9 w r. s is off by w s; in the polynomials of cosine and sine a term of
degree i in s² takes part in 3 i + 1 roundings, and both are off by 3 w in all. So |z - z'| <= r (3 + 5.9 + 1) w (1 + 1e-5).
The bits that are missing move v by 2^-64. If u = v, r moves by 2^-64 / (v r), and v >= 2^-40 since r <= 7.4; if u = 1 - v, it moves
by 2^-64 / r <= 2^-32: below 0.2 w. They move the angle by 2^-30 pi / 4, which is 0.013 w r.
*Double precision.* With w = 2^-53 the same sums are 4 and 3, which gives 12 w r: below 2e-15 r. The missing bits dominate:
2^-30 pi / 4 r = 7.32e-10 r for the angle, and at most 2^-64 e^(r²/2) / r or 2^-32.5, below 2e-10, for v.

The product and the sum in S / h + (scale / h) z are off by 2^-51 (2^30 + (scale / h) |z|) more. If the distance to the nearest half
exceeds all this the rounding is certain; else double precision is asked, then 256 further bits of radius and of angle, in 400-bit
arithmetic.
"""

from __future__ import annotations

import math
import threading

import mpmath
import numpy as np

from hushgrad import _check
from hushgrad.errors import CaptureError
from hushgrad.noise import _kernel
from hushgrad.noise._aes_ctr import KeyStream
from hushgrad.noise._box_muller import GROUP, GROUP_BYTES, PAIRS

GRID_BITS = 6
_EXTRA_BYTES = 64  # 256 further bits for the radius and for the angle, in doubt
_BLOCKS = GROUP_BYTES // 16
_MP = mpmath.MPContext()  # a context of its own: mpmath's global precision is shared by all threads
_MP.prec = 400
_ALONE = threading.Lock()  # functions raise the precision while they run, so two must not run at once


def grid(scale: float) -> float:
    """The public grid for noise of standard deviation ``scale``: a power of two, between scale/2⁷ and scale/2⁶.

    >>> grid(1.5) == 2.0**-6
    True
    """
    scale = _check.positive(scale=scale)
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)


class SecureNoise:
    """Adds Gaussians to sums and rounds the results correctly to the grid; numbers are addressed like those of a :class:`Source`."""

    def __init__(self, key: bytes) -> None:
        self._first = KeyStream(key, b"hushgrad secure")
        self._further = KeyStream(key, b"hushgrad exact")

    def write(self, step: int, index: int, start: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        """``out = h rint((out + scale Z) / h)``, with ``out`` in float64; if ``fresh``, of a sum that is 0."""
        if fresh:
            out[:] = 0.0
        h = grid(scale)
        for place in _kernel.KERNEL.draw_rounded(self._first, (step, index, start), scale / h, h, out):
            out[place] = self.exact(step, index, start + place, float(out[place]), scale / h, h)

    def exact(self, step: int, index: int, number: int, total: float, ratio: float, h: float) -> float:
        """One number from 318 bits of radius and 288 of angle; used where double precision leaves the rounding in doubt."""
        if not math.isfinite(total):
            raise CaptureError("A clipped sum is not finite. This is a defect of the capture; nothing was released.")
        group, place = divmod(number, GROUP)
        component, i = divmod(place, PAIRS)
        words = self._first.words(step, index, group * _BLOCKS, GROUP_BYTES).reshape(3, PAIRS)
        a, b, t = (int(w) for w in words[:, i])
        blocks = _EXTRA_BYTES // 16
        extra = self._further.words(step, index, (group * PAIRS + i) * blocks, _EXTRA_BYTES).tobytes()
        whole = min(max(total / h, -_kernel.LIMIT), _kernel.LIMIT)
        with _ALONE:
            value = _MP.mpf(whole) + _MP.mpf(ratio) * exact_pair(a, b, t, extra)[component]
            n = _MP.nint(value)
            if abs(abs(value - n) - 0.5) < _MP.mpf(2) ** -200:
                raise ArithmeticError("318 random bits do not decide a rounding: the key stream is broken")
        return float(n) * h


def exact_pair(a: int, b: int, t: int, extra: bytes) -> tuple[mpmath.mpf, mpmath.mpf]:
    """The pair whose first bits are the words a, b and t, with the rest from ``extra``, in 400-bit arithmetic."""
    more = [(int.from_bytes(extra[k : k + 32], "big") + _MP.mpf(0.5)) / 2**256 for k in (0, 32)]  # in (0, 1)
    v = ((a & 0x7FFFFFFF) * 2**31 + (b >> 1) + more[0]) / _MP.mpf(2) ** 63
    r = _MP.sqrt(-2 * (_MP.log1p(-v) if a >> 31 else _MP.log(v)))
    low = t & 0x3FFFFFFF
    low -= (low >> 29) << 30  # as a signed number of 30 bits
    theta = _MP.pi / 4 * ((low + more[1]) / _MP.mpf(2) ** 29)
    cosine, sine = _MP.cos(theta) * (-1 if t >> 31 else 1), _MP.sin(theta)
    return (r * sine, r * cosine) if t >> 30 & 1 else (r * cosine, r * sine)
