"""Recurrent layers: RNN, LSTM (with projections) and GRU; several layers, both directions, packed sequences.

At each time t, gates_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh, so with d_t the gradient with respect to gates_t

    G_i(W_ih) = sum_t d_t x_t^T,   G_i(W_hh) = sum_t d_t h_{t-1}^T,   G_i(b_ih) = G_i(b_hh) = sum_t d_t.

(In a GRU the hidden part of the new gate is multiplied by the reset gate, so W_hh and b_hh have their own d_t; an LSTM's projection
W_hr is one more product.) The d_t come from rerunning the recurrence once: work and memory of an ordinary pass, linear in
B and T, whatever the number of parameters. After the end of a sequence its state is carried along unchanged, so the padding of
packed sequences has d_t = 0; in the backward direction the same mask makes a sequence start at its own end.

Reference: Goodfellow, "Efficient per-example gradient computations" (2015), applied at every time step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from hushgrad.clipping.base import Example, Record, rule
from hushgrad.clipping.rules.input_checks import is_strided
from hushgrad.clipping.rules.outer import Block, OuterProducts, Terms
from hushgrad.errors import CaptureError


@rule(nn.RNN, nn.LSTM, nn.GRU)
class Recurrent(OuterProducts):
    """Rerunning the recurrence once gives the gradients at the gates; the rest are outer products."""

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """Each kind, in both directions."""
        kinds = (nn.RNN, nn.LSTM, nn.GRU)
        return tuple((kind(4, 3, batch_first=True, bidirectional=True), (torch.randn(5, 6, 4),)) for kind in kinds)

    def check(self, module: nn.Module) -> str | None:
        """Dropout between the layers can be repeated on a CPU only."""
        assert isinstance(module, nn.RNNBase)
        if module.dropout > 0 and module.num_layers > 1 and next(module.parameters()).device.type != "cpu":
            return (
                "its dropout between layers is drawn inside a fused kernel and cannot be repeated. Use dropout=0, or one layer after "
                "another with nn.Dropout in between"
            )
        return None

    def folds(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """For a strided input with time first."""
        layer: Any = module
        asked = partial(is_strided, bias=layer.bias, turned=layer.batch_first)
        return any(map(asked, (*args, *kwargs.values())))

    def remember(self, module: nn.Module) -> Any:
        """The random state before the call, from which the same dropout between the layers can be drawn again."""
        layer: Any = module
        return torch.get_rng_state() if layer.training and layer.dropout > 0 and layer.num_layers > 1 else None

    def dims(self, module: nn.Module, outputs: int) -> tuple[int, ...]:
        """The second, unless ``batch_first``; for the final states always the second."""
        return (_batch_dim(module), *(1,) * (outputs - 1))

    def solve(self, record: Record) -> Terms:
        """Run the forward again, keeping each step's products, then differentiate with respect to them."""
        sequence = _read(record)
        run = _Run(record.module, sequence)
        outputs = [(y, g) for y, g in zip(run.outputs, sequence.grads, strict=True) if g is not None]
        taps = [product for cell in run.cells for product in cell.products]
        found = iter(torch.autograd.grad([y for y, _ in outputs], taps, [g for _, g in outputs], allow_unused=True))
        terms: Terms = {}
        for cell in run.cells:
            here = islice(found, len(cell.products))
            d = [torch.zeros_like(tap) if g is None else g for tap, g in zip(cell.products, here, strict=True)]
            terms.update(cell.terms(d))
        return terms

    def pick(self, record: Record, index: Tensor) -> Record:
        """From the unpacked form."""
        s = _read(record)
        chosen = _Sequence(
            s.x[index],
            None if s.active is None else s.active[index],
            tuple(h[:, index] for h in s.state),
            [k[index] for k in s.keep],
            (
                None if s.grads[0] is None else s.grads[0][index],
                *(None if g is None else g[:, index] for g in s.grads[1:]),
            ),
        )
        return Record(record.module, record.names, (chosen,), {}, ())


