"""A loss sees single examples whatever holds their tensors, and whatever it draws; an extreme example is none that mixes."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hushgrad.errors import ArgumentError, NotIsolated
from hushgrad.train import Plan, make_private

N = 12
Pair = namedtuple("Pair", "x y")


@dataclass
class Fields:
    x: Tensor
    y: Tensor


class Made(tuple):
    x = property(lambda self: self[0])

    def __new__(cls, batch):
        made = super().__new__(cls, batch)
        made.second = 1
        return made

    @property
    def y(self):
        return self[self.second]


class MadePair(Pair):
    def __new__(cls, batch):
        return super().__new__(cls, *batch)


class Names(UserDict):
    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Ordered(OrderedDict):
    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


# What a loop makes of a batch (x, y), and how x and y are read of it.
KINDS = {
    "the batch": (lambda batch: batch, lambda b: b[0], lambda b: b[1]),
    "dict": (lambda batch: {"x": batch[0], "y": batch[1]}, lambda b: b["x"], lambda b: b["y"]),
    **{
        name: (make, lambda b: b.x, lambda b: b.y)
        for name, make in {
            "named tuple": lambda batch: Pair(*batch),
            "tuple of its own": Made,
            "named tuple of its own": MadePair,
            "dataclass": lambda batch: Fields(*batch),
            "user dict": lambda batch: Names(x=batch[0], y=batch[1]),
            "ordered dict": lambda batch: Ordered(x=batch[0], y=batch[1]),
        }.items()
    },
}


class _Rows(Dataset):
    """Twelve pairs, some of them with targets as they are given."""

    def __init__(self, seed, **targets):
        generator = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(N, 5, generator=generator), torch.randn(N, 3, generator=generator)
        for at, value in targets.items():
            self.y[int(at[1:])] = value

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def _squares(out, y):
    return (out - y).square().sum(1).mean()


def _step(data, loss, fn, *, model=None, certified=False, **options):
    """The clipped sum of one step in which ``loss(private's loss, model, batch)`` is what a loop computes; nobody vouches for it."""
    torch.manual_seed(7)
    model = model or nn.Linear(5, 3)
    plan = Plan.dpgd(noise_multiplier=0.0, delta=1e-5, dataset_size=N, steps=1, max_grad_norm=0.5, certified=certified)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=1)
    before = [p.detach().clone() for p in model.parameters()]
    own = private.loss(fn, **options)
    try:
        for batch in private.loader(data):
            loss(own, model, batch).backward()
            private.optimizer.step()
        assert not any("vouched" in note for note in private.spent().notes)
    finally:
        private.detach()
    return torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)]) * N


def _usual(data):
    return _step(data, lambda own, model, batch: own(model(batch[0]), batch[1]), _squares)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_in_any_container_is_cut_into_its_examples(kind):
    """What torch's trees do not open was handed whole to each example: mixup of a loader's own batch moved a sum by 5 C, unnoticed."""
    make, x_of, y_of = KINDS[kind]
    mixed = {
        "mixup": lambda m, b: _squares(m(0.6 * x_of(b) + 0.4 * x_of(b).flip(0)), y_of(b)),
        "contrast": lambda m, b: F.cross_entropy(m(x_of(b)) @ m(x_of(b)).T, torch.arange(len(x_of(b)))),
        "gradient alone": lambda m, b: (
            _squares(m(x_of(b)), y_of(b)) + (lambda s: s - s.detach())(m(x_of(b)).mean(0).square().sum())
        ),
    }
    data = _Rows(len(kind))
    made = _step(data, lambda own, model, b: own(model, make(b)), lambda m, b: _squares(m(x_of(b)), y_of(b)))
    torch.testing.assert_close(made, _usual(data))
    for name, fn in mixed.items():
        with pytest.raises(NotIsolated):
            _step(data, lambda own, model, b, fn=fn: own(model, make(b)), fn)
            pytest.fail(name)
    alone = _step(data, lambda own, model, b: own(model(b[0]), make(b)), lambda out, b: _squares(out, y_of(b)))
    torch.testing.assert_close(alone, _usual(data))


@pytest.mark.parametrize("kind", ["dict", "named tuple", "dataclass", "user dict", "ordered dict"])
def test_outputs_in_any_container_have_their_examples(kind):
    make, x_of, _ = KINDS[kind]

    class Answer(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return make((out, out.detach() * 2))

    data = _Rows(3)
    torch.manual_seed(7)
    made = _step(data, lambda own, model, b: own(model(b[0]), b[1]), lambda out, y: _squares(x_of(out), y), model=Answer(5, 3))
    torch.testing.assert_close(made, _usual(data))


def test_a_certified_run_tries_a_loss_of_the_model_and_the_batch():
    data = _Rows(6)
    made = _step(data, lambda own, model, b: own(model, b), lambda m, b: _squares(m(b[0]), b[1]) * len(b[0]), certified=True)
    torch.testing.assert_close(made, _usual(data), rtol=1e-3, atol=1e-5)


def test_what_cannot_be_cut_is_refused():
    class Closed:
        def __init__(self, batch):
            self.x, self.y = batch

    with pytest.raises(ArgumentError, match="Closed, of which single examples cannot be taken"):
        _step(_Rows(0), lambda own, model, b: own(model, Closed(b)), lambda m, b: _squares(m(b.x), b.y))


@pytest.mark.parametrize("value", [1e19, 3e38, float("inf"), float("-inf"), float("nan")])
def test_a_loss_that_is_no_number_is_no_sign_of_mixing(value):
    """A record whose loss is infinite, in the first batch, was said to change what others count."""
    data, without = _Rows(1, _4=value), _Rows(1)
    for loss, fn in (
        (lambda own, model, b: own(model(b[0]), b[1]), _squares),
        (lambda own, model, b: own(model, b), lambda m, b: _squares(m(b[0]), b[1])),
    ):
        moved = _step(data, loss, fn) - _usual(without)
        assert float(moved.norm()) <= 2 * 0.5 * (1 + 1e-4)
        with pytest.raises(NotIsolated):  # the others show it
            _step(data, lambda own, model, b: own(model(b[0]), b[1]), lambda out, y: _squares(out, y.flip(0)))


def _diffusion(model, batch):
    x, y = batch
    time = torch.randint(1, 10, (len(x),)) / 10
    return _squares(model(x + time[:, None] * torch.randn_like(x)), y)


def test_a_loss_that_draws_for_each_example_is_none_that_mixes():
    data = _Rows(2)
    _step(data, lambda own, model, b: own(model, b), _diffusion)
    _step(data, lambda own, model, b: own(model(b[0]), b[1]), lambda out, y: _squares(out + torch.rand_like(out), y))
    with pytest.raises(NotIsolated):
        _step(data, lambda own, model, b: own(model, b), lambda m, b: _diffusion(m, (b[0], b[1][torch.randperm(len(b[1]))])))


def test_a_loss_of_the_model_may_take_gradients_itself():
    def penalised(model, batch):
        x = batch[0].clone().requires_grad_()
        slope = torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        return _squares(model(batch[0] + 0 * slope), batch[1])

    data = _Rows(5)
    torch.testing.assert_close(_step(data, lambda own, model, b: own(model, b), penalised), _usual(data))
