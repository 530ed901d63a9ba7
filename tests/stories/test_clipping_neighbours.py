"""Neighbouring batches: whatever a model does that its first batches did not show, one record moves the clipped sum by at most C.

Each class of models is drawn at random. A model is read exactly, or refused; none is trusted for what it did on other data.
"""

import random

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated

C = 1e-3
SLOW = pytest.mark.slow
SEEDS = [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 6))]
REFUSED = (CaptureError, NotIsolated)


def rows(inputs):
    return len(inputs[0])


def clipped(capture, model, inputs, loss=None):
    """The clipped sum of one step, as one vector."""
    torch.manual_seed(5)
    capture.examples(rows(inputs))
    out = model(*inputs)
    (loss(out) if loss else out.flatten(1).square().sum()).backward()
    made = capture.collect(Flat(C))
    return torch.cat([made.raw_sums[name].flatten() for name in sorted(made.raw_sums)]).double()


def without(inputs, i):
    keep = torch.tensor([j for j in range(rows(inputs)) if j != i])
    return tuple(x[keep] for x in inputs)


def gap(model, first, inputs, i, *, between=None, loss=None, again=None):
    """By how many C the sum moves when record i is left out (or becomes ``again``), after ``first`` batches; 0 if it is refused."""
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    try:
        for batch in first:
            clipped(capture, model, batch, loss)
        if between:
            between(model)
        a = clipped(capture, model, inputs, loss)
        b = clipped(capture, model, without(inputs, i) if again is None else again, loss)
    except REFUSED:
        return 0.0
    finally:
        capture.detach()
    return float((a - b).norm()) / C


class Two(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between, width=6):
        super().__init__()
        self.a, self.b, self.between = nn.Linear(width, 8), nn.Linear(8, 3), between

    def forward(self, x, *more):
        return self.b(self.between(self.a(x), *more) if more else self.between(self.a(x)))


def drawn(seed, *shape):
    torch.manual_seed(seed)
    return torch.randn(*shape)


# What the key of a structure must hold ------------------------------------------------------------------------------------------


class Trimmed(nn.Module):
    """Positions beyond the longest record are cut off; the rest is reduced over all that are left."""

    def __init__(self, reduce, flat):
        super().__init__()
        self.a, self.b, self.reduce, self.flat = nn.Linear(4, 6), nn.Linear(6, 3), reduce, flat

    def forward(self, x):
        length = max(1, int((x[..., 0] != 0).sum(1).max()))
        x = x[:, :length]
        h = self.a(x.flatten(0, 1)).view(len(x), length, 6) if self.flat else self.a(x)
        return self.b(self.reduce(h.tanh()))


@pytest.mark.parametrize(("flat", "seed"), [(False, 0), (True, 1), *(pytest.param(k % 2, k, marks=SLOW) for k in range(2, 8))])
def test_cut_to_the_longest_record(flat, seed):
    lot = random.Random(seed)
    B, T, i = 16, 10, lot.randrange(16)
    reduce = lot.choice([lambda h: h.mean(1), lambda h: h[:, -1], lambda h: h.sum(1) / h.shape[1] ** 0.5])
    x = drawn(seed, B, T, 4)
    later = x.clone()
    later[:, lot.randrange(2, 6) :] = 0
    later[i] = x[i]
    torch.manual_seed(seed)
    assert gap(Trimmed(reduce, flat), [(x,)], (later,), i) <= 1.0001


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_beyond_the_proved_ones(seed):
    lot = random.Random(seed)
    limit = lot.randrange(12, 30)
    model = Two(lambda h: (h - h.detach().mean((0, 1)) if h.shape[1] > limit else h).mean(1))
    first = [(drawn(seed + t, 12, t, 6),) for t in lot.sample(range(3, 11), 4)]
    x = drawn(seed, 12, limit + lot.randrange(1, 9), 6)
    x[3] *= 1e4
    assert gap(model, first, (x,), 3) <= 1.0001


def test_lengths_between_proved_ones_are_not_proved_again():
    model = Two(lambda h: h.mean(1))
    capture = Capture(model)
    capture.attach()
    for t in (3, 9, 6):
        clipped(capture, model, (drawn(t, 5, t, 6),))
    proofs, prove = [], capture._root._trials.proved
    capture._root._trials.proved = lambda *args: proofs.append(args) or prove(*args)
    for t in (4, 5, 7, 8):
        clipped(capture, model, (drawn(t, 5, t, 6),))
    assert not proofs
    clipped(capture, model, (drawn(0, 5, 10, 6),))
    assert len(proofs) == 1
    capture.detach()


