"""A bare parameter as a layer: a class token, a learned position table, a scale.

A parameter that a module owns and uses by itself (``x + self.position``) is exact through the fallback, which runs that module, with all
its children, again for every example. :class:`Shared` makes it a layer of its own, at the cost of one addition.
"""

from __future__ import annotations

from torch import Tensor, nn

from hushgrad.clipping.base import Record, Rule, rule

__all__ = ["Shared", "SharedRule"]


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

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """The output's gradient itself."""
        return {"value": record.g}

    def broadcast(self, output: Tensor, examples: int) -> Tensor | None:
        """A row of ``like`` for all examples would be ambiguous, so it is refused."""
        return None
