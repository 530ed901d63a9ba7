"""Squared norms from Gram matrices, and where not to trust them.

‖sum_t g_t x_t^T‖² = sum_{t,s} <x_t, x_s> <g_t, g_s>. Where the outer products cancel (inputs with a large mean, gradients without
one), the terms are far larger than their sum, and what rounding leaves of it may be anything, 0 as well. An example whose norm
is underestimated would be clipped to more than C. So a sum far below its terms is not believed: G itself is made, which rounding
changes no more than it changes the weighted sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["gram_sq_norm", "trusted"]

# In units of rounding: the part of its terms below which a sum is not believed. Of 70 kinds of inputs, most with large means, rounding
# moved the sum by at most 0.1 such units, so what is believed is good to about 1e-4. Terms of random signs are 1/T of their sizes.
_LOST = 1e3


def gram_sq_norm(x: Tensor, g: Tensor) -> Tensor:
    """‖sum_t g_t x_t^T‖² per example, from (B, T, d) and (B, T, p)."""
    gram_x, gram_g = torch.bmm(x, x.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2))

    def exact(index: Tensor) -> Tensor:
        made = [torch.linalg.vector_norm(torch.mm(g[i].t(), x[i])).square() for i in index.tolist()]
        return torch.stack(made)

    return trusted(gram_x, gram_g, exact)


def trusted(gram_x: Tensor, gram_g: Tensor, exact: Callable[[Tensor], Tensor]) -> Tensor:
    """sum_{t,s} of both (B, T, T) multiplied (the second is overwritten); of examples whose terms cancel, ``exact(index)``."""
    sizes = (gram_x.diagonal(dim1=1, dim2=2) * gram_g.diagonal(dim1=1, dim2=2)).sqrt_()
    norms = gram_g.mul_(gram_x).sum((1, 2))
    doubtful = (norms < _LOST * torch.finfo(norms.dtype).eps * sizes.sum(1).square_()).nonzero().flatten()
    if len(doubtful):
        norms[doubtful] = exact(doubtful)
    return norms