class Switch(nn.Module):
    """A plain attribute, of the module or of a configuration that it holds, decides whether examples are centred."""

    def __init__(self, off, on, held):
        super().__init__()
        self.a, self.b, self.on = nn.Linear(6, 8), nn.Linear(8, 3), on
        self.config = type("Config", (), {})() if held else self
        self.config.mode = off

    def forward(self, x):
        h = self.a(x)
        return self.b(h - h.detach().mean(0) if self.config.mode == self.on else h)


@pytest.mark.parametrize(
    ("off", "on", "held"),
    [(False, True, False), (0.5, 0.25, True), ("plain", "centred", False), (None, 3, True), pytest.param(0, 1, True, marks=SLOW)],
)
def test_an_attribute_that_changes_later(off, on, held):
    x = drawn(0, 12, 6)
    x[2] *= 1e4
    model = Switch(off, on, held)
    assert gap(model, [(x,)], (x,), 2, between=lambda m: setattr(m.config, "mode", on)) <= 1.0001


class Remembers(nn.Module):
    """Something of an earlier batch is in the next one's outputs; ``after`` so many passes."""

    def __init__(self, where, after):
        super().__init__()
        self.a, self.b, self.where, self.after, self.passes = nn.Linear(6, 8), nn.Linear(8, 3), where, after, 0
        self.register_buffer("mean", torch.zeros(8))
        self.kept, self.many = torch.zeros(8), []

    def forward(self, x):
        h = self.a(x)
        self.passes += 1
        seen = h.detach().mean(0)
        if self.where == "buffer":
            self.mean.lerp_(seen, 0.1)
            before = self.mean
        elif self.where == "attribute":
            before, self.kept = self.kept, 0.9 * self.kept + 0.1 * seen
        else:
            before = self.many[-1] if self.many else torch.zeros(8)
            self.many.append(seen)
        return self.b(h - before if self.passes > self.after else h)


@pytest.mark.parametrize(
    ("where", "after", "examples"),
    [("buffer", 0, 1), ("attribute", 0, 1), ("attribute", 20, 5), ("list", 0, 5), pytest.param("list", 20, 1, marks=SLOW)],
)
def test_what_an_earlier_batch_left_behind(where, after, examples):
    model = Remembers(where, after)
    capture = Capture(model)
    capture.attach()
    with pytest.raises(REFUSED):
        clipped(capture, model, (drawn(0, examples, 6),))
    assert model.passes == 0  # the proof's own passes are not counted
    capture.detach()


class Reads(nn.Module):
    """Words, of whose earlier batches something is kept: integers have no size that could be changed."""

    def __init__(self, what):
        super().__init__()
        self.e, self.a, self.b, self.what = nn.Embedding(12, 6), nn.Linear(6, 8), nn.Linear(8, 3), what
        self.kept = torch.zeros(8 if what == "mean" else 12)

    def forward(self, words):
        h = self.a(self.e(words))
        if self.what == "mean":
            before, self.kept = self.kept, 0.9 * self.kept + 0.1 * h.detach().mean((0, 1))
            return self.b((h - before).mean(1))
        weights = 1 / (1 + self.kept[words])
        self.kept = self.kept + torch.bincount(words.flatten(), minlength=12)
        return self.b((h * weights.unsqueeze(2)).mean(1))


@pytest.mark.parametrize(("what", "examples"), [("mean", 5), ("counts", 5), pytest.param("counts", 30, marks=SLOW)])
def test_what_earlier_words_left_behind(what, examples):
    torch.manual_seed(4)
    model = Reads(what)
    capture = Capture(model, unused="zero")
    capture.attach()
    with pytest.raises(NotIsolated, match="an earlier batch"):
        clipped(capture, model, (torch.randint(1, 12, (examples, 6)),))
    capture.detach()


