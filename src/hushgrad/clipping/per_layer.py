"""Per-layer clipping: every layer's gradient has its own ball."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from typing import TYPE_CHECKING

from hushgrad import _check, _papers
from hushgrad.clipping.clipper import Clipper
from hushgrad.events import Relation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PerLayer(Clipper):
    """Scale each group k of parameters by itself: w_ik = min(1, C_k / ‖G_ik‖), with sum_k C_k² = C².

    Args:
        max_grad_norm: C, what an example contributes at most, all groups together.
        by: "module" (a layer's weight and bias form one group) or "parameter" (each is one); K groups get C_k = C / sqrt(K) each.
        shares: pairs (prefix, share) instead: a group is all parameters whose name begins with the prefix (the longest that fits), and
            C_k is in proportion to the share. :meth:`with_norms` makes them from the norms themselves.

    **Formal guarantee.** The groups are disjoint, so ‖(w_ik G_ik)_k‖² <= sum_k C_k² = C², and the clipped sums of neighbours differ by
    at most C (add/remove, zero-out) or 2 C (replace-one).

    | squared norm of a group | weight |
    |---|---|
    | 0 | 1 |
    | NaN or infinite | 0 (and the capture gives 0 to the example's other groups) |

        >>> import torch
        >>> PerLayer(1.0).weights(torch.tensor([[4.0, 0.04]]))  # two groups: C_k = 0.7071
        tensor([[0.3536, 1.0000]])
        >>> PerLayer.with_norms({"body": 3.0, "head": 4.0}).max_grad_norm
        5.0

    Reference: McMahan et al., "Learning differentially private recurrent language models" (ICLR 2018), clipping strategies for
    multi-layer models.
    """

    papers = (
        _papers.Paper(
            "mcmahan2018learning",
            "McMahan, H. Brendan and Ramage, Daniel and Talwar, Kunal and Zhang, Li",
            "Learning Differentially Private Recurrent Language Models",
            "ICLR",
            arxiv="1710.06963",
        ),
    )

    max_grad_norm: float
    by: str = "module"
    shares: tuple[tuple[str, float], ...] = ()

    @classmethod
    def examples(cls) -> tuple[Clipper, ...]:
        """By layer, by parameter, and with norms of their own."""
        return (
            cls(0.3),
            cls(2.0, by="parameter"),
            cls.with_norms({"0": 0.1, "2.weight": 3.0, "": 0.5}),
        )

    def __post_init__(self) -> None:
        _check.positive(max_grad_norm=self.max_grad_norm)
        _check.one_of(("module", "parameter"), by=self.by)
        pairs = [_check.several(shares=pair) for pair in _check.several(shares=self.shares)]
        if not all(len(pair) == 2 for pair in pairs):
            _check.fail("shares", self.shares, "to be pairs of a prefix and a share")
        shares = tuple((str(prefix), _check.positive(share=share)) for prefix, share in pairs)
        if len({prefix for prefix, _ in shares}) < len(shares):
            _check.fail("shares", self.shares, "to name every prefix once")
        object.__setattr__(self, "max_grad_norm", float(self.max_grad_norm))
        object.__setattr__(self, "shares", shares)

    @classmethod
    def with_norms(cls, norms: Mapping[str, float]) -> PerLayer:
        """Each group's own clip norm by the prefix of its parameters' names; "" is everything else."""
        return cls(hypot(*(_check.positive(norm=norm) for norm in norms.values())), shares=tuple(norms.items()))

    def groups(self, names: Sequence[str]) -> list[int]:
        """The group of each parameter, in the order of first appearance or of ``shares``."""
        if self.shares:
            return self._by_prefix(names)
        keys = [name.rpartition(".")[0] if self.by == "module" else name for name in names]
        number = {key: k for k, key in enumerate(dict.fromkeys(keys))}
        return [number[key] for key in keys]

    def _by_prefix(self, names: Sequence[str]) -> list[int]:
        prefixes = [prefix for prefix, _ in self.shares]
        groups = []
        for name in names:
            fits = [p for p in prefixes if p in ("", name) or name.startswith(p + ".")]
            if not fits:
                _check.fail("shares", self.shares, f"to cover the parameter {name}", 'Add ("", share) for everything else.')
            groups.append(prefixes.index(max(fits, key=len)))
        idle = set(range(len(prefixes))) - set(groups)
        if idle:
            _check.fail("shares", self.shares, f"to name parameters of the model, unlike {prefixes[min(idle)]!r}")
        return groups

    def norms(self, groups: int) -> list[float]:
        """C_k of each of so many groups."""
        if not self.shares:
            return [self.max_grad_norm / sqrt(groups)] * groups
        whole = hypot(*(share for _, share in self.shares))
        return [self.max_grad_norm * share / whole for _, share in self.shares]

    def weights(self, sq_norms: Tensor) -> Tensor:
        """min(1, C_k / norm) for each example and group; 0 if the norm is not finite."""
        import torch

        if sq_norms.dim() == 1:  # no examples, so no groups either
            sq_norms = sq_norms.unsqueeze(1)
        bounds = torch.tensor(self.norms(sq_norms.shape[1]), dtype=sq_norms.dtype, device=sq_norms.device)
        return sq_norms.rsqrt().mul_(bounds).clamp_(max=1.0).nan_to_num_(nan=0.0)

    def sensitivity(self, relation: Relation) -> float:
        """C times the number of contributions that neighbours differ by."""
        return self.max_grad_norm * relation.contributions
