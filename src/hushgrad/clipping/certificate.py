"""The certificate of a sum in double precision: a proved bound on how far one record can move it, for any record and order of additions.

With u = 2^-53 and gamma(n) = n u / (1 - n u), B units of which each adds parts of weighted mass at most M C, and at most n roundings on
the way of any term into the sum, the sum of a data set and that of its neighbour differ by at most (1 + kappa) C,

    kappa = 6 gamma(n) B M + 6 gamma(n') B M²,

where n' is for a norm from Gram matrices. The page "Sums in floating point" has the proof. B is a public capacity, and M is chosen so that
kappa is at most 1e-4 for all sizes. So kappa is a constant, and no refusal reveals anything about the data's shapes.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from hushgrad import _check

if TYPE_CHECKING:
    from torch import Tensor

    from hushgrad.clipping.mass import Mass

KAPPA = 1e-4
_U = 2.0**-53
_DEEP, _AT_ONCE = 256, 4096  # terms that a kernel, and torch, add up before adding to the sum: DEEP of _wide_of.h, and sums.py
_RELATIVE = 1 + 2.0**-20  # for the norm's own rounding, the quotient's and the product's
_OF_MASS = (
    2.0**-36
)  # gamma(2^17): what a sum over up to 131,072 terms may have lost of a squared norm, relative to the squared mass


def gamma(n: float) -> float:
    """N u / (1 - n u): the relative error of n roundings."""
    return n * _U / (1 - n * _U)


class Certificate(NamedTuple):
    """``capacity``: the most contributions to a step, ``here`` of them in this process; ``width``: d + p of the largest layer."""

    capacity: int
    here: int
    width: int = 0
    usual: int | None = None  # a public number of examples by which formulas are chosen; None: all that may be here
    above: bool = True  # False: use the computed norms, not upper bounds; the result must not be released

    def cap(self, parts: int) -> float:
        """M for units of so many parts: the usual cap, or the one that keeps kappa below 1e-4."""
        from hushgrad.clipping.mass import cap

        B = self.capacity
        depth = _AT_ONCE + _DEEP + B * parts // _DEEP + 2 * B + parts + self.width + 16
        M = min(cap(parts), KAPPA / 2 / (6 * gamma(depth) * B), sqrt(KAPPA / 2 / (6 * gamma(2 * parts + self.width + 16) * B)))
        if M < 1 or 2 * parts + self.width + 16 > 1 << 17:
            remedy = "Take smaller batches, shorter sequences, or certified=False."
            _check.fail(
                "certified",
                True,
                f"not to be asked of {B} contributions of {parts} parts to layers of width {self.width}",
                remedy,
            )
        return M

    def kappa(self, parts: int) -> float:
        """The bound for units of so many parts."""
        M, B = self.cap(parts), self.capacity
        depth = _AT_ONCE + _DEEP + B * parts // _DEEP + 2 * B + parts + self.width + 16
        return 6 * B * M * (gamma(depth) + gamma(2 * parts + self.width + 16) * M)

    def upper(self, name: str, square: Tensor, masses: dict[str, Mass]) -> Tensor:
        """An upper bound of the squared norm, from the computed one.

        Without a mass the norm itself is used: whether masses were recorded may depend on one record, but others' bounds must not.
        """
        mass = masses.get(name)
        if not self.above:
            return square
        if mass is None:
            return square * (_RELATIVE + _OF_MASS)
        return square * _RELATIVE + mass.rows.masked_fill(~mass.rows.isfinite(), 0.0).square() * _OF_MASS