class Range(nn.Module):
    """Words of which the largest decides something for all: in the first batches each example has it."""

    def __init__(self, what):
        super().__init__()
        self.e, self.a, self.b, self.what = nn.Embedding(12, 6), nn.Linear(6, 8), nn.Linear(8, 3), what
        self.e.weight.data[9:] *= 5  # those that come later

    def forward(self, words):
        if self.what == "part of its range":
            return self.b(self.a(self.e((words / words.max() * 7).long())).mean(1))
        if self.what == "classes":
            return self.b(self.a(self.e(words)).mean(1) / F.one_hot(words).shape[-1])
        known = self.e.weight[: int(words.max()) + 1]
        return self.b(self.a((self.e(words).mean(1) @ known.T).softmax(-1) @ known))


@pytest.mark.parametrize("what", ["part of its range", "classes", "known words"])
def test_an_integer_that_no_example_had_so_far(what):
    torch.manual_seed(4)
    words = torch.randint(1, 8, (9, 5))
    words[:, 0] = 8
    later = words.clone()
    later[3, 2] = 11
    assert gap(Range(what), [(words,)], (later,), 3) <= 1.0001


ANSWERS = {  # an answer about all integers, or all numbers, of a batch, which one of its examples may already decide
    "largest": lambda x, k: x.max(),
    "smallest": lambda x, k: x.min(),
    "any": lambda x, k: (x == k).any(),
    "all below": lambda x, k: (x < k).all(),
    "none above": lambda x, k: ~(x > k).any(),
    "some at most": lambda x, k: (x <= k).any(),
    "none": lambda x, k: (x != k).all(),
}


class Answered(nn.Module):
    """Words, and numbers, scaled by what an answer about the whole batch says."""

    def __init__(self, answer, bound, numbers):
        super().__init__()
        self.e, self.l, self.b = nn.Embedding(20, 6), nn.Linear(5, 6), nn.Linear(6, 3)
        self.answer, self.bound, self.numbers = answer, bound, numbers

    def forward(self, x):
        h = self.l(x) if self.numbers else self.e(x).mean(1)
        return self.b(h.tanh()) * (1 + self.answer(x, self.bound).to(h.dtype))


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("what", ANSWERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_about_a_batch_that_each_of_its_examples_gives_alone(seed, what, numbers):
    """None of its examples shows that it follows from the others: all hold the same extremes, or are on one side of the bound."""
    lot = random.Random(seed)
    torch.manual_seed(seed)
    B, bound = lot.choice([2, 3, 5, 8, 14]), lot.randrange(3, 17)
    x = torch.randint(1, 19, (B, 5))
    x[:, lot.randrange(5)] = lot.choice([19, bound, bound + 1])
    x[:, lot.randrange(5)] = lot.choice([0, bound, bound - 1])
    model = Answered(ANSWERS[what], bound, numbers)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    with pytest.raises(REFUSED):
        clipped(capture, model, (x.float() if numbers else x,))
    capture.detach()


def test_a_batch_of_one_is_proved_and_then_read():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    assert float(clipped(capture, model, (drawn(0, 1, 6),)).norm()) == pytest.approx(C, rel=1e-4)
    assert capture._root.known.proved(capture._root.attributes.key([drawn(0, 1, 6)]))
    capture.detach()


@pytest.mark.parametrize("value", [3e38, -3e38, 1e20, 1e-41, float("inf"), float("nan")])
def test_no_record_alone_in_the_first_batch_keeps_a_run_from_its_start(value):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    assert float(clipped(capture, model, (torch.full((1, 6), value),)).norm()) <= C * (1 + 1e-4)
    capture.detach()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_capacity_that_only_larger_batches_reach(seed):
    lot = random.Random(seed)
    room = lot.randrange(9, 30)

    def full(h):
        mine = h[:, 0] > h[:, 1]
        return h * (1 - 2.0 * (mine & (mine.cumsum(0) <= room)).unsqueeze(1))

    x = drawn(seed, 6 * room, 6)
    torch.manual_seed(seed)
    model = Two(full)
    i = int((model.a(x)[:, 0] > model.a(x)[:, 1]).nonzero()[0])
    assert gap(model, [(x[:2],)], (x,), i) <= 1.0001


# Order inside the model ---------------------------------------------------------------------------------------------------------

ORDERS = {
    "index": (lambda h, o: h[o], lambda h, o: h[o.argsort()]),
    "index_select": (lambda h, o: h.index_select(0, o), lambda h, o: h.index_select(0, o.argsort())),
    "gather": (
        lambda h, o: h.gather(0, o.unsqueeze(1).expand_as(h)),
        lambda h, o: h.gather(0, o.argsort().unsqueeze(1).expand_as(h)),
    ),
    "index_copy": (lambda h, o: h[o], lambda h, o: torch.zeros_like(h).index_copy(0, o, h)),
    "scatter": (lambda h, o: h[o], lambda h, o: torch.zeros_like(h).scatter(0, o.unsqueeze(1).expand_as(h), h)),
    "index_put": (lambda h, o: h[o], lambda h, o: torch.zeros_like(h).index_put((o,), h)),
}


class Sorted(nn.Module):
    """A layer on examples in another order, by a key that ties in the first batch."""

    def __init__(self, there, back, bare):
        super().__init__()
        self.a, self.b, self.c, self.there, self.back = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), there, back
        self.scale = nn.Parameter(torch.randn(8)) if bare else None

    def forward(self, x, key):
        order = key.argsort(descending=True, stable=True)
        h = self.there(self.a(x).tanh(), order)
        h = self.b(h) if self.scale is None else self.b(h * self.scale)
        return self.c(self.back(h, order))


