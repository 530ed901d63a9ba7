"""Squared norms from Gram matrices: ‖sum_t g_t x_t^T‖² = sum_{t,s} <x_t, x_s> <g_t, g_s>.

Where the outer products cancel (inputs with a large mean, gradients without one), the terms are far larger than their sum. Double
precision loses at most 1e-13 of the squared mass; an example for which that matters is heavy, and is formed separately.
"""

from __future__ import annotations

from torch import Tensor

from hushgrad._precision import widest_dtype
from hushgrad.clipping.mass import Mass, gram, outer_mass

_AT_ONCE = 1 << 21  # doubles of one Gram matrix of each kind at a time (16 MB)


def gram_sq_norm(x: Tensor, g: Tensor) -> tuple[Tensor, Mass]:
    """‖sum_t g_t x_t^T‖² and the mass for each example, from (B, T, d) and (B, T, p)."""
    B, T = x.shape[:2]
    norms, masses = x.new_zeros(2, B, dtype=widest_dtype(x.device)).unbind()
    step = max(1, _AT_ONCE // max(1, T * T))
    for start in range(0, B, step):
        some = slice(start, start + step)
        norms[some], mass = gram_sum(gram(x[some]), gram(g[some]))
        masses[some] = mass.rows
    return norms, Mass(masses, T)


def gram_sum(gram_x: Tensor, gram_g: Tensor) -> tuple[Tensor, Mass]:
    """The sum over t and s of both (B, T, T) multiplied (the second is overwritten), and the mass, from the diagonals."""
    mass = outer_mass(gram_x.diagonal(dim1=1, dim2=2), gram_g.diagonal(dim1=1, dim2=2))
    return gram_g.mul_(gram_x).sum(2).sum(1).clamp_(min=0), mass
