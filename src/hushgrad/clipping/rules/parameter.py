"""Rules for bare parameters: a class token, a learned position table, a scale.

A parameter that a module owns and uses directly (``x + self.position``) is exact through the fallback, which runs that module, with all
its children, again for every example. :class:`Shared` makes it a layer of its own, at the cost of one addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from hushgrad.clipping.base import Example, Record, Rule, rule
from hushgrad.clipping.outputs import tensors_of
from hushgrad.clipping.pullback import pullback
from hushgrad.clipping.sums import Sum
from hushgrad.errors import CaptureError

_LARGE = 1e15  # products of two such numbers are finite in single precision


class Shared(nn.Module):
    """A learned tensor that every example uses: ``shared(x)`` is its value, once for each example of x.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.token = Shared(torch.zeros(1, 8))
    ...     def forward(self, x):  # (B, T, 8)
    ...         return torch.cat([self.token(x), x], 1)
    >>> Net()(torch.ones(4, 5, 8)).shape
    torch.Size([4, 6, 8])
    """

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, like: Tensor) -> Tensor:
        """(B, *shape of the value), where B is the first dimension of ``like``."""
        return self.value.expand(like.shape[0], *self.value.shape)

    def extra_repr(self) -> str:
        """The shape of the value."""
        return ", ".join(map(str, self.value.shape))


@rule(Shared)
class SharedRule(Rule):
    """G_i = g[i]: nothing is computed."""

    parameters = frozenset({"value"})

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """One."""
        return ((Shared(torch.randn(2, 3)), (torch.randn(5, 4),)),)

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """The output's gradient itself."""
        return {"value": record.g}


class Bare(Rule):
    """A parameter that is read at the frontier: each example's gradient exists already."""

    hot = False

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """The shares themselves."""
        return {record.names[0]: record.g}


class Nothing(Rule):
    """A call in a batch without examples: gradients that come back to it are ignored."""

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """No rows."""
        params = dict(record.module.named_parameters())
        return {name: params[name].detach().new_zeros(0, *params[name].shape) for name in record.names}

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """Nothing to add."""


class Whole(Rule):
    """Any layer for which each example's share of the whole output's gradient is known: B cotangents of one call.

    The call's input may hold no examples at all (a table of positions), or all of them.
    """

    hot = False  # it runs autograd itself, which is better done outside of a running backward

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """Run the layer again, and pull all shares back at once.

        Rows of the input may belong to other examples: non-finite numbers there count as 0 for an example whose own share is finite.
        """
        shares = [g for g in record.grads if g is not None]
        # Contiguous: for weights alone, torch's backward of GroupNorm in the memory format channels_last ends the process (2.13).
        found = self._pulled(record, *tree_map(_contiguous, (record.args, dict(record.kwargs))))
        lost = _sane(shares) & ~_sane(list(found.values()))
        if bool(lost.any()):
            again = self._pulled(record, *tree_map(lambda v: _contiguous(finite(v)), (record.args, dict(record.kwargs))))
            found = {name: torch.where(lost.reshape(-1, *(1 for _ in G.shape[1:])), again[name], G) for name, G in found.items()}
            if bool((lost & ~_sane(list(found.values()))).any()):
                raise CaptureError(
                    f"A record overflows in {type(record.module).__name__}, which gives no example its own share of it. Bound the inputs "
                    "(torch.nan_to_num, clamp) before they reach the model. Nothing was released."
                )
        return found

    def _pulled(self, record: Record, args: Any, kwargs: Any) -> dict[str, Tensor]:
        module = record.module
        given = [(k, g) for k, g in enumerate(record.grads) if g is not None]
        before = torch.get_rng_state()
        with torch.enable_grad():
            values = {
                name: p.detach().to(given[0][1].dtype).requires_grad_(name in record.names)
                for name, p in module.named_parameters()
            }
            made = tensors_of(functional_call(module, values, args, dict(kwargs)))
            params = [values[name] for name in record.names]
            found = pullback([made[k] for k, _ in given], params, [g for _, g in given])
        if not torch.equal(before, torch.get_rng_state()):
            raise CaptureError(
                f"{type(module).__name__} draws random numbers on something that all examples share, so its call cannot be repeated. "
                "Move the dropout out of it, or register a rule for the layer."
            )
        B = len(given[0][1])
        return {
            name: p.new_zeros(B, *p.shape) if g is None else g for name, p, g in zip(record.names, params, found, strict=True)
        }  # fmt: skip

    def select(self, record: Record, index: Tensor, examples: int) -> Record:
        """Only the shares have examples."""
        grads = tuple(None if g is None else g.index_select(0, index) for g in record.grads)
        chosen = Record(record.module, record.names, record.args, record.kwargs, grads)
        chosen.kept = {name: G.index_select(0, index) for name, G in record.kept.items()}
        return chosen


def _sane(values: list[Tensor]) -> Tensor:
    """Which examples have only finite numbers."""
    return torch.stack([g.flatten(1).isfinite().all(1) for g in values]).all(0)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def finite(value: Any) -> Any:
    """A tensor with 0 in place of non-finite numbers, and nothing so large that a product of two overflows."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isfinite().all()):
        return value
    return value.nan_to_num(0.0, 0.0, 0.0).clamp(-_LARGE, _LARGE)