@pytest.mark.parametrize(("first", "bare"), [(8, False), pytest.param(2, True, marks=SLOW)])
@pytest.mark.parametrize("way", ORDERS)
def test_an_order_that_the_first_batch_does_not_show(way, bare, first):
    torch.manual_seed(0)
    B, bare = 12, bare or way == "index"
    model = Sorted(*ORDERS[way], bare).double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    clipped(capture, model, (drawn(1, first, 6).double(), torch.full((first,), 9)))
    x, key = drawn(2, B, 6).double() * torch.logspace(-2, 2, B)[:, None].double(), torch.randperm(B)
    capture.examples(B)
    model(x, key).square().sum().backward()
    found = capture.collect(Flat(C)).raw_norms
    capture.detach()
    for i in range(B):
        model.zero_grad()
        model(x[i : i + 1], key[i : i + 1]).square().sum().backward()
        alone = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        torch.testing.assert_close(found[i], alone, rtol=1e-8, atol=1e-12)


def test_an_order_by_a_product_is_refused():
    """One record that is NaN makes everybody's row NaN."""

    def product(h, order):
        return F.one_hot(order, len(order)).to(h) @ h

    model = Sorted(product, lambda h, o: F.one_hot(o, len(o)).to(h).mT @ h, False)
    capture = Capture(model)
    capture.attach()
    with pytest.raises(REFUSED):
        clipped(capture, model, (drawn(1, 8, 6), torch.full((8,), 7)))
    capture.detach()


# Thresholds over the batch ------------------------------------------------------------------------------------------------------

