"""Tags: the owners do not depend on how many edges are asked at once, nor on how many bits hold a number."""

from __future__ import annotations

import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.layout import FIRST, MIXED, NOBODY, layouts_of
from hushgrad.clipping.proof import digits, tags
from hushgrad.clipping.proof.tags import Exit, tagged
from hushgrad.errors import NotIsolated
from hushgrad.train import Plan, make_private


def _asked(examples: int) -> tuple[list[Exit], list[torch.Tensor]]:
    """Outputs of three layers: one that is the examples' own, one with a small gradient, one that mixes them, and one without any."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 6, generator=generator).requires_grad_()
    own = torch.tanh(x @ torch.randn(6, 5, generator=generator))
    small = own * 1e-6
    mixed = own - own.mean(0)
    dead = own.relu() * 0
    y = own + small @ torch.randn(5, 5, generator=generator) + mixed.cumsum(0) + dead
    return [Exit(get_gradient_edge(y), y.detach(), FIRST)], [x, own, small, mixed, dead]


@pytest.mark.parametrize("examples", [3, 17, 40, 2100])
def test_edges_some_after_the_others_have_the_owners_of_all_at_once(examples, monkeypatch):
    exits, tensors = _asked(examples)
    edges = [get_gradient_edge(t) for t in tensors]
    found = {}
    for part in (1, 1 << 40):
        monkeypatch.setattr(tags, "_PART", part)
        monkeypatch.setattr(tags, "_PARTS", len(edges) if part == 1 else 1)
        assert len(tags._parts(edges)) == (len(edges) if part == 1 else 1)
        found[part] = tagged(exits, edges, [], examples)[0]
    for one, other in zip(*found.values(), strict=True):
        assert one.proved == other.proved and torch.equal(one.each, other.each)
    own, small = found[1][1], found[1][2]
    assert own.each[:, 0].tolist().count(MIXED) >= examples - 1  # later rows reach earlier ones
    assert small.proved and torch.equal(small.each, torch.arange(examples).unsqueeze(1).expand(-1, 5).to(small.each))
    assert found[1][4].each.unique().tolist() == list(range(examples))


def test_what_reaches_nobody_is_nobodys_however_large_its_bits_are():
    """Where the first gradient is 0 the other's bits are no digit: they must not count as a number that no example has."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.cat([x[:, :2] * 3, torch.zeros(5, 2)], 1)
    (owners,), _ = tagged([Exit(get_gradient_edge(y), y.detach(), FIRST)], [get_gradient_edge(x)], [], 5)
    assert owners.proved and owners.each[:, 2:].unique().tolist() == [NOBODY] and owners.each[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("gain", [1.0, 1e9, 1e20, 1e33])
@pytest.mark.parametrize("examples", [16, 17, 64, 65, 300, 2047, 4097])
def test_rows_in_any_order_have_their_owners_however_many_and_however_large(examples, gain):
    """Digits have 4, 16 or 64 values: by the number of examples, and by how large numbers may become."""
    order = torch.randperm(2 * examples, generator=torch.Generator().manual_seed(examples))
    x = torch.ones(2 * examples, 2).requires_grad_()
    y = (gain * x)[order].view(examples, 4)
    (owners,), _ = tagged([Exit(get_gradient_edge(y), y.detach(), FIRST)], [get_gradient_edge(x)], [], examples)
    assert owners.clean and torch.equal(owners.each[order, 0].long(), torch.arange(2 * examples) // 2)


def _crossed(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[0] = x[0] + 1e-3 * x[1]
    return made


_SHAPED = {
    "examples first": lambda x: x.relu(),
    "examples second": lambda x: x.transpose(0, 1).relu(),
    "flat": lambda x: x.flatten(0, 1).relu(),
    "flat, examples fastest": lambda x: x.transpose(0, 1).flatten(0, 1) * 2,
    "another order": lambda x: x.flip(0) * 2,
    "one element of two": _crossed,
    "everybody's": lambda x: x - x.mean(0),
    "the diagonal alone": lambda x: x * torch.eye(*x.shape[:2])[..., None],
    "small": lambda x: torch.cat([x[:, :1] * 1e-33, x[:, 1:]], 1),
    "no numbers": lambda x: torch.cat([x[:1] * torch.inf, x[1:]]),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x.flip(0)) * (1 + 2j)).sum(-1),
}


@pytest.mark.parametrize("examples", [2, 5, 20, 70])
@pytest.mark.parametrize("shaped", _SHAPED)
def test_a_guess_that_all_bits_confirm_tells_what_the_bits_tell_by_themselves(shaped, examples, monkeypatch):
    """The guess is where the examples usually are; nothing but the time depends on it. There are as many positions as examples, too."""
    for positions in {3, examples}:
        x = torch.randn(examples, positions, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        at = _SHAPED[shaped](x * 1.5)
        back = {"examples second": (0, 1), "flat, examples fastest": (0, 1)}
        y = at.view(positions, examples, 4).transpose(*back[shaped]) if shaped in back else at.reshape(x.shape)
        exits = [Exit(get_gradient_edge(y.sin()), y.detach(), FIRST)]
        edges = [get_gradient_edge(at), get_gradient_edge(x)]
        quick = tagged(exits, edges, [], examples)[0]
        with monkeypatch.context() as patch:
            patch.setattr(digits, "_likely", lambda shape, examples: None)
            slow = tagged(exits, edges, [], examples)[0]
        for one, other in zip(quick, slow, strict=True):
            assert one.proved == other.proved and torch.equal(one.each, other.each)
            assert layouts_of(one.each, examples) == layouts_of(other.each, examples) == layouts_of(one.each.clone(), examples)


def test_a_run_holds_no_logits_of_its_proof_nor_of_a_pass_whose_gradient_has_come_back():
    """They are the largest thing that there is: a vocabulary for every token."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1 << 15))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: list[weakref.ref[torch.Tensor]] = []
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, max_grad_norm=1.0, batch_size=16, dataset_size=32, steps=3)
    private = make_private(model, optimizer, plan, seed=0)
    model.register_forward_hook(lambda _module, _args, output: made.append(weakref.ref(output)))
    loss = private.loss(lambda scores: scores.pow(2).mean(1))
    held = []
    for (x,) in private.loader(torch.utils.data.TensorDataset(torch.randn(32, 4))):
        scores = model(x)
        held.append(sum(each() is not None for each in made))
        loss(scores).backward()
        del scores
        held.append(sum(each() is not None for each in made))
        optimizer.step()
    assert len(made) > 6 and held == [1, 0] * 3


class _Faint(torch.autograd.Function):
    """The identity, whose gradient lets a little of another example's through."""

    @staticmethod
    def forward(ctx, x, way, factor):
        ctx.way, ctx.factor = way, factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + ctx.factor * _WAYS[ctx.way](g), None, None


def _in_blocks(g: torch.Tensor, by: int) -> torch.Tensor:
    return g.view(-1, 16, *g.shape[1:]).roll(by, 1).view_as(g) if len(g) % 16 == 0 else torch.zeros_like(g)


_WAYS = {
    "the next one's": lambda g: g.roll(-1, 0),
    "the one's before": lambda g: g.roll(1, 0),
    "the next one's of sixteen": lambda g: _in_blocks(g, -1),
    "the one's before of sixteen": lambda g: _in_blocks(g, 1),
    "everybody's": lambda g: g.mean(0).expand_as(g) if len(g) > 20 else torch.zeros_like(g),
}


@pytest.mark.parametrize("factor", [1e-9, 1e-15, 1e-20])
@pytest.mark.parametrize("way", _WAYS)
def test_a_gradient_that_is_too_faint_for_the_digits_is_seen_by_huge_losses_of_others(way, factor):
    """Each example counts by what it gives alone, though another one's loss is huge; or the model is refused."""
    torch.manual_seed(3)
    model, x, clip = _Model(way, factor), torch.randn(64, 6), 0.1
    singles = [torch.autograd.grad(model(one[None]).square().sum(), list(model.parameters())) for one in x]
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    with suppress(NotIsolated):
        for heavy in (0, 5, 16, 40):
            weights = torch.ones(64).index_fill(0, torch.tensor([heavy]), 3 / factor)
            capture.examples(len(x))
            (model(x).square().sum(1) * weights).sum().backward()
            made = list(capture.collect(Flat(clip)).raw_sums.values())
            for gs, weight in zip(singles, weights.double(), strict=True):
                norm = weight * sum(g.double().square().sum() for g in gs).sqrt()
                made = [m - g.double() * weight * min(1.0, clip / norm) for m, g in zip(made, gs, strict=True)]
            assert sum(float(m.square().sum()) for m in made) < (1e-4 * clip) ** 2


class _Model(nn.Module):
    def __init__(self, way: str, factor: float) -> None:
        super().__init__()
        self.first, self.last, self.way, self.factor = nn.Linear(6, 5), nn.Linear(5, 2), way, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(_Faint.apply(self.first(x).tanh(), self.way, self.factor))
