"""Automatic clipping: every gradient is normalised, so that the clip norm only scales the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushgrad import _check, _papers
from hushgrad.clipping.clipper import Clipper
from hushgrad.events import Relation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Automatic(Clipper):
    """Normalise each example's gradient: w_i = C / (‖G_i‖ + stability).

    C need not be tuned: it multiplies the gradient and the noise alike, which the learning rate does as well. ``stability`` keeps small
    gradients small; without it (0) all examples count the same and the sum need not vanish where every gradient is tiny.

    **Formal guarantee.** ‖w_i G_i‖ = C ‖G_i‖ / (‖G_i‖ + stability) <= C for every example, so the clipped sums of neighbours differ by
    at most C (add/remove, zero-out) or 2 C (replace-one).

    | squared norm | weight |
    |---|---|
    | 0 | C / stability |
    | NaN or infinite | 0 |

        >>> import torch
        >>> Automatic(1.0).weights(torch.tensor([0.0, 0.99**2, float("inf")]))
        tensor([100.,   1.,   0.])

    Reference: Bu et al., "Automatic clipping: differentially private deep learning made easier and stronger" (NeurIPS 2023),
    where it is called AUTO-S.
    """

    papers = (
        _papers.Paper(
            "bu2023automatic",
            "Bu, Zhiqi and Wang, Yu-Xiang and Zha, Sheng and Karypis, George",
            "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
            "NeurIPS",
            arxiv="2206.07136",
        ),
    )

    max_grad_norm: float = 1.0
    stability: float = 0.01

    @classmethod
    def examples(cls) -> tuple[Clipper, ...]:
        """Two stabilities."""
        return (
            cls(),
            cls(0.2, stability=1e-6),
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_grad_norm", _check.positive(max_grad_norm=self.max_grad_norm))
        remedy = "The paper uses 0.01; a gradient of norm 0 has no direction to be normalised to."
        object.__setattr__(self, "stability", _check.positive(stability=self.stability, remedy=remedy))

    def weights(self, sq_norms: Tensor) -> Tensor:
        """C / (norm + stability); 0 if the norm is not finite."""
        # C / inf = 0 by itself; only NaN needs a word.
        return (self.max_grad_norm / sq_norms.sqrt().add_(self.stability)).nan_to_num_(nan=0.0)

    def sensitivity(self, relation: Relation) -> float:
        """C times the number of contributions that neighbours differ by."""
        return self.max_grad_norm * relation.contributions