class _Sequence(NamedTuple):
    """One call in normal form, whatever the layout of its input: examples first, ``active`` before a sequence's end."""

    x: Tensor  # (B, T, d)
    active: Tensor | None  # (B, T) or None: everywhere
    state: tuple[Tensor, ...]  # h_0, or (h_0, c_0): (layers * directions, B, size)
    keep: list[Tensor]  # what dropout multiplies each layer's output by, except the last; empty: no dropout
    grads: tuple[Tensor | None, ...]  # of the output (B, T, size) and of the final states


def _read(record: Record) -> _Sequence:
    if record.args and isinstance(record.args[0], _Sequence):
        return record.args[0]
    module: Any = record.module
    x, hx = [*record.args, *record.kwargs.values(), None][:2]
    first, *rest = record.grads
    active, dtype = None, next(g.dtype for g in record.grads if g is not None)
    keep = _keep(record, x, dtype)
    if isinstance(x, PackedSequence):
        packed, (x, lengths) = x, pad_packed_sequence(x, batch_first=True)
        active = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        active = active.to(x.device)
        first = None if first is None else pad_packed_sequence(packed._replace(data=first), batch_first=True)[0]
    elif x.dim() != 3:
        raise CaptureError(
            f"{type(module).__name__} got a single sequence without a batch dimension. Write x[None] for one example."
        )
    elif not module.batch_first:
        x, first = x.transpose(0, 1), None if first is None else first.transpose(0, 1)
    return _Sequence(x.detach().to(dtype), active, _state(module, hx, x, dtype), keep, (first, *rest))


def _keep(record: Record, x: Any, dtype: torch.dtype) -> list[Tensor]:
    """The factors of the forward's dropout, drawn again: one draw for each layer but the last, with time first."""
    if record.memory is None:
        return []
    module: Any = record.module
    width = (module.proj_size or module.hidden_size) * (2 if module.bidirectional else 1)
    packed = isinstance(x, PackedSequence)
    rows = x.data.shape[:1] if packed else (x.transpose(0, 1) if module.batch_first else x).shape[:2]
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(record.memory)
        drawn = [F.dropout(torch.ones(*rows, width, dtype=dtype), module.dropout) for _ in range(module.num_layers - 1)]
    if packed:
        return [pad_packed_sequence(x._replace(data=keep), batch_first=True)[0] for keep in drawn]
    return [keep.transpose(0, 1) for keep in drawn]


