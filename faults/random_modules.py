"""Random small modules: shapes that coincide, constants, reductions over any dimension, rows in every order. Whose row is it?

A module keeps a tensor (B, T, D) and passes it through a few operations, of which some let examples influence each other. The capture must
give what single examples give alone, on the first batch and on later ones of other sizes, or refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.testing.rules import one_by_one, sum_of_sines

SIZES = (2, 3, 4, 5)
_SAME = 1e-7  # relative, in double precision


class _Op(nn.Module):
    """One operation, (B, T, D) to (B, T, D), with what it may need: two layers, a table, a parameter, a constant."""

    def __init__(self, name: str, T: int, D: int, rows: int) -> None:
        super().__init__()
        self.name = name
        self.layer, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.table, self.free = nn.Embedding(T, D), nn.Parameter(torch.randn(T, D))
        self.register_buffer("constant", torch.randn(rows, D))
        used = _USES[name]
        for kind in ("layer", "norm", "table", "free"):
            if kind not in used:
                delattr(self, kind)

    def forward(self, h: Tensor) -> Tensor:
        return _OPERATIONS[self.name](self, h)


def _experts(op: _Op, h: Tensor) -> Tensor:
    rows = h.flatten(0, 1)
    mine = (rows[:, 0] > 0).nonzero().flatten()
    return rows.index_add(0, mine, op.layer(rows[mine])).view(h.shape)


def _sorted_inside(op: _Op, h: Tensor) -> Tensor:
    order = h.detach()[:, 0, 0].argsort()
    return op.layer(h[order])[order.argsort()]


def _capacity(op: _Op, h: Tensor) -> Tensor:
    mine = h.detach()[:, 0, 0] > -0.5
    return h * (mine & (mine.cumsum(0) <= 2)).to(h)[:, None, None]


_OPERATIONS: dict[str, Callable[[_Op, Tensor], Tensor]] = {
    "layer": lambda op, h: op.layer(h),
    "flat layer": lambda op, h: op.layer(h.flatten(0, 1)).view(h.shape),
    "time first": lambda op, h: op.norm(op.layer(h.transpose(0, 1))).transpose(0, 1),
    "position after position": lambda op, h: (
        op.layer(h.transpose(0, 1).flatten(0, 1)).view(h.shape[1], h.shape[0], -1).transpose(0, 1)
    ),
    "turned round": lambda op, h: op.layer(h.flip(0)).flip(0),
    "table": lambda op, h: h + op.table(torch.arange(h.shape[1])),
    "table, reduced": lambda op, h: h + op.table(torch.arange(h.shape[1])).cumsum(0).mean(0),
    "table, soft": lambda op, h: h * op.table(torch.arange(h.shape[1])).softmax(0)[None],
    "parameter": lambda op, h: h * op.free[: h.shape[1]],
    "parameter, product": lambda op, h: (
        h + torch.einsum("btd,sd->bts", h, op.free[: h.shape[1]]).softmax(2) @ op.free[: h.shape[1]]
    ),
    "constant": lambda op, h: h + op.layer(op.constant).mean(0),
    "constant, gate": lambda op, h: h * op.layer(op.constant).sum().sigmoid(),
    "attention": lambda op, h: op.layer(h) + (h @ h.mT).softmax(2) @ h,
    "centred inside": lambda op, h: op.layer(h - h.mean(1, keepdim=True)),
    "normed inside": lambda op, h: op.layer(h / (1 + h.square().sum((1, 2), keepdim=True))),
    "sorted positions": lambda op, h: op.layer(h.sort(1).values),
    "experts": _experts,
    "sorted and back": _sorted_inside,
    "centred": lambda op, h: op.layer(h - h.mean(0)),
    "centred, detached": lambda op, h: op.layer(h - h.detach().mean(0)),
    "largest": lambda op, h: op.layer(h) / (1 + h.detach().abs().amax((0, 2), keepdim=True)),
    "so far": lambda op, h: op.layer(h.cumsum(0)),
    "soft over all": lambda op, h: op.layer(h.softmax(0)),
    "rolled": lambda op, h: op.layer(h.roll(1, 0)),
    "sorted": lambda op, h: op.layer(h[h.detach()[:, 0, 0].argsort()]),
    "capacity": lambda op, h: op.layer(_capacity(op, h)),
    "with all": lambda op, h: (
        op.layer((h.flatten(1) @ h.flatten(1).mT).softmax(1) @ h.flatten(1)).view(h.shape)
        if h.shape[1] == 1
        else op.layer(h + h.mean((0, 1)))
    ),
}
_USES = {name: ("layer", "norm") if name == "time first" else ("layer",) for name in _OPERATIONS}
_USES |= {name: ("table",) for name in _OPERATIONS if name.startswith("table")}
_USES |= {name: ("free",) for name in _OPERATIONS if name.startswith("parameter")}
MIXING = ("centred", "centred, detached", "largest", "so far", "soft over all", "rolled", "sorted", "capacity", "with all")
_APART = tuple(name for name in _OPERATIONS if name not in MIXING)


class _Module(nn.Module):
    def __init__(self, ops: list[_Op], reduce: str, D: int) -> None:
        super().__init__()
        self.ops, self.head, self.reduce = nn.ModuleList(ops), nn.Linear(D, 2), reduce

    def forward(self, x: Tensor) -> Tensor:
        for op in self.ops:
            x = op(x)
        y: Tensor = self.head(x)
        return y.mean(1) if self.reduce == "mean" else y.amax(1) if self.reduce == "max" else y


class Verdict(NamedTuple):
    """``word``: exact, refused, or wrong; ``mixes``: an operation lets examples influence each other; ``what``: operations and sizes."""

    word: str
    mixes: bool
    what: str


def random_module(lot: Random) -> tuple[nn.Module, list[Tensor], bool, str]:
    """A module, the batches of three steps, whether it mixes examples, and what it is in words."""
    B, T, D, rows = (lot.choice(SIZES) for _ in range(4))
    names = [lot.choice(_APART) for _ in range(lot.randint(1, 3))]
    mixes = lot.random() < 0.3
    if mixes:
        names.insert(lot.randint(0, len(names)), lot.choice(MIXING))
    reduce = lot.choice(("mean", "max", "none"))
    torch.manual_seed(lot.randrange(1 << 30))
    model = _Module([_Op(name, max(SIZES), D, rows) for name in names], reduce, D).double()
    other = (lot.choice(SIZES), lot.choice(SIZES))
    batches = [torch.randn(b, t, D, dtype=torch.float64) for b, t in ((B, T), (B, T), other)]
    return model, batches, mixes, f"{' > '.join(names)} > {reduce}; B={B} T={T} D={D} rows={rows}, then B={other[0]} T={other[1]}"


def examine(lot: Random) -> Verdict:
    """Draw a module and compare what the capture attributes to each example with what that example gives alone."""
    model, batches, mixes, what = random_module(lot)
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    try:
        for x in batches:
            wrong = _wrong(capture, model, x)
            if wrong:
                return Verdict("wrong", mixes, f"{what}: {wrong}")
    except (CaptureError, NotIsolated) as error:
        return Verdict("refused", mixes, f"{what}: {error}")
    finally:
        capture.detach()
    return Verdict("exact", mixes, what)


def _wrong(capture: Capture, model: nn.Module, x: Tensor) -> str | None:
    with capture.pause():
        single = one_by_one(model, (x,), sum_of_sines)
    norms = torch.stack([G.flatten(1).square().sum(1) for G in single.values()]).sum(0).sqrt()
    capture.examples(len(x), dim=0)
    sum_of_sines(model(x)).backward()
    clip = float(norms.median()) * 0.9 + 1e-30
    made = capture.collect(Flat(clip))
    if not torch.allclose(made.raw_norms, norms, rtol=_SAME, atol=1e-12):
        return f"norms {made.raw_norms.tolist()}, alone {norms.tolist()}"
    weights = (clip / norms.clamp(min=1e-30)).clamp(max=1)
    for name, G in single.items():
        if float((made.raw_sums[name] - torch.tensordot(weights, G, dims=1)).norm()) > _SAME * clip * len(x):
            return f"the sum of {name}"
    return None
