"""Whose row is it: small models in which sizes mislead. Every one is exact, or refused; none is guessed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.testing.rules import one_by_one, sum_of_sines
from hushgrad.train import Plan, make_private

T, WIDTH, WORDS = 6, 8, 20


def exact(model, inputs, *, examples=None, loss=sum_of_sines):
    """The clipped sum and the norms equal single-example passes."""
    model, inputs = model.double(), tuple(x.double() if x.is_floating_point() else x for x in inputs)
    rows = one_by_one(model, inputs, loss, examples=examples)
    norms = sum(G.flatten(1).square().sum(1) for G in rows.values()).sqrt()
    clip = float(norms.median()) * 0.9
    expected = {name: torch.tensordot((clip / norms).clamp(max=1), G, dims=1) for name, G in rows.items()}
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    for _ in range(2):  # the second pass is not proved again
        loss(model(*inputs)).backward()
        clipped = capture.collect(Flat(clip))
        torch.testing.assert_close(clipped.raw_norms, norms, rtol=1e-9, atol=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(
                clipped.raw_sums[name], value, rtol=1e-8, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
            )
    capture.detach()


# What all examples share ------------------------------------------------------------------------------------------------------

SHARED = {
    "as it is": lambda p, B: p,
    "[None]": lambda p, B: p[None],
    "expand": lambda p, B: p[None].expand(B, -1, -1),
    "repeat": lambda p, B: p[None].repeat(B, 1, 1),
    "mean": lambda p, B: p.mean(0),
    "sum": lambda p, B: p.sum(0),
    "cumsum": lambda p, B: p.cumsum(0),
    "softmax": lambda p, B: p.softmax(0),
    "flip": lambda p, B: p.flip(0),
    "over its norm": lambda p, B: p / p.norm(),
    "a number": lambda p, B: p.mean().sigmoid(),
    "twice": lambda p, B: p + p.roll(1, 0).tanh(),
}


class Shared(nn.Module):
    def __init__(self, source, use):
        super().__init__()
        self.words, self.head, self.source, self.use = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3), source, use
        made = {
            "table": lambda: nn.Embedding(T, WIDTH),
            "layer": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
            "parameter": lambda: nn.ParameterList([torch.randn(T, WIDTH)]),
        }
        self.shared = made[source]()
        self.register_buffer("code", torch.randn(T, WIDTH, generator=torch.Generator().manual_seed(1)))

    def forward(self, ids):
        if self.source == "parameter":
            p = self.shared[0]
        else:
            p = self.shared(self.code if self.source == "layer" else torch.arange(T))
        x = self.words(ids)
        return self.head((x * self.use(p, len(ids)) + x).mean(1))


@pytest.mark.parametrize("B", [2, T])
@pytest.mark.parametrize("source", ["table", "layer", "parameter"])
@pytest.mark.parametrize("use", SHARED)
def test_what_all_examples_share(use, source, B):
    torch.manual_seed(0)
    exact(Shared(source, SHARED[use]), (torch.randint(WORDS, (B, T)),))


@pytest.mark.parametrize("B", [5, 20, 300])
def test_many_examples_have_more_than_one_digit(B):
    torch.manual_seed(0)
    exact(Shared("table", SHARED["over its norm"]), (torch.randint(WORDS, (B, T)),))


class Tower(nn.Module):
    """As many prompts as there are examples."""

    def __init__(self, prompts):
        super().__init__()
        self.text = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("prompts", torch.randn(prompts, WIDTH))

    def forward(self, x):
        return x @ self.text(self.prompts).mT


@pytest.mark.parametrize("B", [4, 7, 17])
def test_as_many_prompts_as_examples(B):
    torch.manual_seed(0)
    exact(Tower(B), (torch.randn(B, WIDTH),))


class TiedAndBare(nn.Module):
    """A table that is used twice, beside as many parameters that no module answers for."""

    def __init__(self):
        super().__init__()
        self.words, self.scale, self.shift = (
            nn.Embedding(WORDS, WIDTH),
            nn.Parameter(torch.ones(WIDTH)),
            nn.Parameter(torch.zeros(1)),
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids) * self.scale + self.shift)


def test_tied_weights_beside_bare_parameters():
    torch.manual_seed(0)
    exact(TiedAndBare(), (torch.randint(WORDS, (4, T)),))


class Own(nn.Embedding):
    """A table with a forward of its own has no rule."""

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = Own(WORDS, WIDTH), Own(T, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, ids):
        return self.head((self.words(ids) + self.places(torch.arange(T))).tanh().mean(1))


@pytest.mark.parametrize("B", [3, T])
def test_ways_that_look_alike_from_different_parameters(B):
    torch.manual_seed(0)
    exact(TwoTables(), (torch.randint(WORDS, (B, T)),))


# Where the examples are -------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """Layers on rows in another order than (examples, positions)."""

    def __init__(self, there, back, layer):
        super().__init__()
        self.before, self.layer, self.behind = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 2)
        self.there, self.back = there, back

    def forward(self, x):
        shape = x.shape
        return self.behind(self.back(self.layer(self.there(self.before(x))), shape)).mean(1)


WAYS = {
    "time first": (lambda x: x.transpose(0, 1), lambda y, s: y.transpose(0, 1)),
    "example after example": (lambda x: x.flatten(0, 1), lambda y, s: y.view(s)),
    "position after position": (lambda x: x.transpose(0, 1).flatten(0, 1), lambda y, s: y.view(s[1], s[0], -1).transpose(0, 1)),
    "windows": (lambda x: x.reshape(len(x) * 2, -1, WIDTH), lambda y, s: y.reshape(s)),
    "another order": (lambda x: x.flip(0), lambda y, s: y.flip(0)),
}


@pytest.mark.parametrize("B", [4, T])
@pytest.mark.parametrize("layer", [nn.Linear, nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("way", WAYS)
def test_rows_in_every_order(way, layer, B):
    torch.manual_seed(0)
    made = nn.Linear(WIDTH, WIDTH) if layer is nn.Linear else layer(WIDTH)
    exact(Turned(*WAYS[way], made), (torch.randn(B, T, WIDTH),))


class Experts(nn.Module):
    def __init__(self, top=1):
        super().__init__()
        self.gate, self.head, self.top = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2), top
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(3))

    def forward(self, x):
        rows = x.flatten(0, 1)
        value, choice = self.gate(rows).softmax(1).topk(self.top)
        out = torch.zeros_like(rows)
        for k, expert in enumerate(self.experts):
            where, rank = (choice == k).nonzero(as_tuple=True)
            out = out.index_add(0, where, expert(rows[where]) * value[where, rank, None])
        return self.head(out.view(x.shape).mean(1))


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("B", [3, T])
def test_rows_that_the_data_choose(B, top):
    torch.manual_seed(0)
    exact(Experts(top), (torch.randn(B, T, WIDTH),))


class Packed(nn.Module):
    """Only real tokens, one after another, go through the layers."""

    def __init__(self):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, ids):
        real = ids > 4
        y = torch.zeros(*ids.shape, WIDTH, dtype=self.layer.weight.dtype)
        y[real] = self.layer(self.words(ids[real])).tanh()
        return self.head(y.sum(1))


def test_packed_tokens():
    torch.manual_seed(0)
    exact(Packed(), (torch.randint(WORDS, (5, T)),))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, WIDTH, mode="mean"), nn.Linear(WIDTH, 2)

    def forward(self, ids, offsets):
        return self.head(self.bag(ids, offsets))


def test_bags_by_offsets_through_a_private_run():
    """A collated batch of bags of different lengths."""
    torch.manual_seed(0)
    data = [torch.randint(WORDS, (1 + i % 4,)) for i in range(12)]

    def collate(bags):
        sizes = torch.tensor([len(b) for b in bags])
        return torch.cat(bags), sizes.cumsum(0) - sizes

    model = Bag().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = [torch.autograd.grad(model(b, torch.tensor([0])).sin().sum(), list(model.parameters())) for b in data]
    norms = torch.stack([torch.stack([g.square().sum() for g in row]).sum().sqrt() for row in rows])
    expected = [sum(min(1.0, 0.5 / float(n)) * row[k] for n, row in zip(norms, rows, strict=True)) for k in range(3)]
    plan = Plan.dpgd(noise_multiplier=1e-13, delta=1e-5, dataset_size=12, steps=1, max_grad_norm=0.5)
    start = [p.detach().clone() for p in model.parameters()]
    private = make_private(model, optimizer, plan, seed=0, loss_reduction="sum")
    for ids, offsets in private.loader(data, collate_fn=collate):
        model(ids, offsets).sin().sum().backward()
        optimizer.step()
    for p, before, value in zip(model.parameters(), start, expected, strict=True):
        torch.testing.assert_close((before - p.detach()) * 12, value, rtol=1e-8, atol=1e-10)


# What must be refused ---------------------------------------------------------------------------------------------------------


class Influence(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.before, self.behind, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), mix

    def forward(self, x):
        return self.behind(self.mix(self.before(x)))


def capacity(x, room):
    mine = x[:, 0].detach() > -9
    keep = mine & (mine.long().cumsum(0) <= room)
    return x * keep.to(x).unsqueeze(1)


MIXING = {
    "centred": lambda x: x - x.mean(0),
    "centred without a gradient": lambda x: x - x.detach().mean(0),
    "the largest so far": lambda x: x * (x[:, :1] >= x[:, :1].detach().cummax(0).values),
    "the largest of the rest": lambda x: x * (x[:, :1] >= x[:, :1].detach().flip(0).cummax(0).values.flip(0)),
    "a capacity": lambda x: capacity(x, 4),
    "a capacity that this batch does not reach": lambda x: capacity(x, 12),
    "sorted": lambda x: x[x[:, 0].argsort()],
    "rolled": lambda x: x.roll(1, 0),
    "attention over the batch": lambda x: (x @ x.mT).softmax(-1) @ x,
    "a batch statistic in a branch": lambda x: x * 2 if float(x.detach().mean()) > 0 else x,
}


@pytest.mark.parametrize("B", [7, WIDTH])
@pytest.mark.parametrize("mix", MIXING)
def test_examples_that_influence_each_other(mix, B):
    torch.manual_seed(0)
    model = Influence(MIXING[mix])
    capture = Capture(model)
    capture.attach()
    with pytest.raises((NotIsolated, CaptureError)):
        model(torch.randn(B, WIDTH)).mean().backward()
    capture.discard()
    with pytest.raises((NotIsolated, CaptureError)):  # for good
        model(torch.randn(B, WIDTH)).mean().backward()
        capture.collect(Flat(1.0))


def test_a_model_that_returns_only_a_number_is_named():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2)

        def forward(self, x, y):
            return F.cross_entropy(self.layer(x), y)

    capture = Capture(model := Loss())
    capture.attach()
    with pytest.raises(CaptureError, match="Return the logits, or one loss for each example"):
        model(torch.randn(4, WIDTH), torch.randint(2, (4,)))


# The capture is not there ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Shared("layer", SHARED["mean"]), lambda: torch.randint(WORDS, (T, T))),
        (Experts(), lambda: torch.randn(4, T, WIDTH)),
        (Turned(*WAYS["windows"], nn.LayerNorm(WIDTH)), lambda: torch.randn(4, T, WIDTH)),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2)), lambda: torch.randn(4, WIDTH)),
    ],
)
def test_a_model_computes_the_same_with_and_without_the_capture(model, inputs):
    torch.manual_seed(0)
    x = inputs()
    torch.manual_seed(1)
    plain = model(x)
    capture = Capture(model)
    capture.attach()
    for _ in range(2):
        torch.manual_seed(1)
        captured = model(x)
        assert captured.shape == plain.shape
        assert torch.equal(captured, plain)
    capture.detach()
