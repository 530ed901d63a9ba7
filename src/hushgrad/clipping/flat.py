"""Flat clipping: each example's whole gradient is scaled into one ball."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushgrad import _check, _papers
from hushgrad.clipping.clipper import Clipper
from hushgrad.events import Relation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Flat(Clipper):
    """Scale each example's gradient to norm at most ``max_grad_norm``: w_i = min(1, C / ‖G_i‖).

    **Formal guarantee.** ‖w_i G_i‖ <= C for every example, so the clipped sums of neighbours differ by at most C (add/remove,
    zero-out) or 2 C (replace-one).

    | squared norm | weight |
    |---|---|
    | 0 | 1 |
    | NaN or infinite | 0 |

        >>> import torch
        >>> Flat(1.0).weights(torch.tensor([0.25, 4.0, float("nan")]))
        tensor([1.0000, 0.5000, 0.0000])

    Reference: Abadi et al., "Deep learning with differential privacy" (CCS 2016), algorithm 1.
    """

    papers = (_papers.ABADI_2016_DEEP,)

    max_grad_norm: float

    @classmethod
    def examples(cls) -> tuple[Clipper, ...]:
        """One."""
        return (cls(0.3),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_grad_norm", _check.positive(max_grad_norm=self.max_grad_norm))

    def weights(self, sq_norms: Tensor) -> Tensor:
        """min(1, C / norm); 0 if the norm is not finite."""
        # C / inf = 0 by itself, and NaN survives the clamp, so one nan_to_num covers both.
        return sq_norms.rsqrt().mul_(self.max_grad_norm).clamp_(max=1.0).nan_to_num_(nan=0.0)

    def sensitivity(self, relation: Relation) -> float:
        """C times the number of contributions that neighbours differ by."""
        return self.max_grad_norm * relation.contributions