FLAGS = {
    "any NaN": (lambda h: h.isnan().any(), float("nan")),
    "any infinity": (lambda h: h.isinf().any(), float("inf")),
    "not all finite": (lambda h: not h.isfinite().all(), float("inf")),
    "above a million": (lambda h: h.abs().max() > 1e6, 1e9),
    "above 1e20": (lambda h: h.abs().max() > 1e20, 1e24),
    "an empty one": (lambda h: bool((h == 0).all(-1).any()), 0.0),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_over_the_batch(flag, seed):
    lot = random.Random(seed)
    raised, value = FLAGS[flag]
    what = lot.choice([lambda h: h * 0.1, lambda h: h.clamp(-0.1, 0.1), lambda h: -h])
    inside = lot.random() < 0.5 and value != 0.0

    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            if inside:
                h = self.a(x)
                return self.b(what(h) if raised(h) else h)
            return self.b(self.a(what(x) if raised(x) else x))

    x = drawn(seed, 12, 6)
    bad = x.clone()
    bad[4] = value if value == 0.0 else x[4]
    bad[4, 0] = value
    assert gap(Flagged(), [(x,)], (bad,), 4) <= 1.0001


@pytest.mark.parametrize("share", [1e-7, 1e-20])
def test_an_influence_below_all_tolerances(share):
    x = drawn(0, 12, 6)
    x[1] *= 1e3 / share if share > 1e-18 else 1e24
    assert gap(Two(lambda h: h + share * h.detach().mean(0)), [(drawn(1, 12, 6),)], (x,), 1) <= 1.0001


HOOKS = {
    "bounded": lambda g: g * (1e7 / (g.norm() + 1e-9)).clamp(max=1),
    "zero if any is NaN": lambda g: g if g.isfinite().all() else torch.zeros_like(g),
    "bounded, but not by NaN": lambda g: g * min(1.0, 1e3 / float(g.norm())),
    "normed": lambda g: g / (g.norm() + 1e-12),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_gradients_that_look_at_the_batch(hook):
    def watched(h):
        if h.requires_grad:
            h.register_hook(HOOKS[hook])
        return h

    model = Two(watched)
    capture = Capture(model)
    capture.attach()
    with pytest.raises(REFUSED):
        clipped(capture, model, (drawn(0, 8, 6),))
    capture.detach()


# Outputs of all examples --------------------------------------------------------------------------------------------------------


class Beside(nn.Module):
    """An output of all examples together beside one for each."""

    def __init__(self, beside):
        super().__init__()
        self.a, self.b, self.beside = nn.Linear(6, 8), nn.Linear(8, 3), beside

    def forward(self, x):
        h = self.a(x)
        y = self.b(h)
        return {"out": y, "beside": self.beside(h, y)}


OF_ALL = {
    "a number": lambda h, y: h.mean(0).square().sum(),
    "a vector": lambda h, y: h.mean(0),
    "a matrix": lambda h, y: h.mT @ h,
}


@pytest.mark.parametrize("beside", OF_ALL)
def test_a_loss_of_an_output_of_all_examples(beside):
    x = drawn(0, 12, 6)
    x[1] *= 1e3

    def loss(out):
        return out["out"].square().sum() + 10 * out["beside"].square().sum()

    assert gap(Beside(OF_ALL[beside]), [(drawn(1, 12, 6),)], (x,), 1, loss=loss) <= 1.0001
    if beside == "a number":  # it may be there
        assert gap(Beside(OF_ALL[beside]), [], (x,), 1, loss=lambda out: out["out"].square().sum()) > 0.5


@pytest.mark.parametrize(
    "beside", [lambda h, y: y.square().mean(), lambda h, y: h.square().sum(), lambda h, y: y.square().sum(1).mean()]
)
def test_a_sum_over_examples_may_be_the_loss(beside):
    model = Beside(beside)
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    x = drawn(0, 6, 6)
    capture.examples(6)
    model(x)["beside"].backward()
    assert capture.collect(Flat(C)).raw_norms.isfinite().all()
    capture.detach()


# One record that is no number, or overflows --------------------------------------------------------------------------------------


class Functional(nn.Module):
    """A parameter that meets the examples in an operation without a formula."""

    def __init__(self, size, use):
        super().__init__()
        self.w, self.use = nn.Parameter(torch.randn(size) * 0.3), use

    def forward(self, x):
        return self.use(x, self.w)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, choice = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            where = (choice == k).nonzero().flatten()
            out = out.index_add(0, where, expert(flat[where]) * weight[where, None])
        return out.view(x.shape).mean(1)


FRAGILE = {
    "convolution": lambda: Functional((3, 6, 3), lambda x, w: F.conv1d(x, w * 1.0).mean(2)),
    "batched product": lambda: Functional((4, 5), lambda x, w: torch.einsum("btd,dk->btk", x, w).mean(1)),
    "layer norm": lambda: Functional((4,), lambda x, w: F.layer_norm(x, (4,), w * 2).mean(1)),
    "bilinear": lambda: Functional((3, 4, 4), lambda x, w: F.bilinear(x, x, w).mean(1)),
    "PReLU": lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Flatten()),
    "experts": Experts,
    "plain": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", FRAGILE)
def test_one_bad_record_counts_at_most_as_one(model, seed):
    lot = random.Random(f"{model} {seed}")
    value = lot.choice([float("nan"), float("inf"), 1e38, -1e19])
    torch.manual_seed(0)
    x, i = drawn(1, 8, 6, 4), lot.randrange(8)
    bad = x.clone()
    bad[i].view(-1)[lot.randrange(24)] = value
    made = FRAGILE[model]()
    capture = Capture(made, loss_reduction="sum", unused="zero", check_isolation=lot.random() < 0.5)
    capture.attach()
    usual = clipped(capture, made, without((x,), i))
    moved = float((clipped(capture, made, (bad,)) - usual).norm()) / C
    capture.detach()
    assert moved <= 1.0001


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", ["convolution", "PReLU", "experts", "plain"])
def test_a_bad_record_in_the_first_batch(model, seed):
    value = random.Random(f"{model} {seed}").choice([float("nan"), float("inf"), 1e38, 1e19])
    torch.manual_seed(0)
    x = drawn(1, 8, 6, 4)
    bad = x.clone()
    bad[0, 0, 0] = value
    made = FRAGILE[model]()
    capture = Capture(made, loss_reduction="sum", unused="zero")
    capture.attach()
    moved = clipped(capture, made, (bad,)) - clipped(capture, made, (x[1:],))
    capture.detach()
    assert float(moved.norm()) / C <= 1.0001


# Rows that several examples come to share, and branches that chance opens ----------------------------------------------------------


class Picked(nn.Module):
    """Each example takes one number of a layer's output on a constant: rows may get several owners later."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.register_buffer("table", torch.randn(16, 4))

    def forward(self, x, row, column):
        return x * self.layer(self.table)[row, column][:, None]


def test_rows_that_get_several_owners_later():
    torch.manual_seed(0)
    model, B = Picked().double(), 8
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    column = torch.arange(B)
    clipped(capture, model, (drawn(1, B, 3).double(), torch.randperm(B), column))
    x, row = drawn(2, B, 3).double(), torch.tensor([0, 0, 0, 3, 3, 1, 2, 0])
    capture.examples(B)
    model(x, row, column).square().sum().backward()
    found = capture.collect(Flat(C)).raw_norms
    capture.detach()
    for i in range(B):
        model.zero_grad()
        model(x[i : i + 1], row[i : i + 1], column[i : i + 1]).square().sum().backward()
        alone = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        torch.testing.assert_close(found[i], alone, rtol=1e-8, atol=1e-12)


CHANCE = {
    "often": lambda h: h - h.detach().mean(0) if torch.rand(()) < 0.99 else h,
    "rarely": lambda h: h - h.detach().mean(0) if torch.rand(()) > 0.4 else h,
    "a factor": lambda h: h + 0.5 * h.detach().std(0, unbiased=False) * torch.randn_like(h),
}


@pytest.mark.parametrize("chance", CHANCE)
def test_a_branch_or_a_factor_of_chance(chance):
    model = Two(CHANCE[chance])
    capture = Capture(model)
    capture.attach()
    with pytest.raises(REFUSED):
        clipped(capture, model, (drawn(0, 8, 6),))
    capture.detach()


# How it is read -------------------------------------------------------------------------------------------------------------------


def test_the_table_of_how_a_model_is_read():
    model = nn.Sequential(Experts(), nn.Linear(4, 2), nn.PReLU())
    capture = Capture(model, unused="zero")
    capture.attach()
    assert "not proved yet" in capture.explain()
    clipped(capture, model, (drawn(0, 8, 6, 4),))
    table = capture.explain().splitlines()
    capture.detach()
    assert table[0].split() == ["module", "rule", "layout", "cost"]
    assert any(line.startswith("0.experts.1") and "rows chosen by the data" in line for line in table)
    assert any(line.startswith("1 ") and "examples as the rule expects them" in line for line in table)
    assert any(line.startswith("2.weight") and "shared by the examples" in line for line in table)


# The capture is not there ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_attention_computes_the_same_bits(training):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).train(training)
    x = drawn(1, 5, 7, 8)
    plain = model(x)
    capture = Capture(model)
    capture.attach()
    capture.examples(5)
    assert torch.equal(model(x), plain)
    assert torch.backends.mha.get_fastpath_enabled()
    capture.detach()


def test_a_reentrant_checkpoint_without_gradients_is_named():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)

    model = Checkpointed()
    capture = Capture(model)
    capture.attach()
    with pytest.raises(CaptureError, match="use_reentrant=False"), pytest.warns(UserWarning, match="requires_grad"):
        clipped(capture, model, (drawn(0, 6, 6),))
    capture.detach()


def test_a_schedule_is_not_proved_for_ever():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.heat = nn.Linear(6, 3), 1.0

        def forward(self, x):
            return self.layer(x) / self.heat

    model, proofs = Tempered(), []
    capture = Capture(model)
    capture.attach()
    prove = capture._root._trials.proved
    capture._root._trials.proved = lambda *args: proofs.append(args) or prove(*args)
    for _ in range(20):
        model.heat *= 0.9
        clipped(capture, model, (drawn(0, 3, 6),))
    assert 1 < len(proofs) < 12
    capture.detach()
