"""Single steps of recurrent layers (RNNCell, LSTMCell and GRUCell), called in the user's own loop.

gates = W_ih x + b_ih and hidden = W_hh h + b_hh, so with d and e the gradients with respect to them

    G_i(W_ih) = d x^T,   G_i(W_hh) = e h^T,   G_i(b_ih) = d,   G_i(b_hh) = e.

Each call has one position; all calls of a loop together are one sum of outer products over its time steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad.clipping.base import Example, Factors, Record, rule
from hushgrad.clipping.rules.outer import Block, OuterProducts, Terms
from hushgrad.clipping.rules.rnn import step_of
from hushgrad.errors import CaptureError


@rule(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
class RecurrentCell(OuterProducts):
    """The step is run again from its two matrix products, and differentiated with respect to them."""

    parameters = frozenset({"weight_ih", "weight_hh", "bias_ih", "bias_hh"})

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """Each kind."""
        return tuple((kind(4, 3), (torch.randn(5, 4),)) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell))

    def solve(self, record: Record) -> Terms:
        """The gradients d and e, with one position each."""
        x, state = _read(record)
        cell: Any = record.module
        p = {name: value.detach().to(x.dtype) for name, value in record.module.named_parameters()}
        gates = F.linear(x, p["weight_ih"], p.get("bias_ih")).requires_grad_()
        hidden = F.linear(state[0], p["weight_hh"], p.get("bias_hh")).requires_grad_()
        made = step_of(cell)(gates, hidden, state)
        used = [(y, g) for y, g in zip(made, record.grads, strict=True) if g is not None]
        d, e = torch.autograd.grad(
            [y for y, _ in used], [gates, hidden], [g for _, g in used], allow_unused=True, materialize_grads=True
        )
        d, e = d.unsqueeze(1), e.unsqueeze(1)
        return {
            "weight_ih": [Block(d, x.unsqueeze(1))],
            "weight_hh": [Block(e, state[0].unsqueeze(1))],
            "bias_ih": [Block(d, None)],
            "bias_hh": [Block(e, None)],
        }

    def factors(self, record: Record) -> dict[str, Factors]:
        """Of the two matrices."""
        terms = self.terms(record)
        return {name: Factors(b.left, b.right) for name, (b,) in terms.items() if b.right is not None}

    def pick(self, record: Record, index: Tensor) -> Record:
        """A cell has no shared inputs."""
        x, state = _read(record)
        grads = tuple(None if g is None else g[index] for g in record.grads)
        return Record(record.module, record.names, (x[index], tuple(h[index] for h in state)), {}, grads)


def _read(record: Record) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The input and the state before: (h,) or (h, c)."""
    module: Any = record.module
    x, given = [*record.args, *record.kwargs.values(), None][:2]
    if "hx" in record.kwargs:
        x, given = record.args[0] if record.args else record.kwargs["input"], record.kwargs["hx"]
    if x.dim() != 2:
        raise CaptureError(f"{type(module).__name__} got a single example without a batch dimension. Write x[None].")
    dtype = next(g.dtype for g in record.grads if g is not None)
    x = x.detach().to(dtype)
    if given is None:
        given = (x.new_zeros(len(x), module.hidden_size),) * (2 if isinstance(module, nn.LSTMCell) else 1)
    return x, tuple(h.detach().to(dtype) for h in (given if isinstance(given, tuple) else (given,)))