def _state(module: Any, hx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    if hx is not None:
        return tuple(h.detach().to(dtype) for h in (hx if isinstance(hx, tuple) else (hx,)))
    cells = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.zeros(cells, x.shape[0], module.proj_size or module.hidden_size, dtype=dtype, device=x.device)
    return (h, h.new_zeros(cells, x.shape[0], module.hidden_size)) if isinstance(module, nn.LSTM) else (h,)


def _batch_dim(module: Any) -> int:
    return 0 if module.batch_first else 1


class _Run:
    """The whole layer, run again: its outputs, and one :class:`_Cell` for each layer and direction."""

    def __init__(self, module: nn.Module, sequence: _Sequence) -> None:
        layer: Any = module
        self.cells: list[_Cell] = []
        x, finals = sequence.x, []
        for k in range(layer.num_layers):
            outs = []
            for suffix in ("", "_reverse") if layer.bidirectional else ("",):
                start = tuple(h[len(self.cells)] for h in sequence.state)
                cell = _Cell(module, f"_l{k}{suffix}", x)
                outs.append(cell.run(start, sequence.active))
                finals.append(cell.state)
                self.cells.append(cell)
            x = torch.cat(outs, 2)
            if k < len(sequence.keep):
                x = x * sequence.keep[k]
        self.outputs = [x, *(torch.stack(states) for states in zip(*finals, strict=True))]


class _Cell:
    """One layer in one direction; every product with a parameter is kept where autograd can find it."""

    def __init__(self, module: nn.Module, suffix: str, x: Tensor) -> None:
        self.suffix, self.backwards, self.x = suffix, suffix.endswith("_reverse"), x
        named = dict(module.named_parameters(recurse=False))
        weights = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        self.p = {n: named[n + suffix].detach().to(x.dtype) if n + suffix in named else None for n in weights}
        self.step: Callable[..., tuple[Tensor, ...]] = step_of(module)
        self.gates = _tapped(F.linear(x, self._weight("weight_ih"), self.p["bias_ih"]))
        self.hidden: list[Tensor] = []  # W_hh h + b_hh
        self.projected: list[Tensor] = []  # W_hr m
        self.before: list[Tensor] = []  # h_{t-1}
        self.unprojected: list[Tensor] = []  # m
        self.state: tuple[Tensor, ...] = ()

    def _weight(self, name: str) -> Tensor:
        weight = self.p[name]
        assert weight is not None
        return weight

    def _times(self) -> Iterator[int]:
        T = self.x.shape[1]
        return iter(range(T - 1, -1, -1) if self.backwards else range(T))

    def run(self, state: tuple[Tensor, ...], active: Tensor | None) -> Tensor:
        """The outputs (B, T, size); the final state is left in ``state``."""
        outs: list[Tensor] = []
        gates = self.gates.unbind(1)  # once: the way back of self.gates[:, t] would fill a tensor of all times at every t
        for t in self._times():
            hidden = _tapped(F.linear(state[0], self._weight("weight_hh"), self.p["bias_hh"]))
            self.before.append(state[0].detach())
            self.hidden.append(hidden)
            new = self._project(self.step(gates[t], hidden, state))
            if active is not None:
                here = active[:, t].unsqueeze(1)
                state = tuple(torch.where(here, a, b) for a, b in zip(new, state, strict=True))
                outs.append(torch.where(here, new[0], torch.zeros_like(new[0])))
            else:
                state = new
                outs.append(new[0])
        self.state = state
        return self._in_time(outs)

    def _project(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        W = self.p["weight_hr"]
        if W is None:
            return new
        self.unprojected.append(new[0].detach())
        self.projected.append(F.linear(new[0], W))
        return (self.projected[-1], *new[1:])

    def _in_time(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows[::-1] if self.backwards else rows, 1)

    @property
    def products(self) -> list[Tensor]:
        """The tensors to differentiate with respect to."""
        return [self.gates, *self.hidden, *self.projected]

    def terms(self, d: list[Tensor]) -> Terms:
        """The blocks of this cell's parameters, from the gradients at its products."""
        T = len(self.hidden)
        hidden, h = self._in_time(d[1 : T + 1]), self._in_time(self.before)
        made = {
            "weight_ih": [Block(d[0], self.x)],
            "weight_hh": [Block(hidden, h)],
            "bias_ih": [Block(d[0], None)],
            "bias_hh": [Block(hidden, None)],
        }
        if self.projected:
            made["weight_hr"] = [Block(self._in_time(d[T + 1 :]), self._in_time(self.unprojected))]
        return {name + self.suffix: blocks for name, blocks in made.items()}


def _tapped(product: Tensor) -> Tensor:
    """A tensor that requires gradients even if nothing before it does."""
    return product if product.requires_grad else product.requires_grad_()


def step_of(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """One step of a layer or a cell, from its two products and the state before: the state after."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return _lstm
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return _gru
    assert isinstance(module, (nn.RNN, nn.RNNCell))
    activation = torch.tanh if module.nonlinearity == "tanh" else torch.relu
    return lambda gates, hidden, state: (activation(gates + hidden),)


def _lstm(gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    total = gates + hidden
    i, f, _, o = total.sigmoid().chunk(4, 1)  # one call for all; the quarter that is not needed costs less than two more calls
    c = f * state[1] + i * total.chunk(4, 1)[2].tanh()
    return o * c.tanh(), c


def _gru(gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (xr, xz, xn), (hr, hz, hn) = gates.chunk(3, 1), hidden.chunk(3, 1)
    z = (xz + hz).sigmoid()
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + z * (state[0] - n),)
