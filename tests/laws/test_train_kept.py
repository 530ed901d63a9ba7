"""What a loss can reach by name is what it may have read, wherever the loop has put it."""

import functools
import itertools
import sys
import weakref
from array import array
from collections import UserDict
from contextvars import ContextVar
from queue import Queue
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.train import Plan, make_private
from hushgrad.train.loss_tracking import VOUCHED
from hushgrad.train.reachable_state import ReachableState

STATE = {"centre": 0.0}
SETTINGS = ModuleType("settings")


class _Slots:
    __slots__ = ("centre",)

    def __call__(self, out, y):
        return F.cross_entropy(out - self.centre, y)


class _Method:
    def __init__(self):
        self.inner, self.log = SimpleNamespace(centre=0.0), []

    @property
    def centre(self):
        return self.inner.centre

    def loss(self, out, y):
        return F.cross_entropy(out - self._shift(), y)

    def _shift(self):
        return self.centre


class _Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre, self.kept = 0.0, nn.ModuleDict({"one": nn.Identity()})

    def forward(self, out, y):
        return F.cross_entropy(out - self.centre, y)


class _Class:
    centre = 0.0

    def __call__(self, out, y):
        return F.cross_entropy(out - type(self).centre, y)


def _helped(out, y):
    return F.cross_entropy(out - _helper(), y)


def _helper():
    return STATE["centre"]


def _slots():
    loss = _Slots()
    loss.centre = 0.0
    return loss, lambda v: setattr(loss, "centre", v)


def _method():
    owner = _Method()
    return owner.loss, lambda v: setattr(owner.inner, "centre", v)


def _module():
    loss = _Module()
    return loss, lambda v: setattr(loss, "centre", v)


def _class():
    _Class.centre = 0.0
    return _Class(), lambda v: setattr(_Class, "centre", v)


def _global():
    STATE["centre"] = 0.0
    return _helped, lambda v: STATE.update(centre=v)


def _imported():
    SETTINGS.centre = 0.0
    return lambda out, y: F.cross_entropy(out - SETTINGS.centre, y), lambda v: setattr(SETTINGS, "centre", v)


def _by_word():
    _Class.centre = 0.0
    return lambda out, y: F.cross_entropy(out - getattr(_Class, "centre"), y), lambda v: setattr(_Class, "centre", v)  # noqa: B009


def _inherited():
    _Class.centre = 0.0
    return type("_Heir", (_Class,), {})(), lambda v: setattr(_Class, "centre", v)


PLACES = [_slots, _method, _module, _class, _global, _imported, _by_word, _inherited]
VALUES = [0.3, 7, True, torch.ones(3), np.ones(3)]


@pytest.mark.parametrize("place", PLACES)
def test_what_the_loop_sets_is_seen(place):
    for value, of_data in itertools.product(VALUES, (False, True)):
        loss, put = place()
        put(value)
        before = ReachableState(loss)
        assert before.is_still(ReachableState(loss), calls=1)
        if of_data and isinstance(value, (torch.Tensor, np.ndarray)):
            value += 1.0  # where it is
        else:
            put(value + 2)
        assert not before.is_still(ReachableState(loss), calls=1)


def test_what_a_loss_does_not_name_and_what_is_trained_is_not():
    owner, model = _Method(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    owner.model, owner.optimizer, owner.epoch = model, optimizer, 0

    def loss(out, y):
        return owner.loss(out, y) + model.weight.norm() * owner.epoch

    before = ReachableState(loss)
    owner.log.append(0.5)
    owner.mean, owner.epoch = 0.7, 1
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert before.is_still(ReachableState(loss), calls=1)


def _run(place, *, remade):
    torch.manual_seed(0)
    model, data = nn.Linear(5, 3), TensorDataset(torch.randn(8, 5), torch.randint(3, (8,)))
    plan = Plan.dpgd(noise_multiplier=1.0, delta=1e-5, dataset_size=8, steps=2, max_grad_norm=1.0)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=1)
    fn, put = place()
    loss = private.loss(fn)
    for x, y in private.loader(data):
        out = model(x)
        put(float(out.detach().std()))
        (private.loss(fn) if remade else loss)(out, y).backward()
        private.optimizer.step()
    private.detach()
    return private.spent().notes


@pytest.mark.parametrize("remade", [False, True])
@pytest.mark.parametrize("place", [_method, _class, _global])
def test_a_centre_of_the_batch_is_vouched_for(place, remade):
    """Where the loop kept it in an object, a class or behind a helper, one record moved the sum by 3 clip norms without a word."""
    assert VOUCHED in _run(place, remade=remade)


def _in_array():
    held = array("d", [0.0])
    return lambda: held[0], lambda v: held.__setitem__(0, v)


def _in_user_dict():
    held = UserDict(centre=0.0)
    return lambda: held["centre"], lambda v: held.update(centre=v)


def _in_context():
    held = ContextVar("held", default=0.0)
    return held.get, held.set


def _in_queue():
    held = Queue()
    held.put(0.0)
    return lambda: held.queue[0], lambda v: held.queue.__setitem__(0, v)


def _in_method():
    held = {"centre": 0.0}
    get = held.get
    return lambda: get("centre"), lambda v: held.update(centre=v)


def _in_cache():
    held = [0.0]

    @functools.cache
    def read():
        return held[0]

    return read, lambda v: (read.cache_clear(), held.__setitem__(0, v))


def _in_parameter():
    held = nn.ParameterDict({"centre": nn.Parameter(torch.zeros(()), requires_grad=False)})
    return lambda: held["centre"], lambda v: held["centre"].data.fill_(v)


def _behind_reference():
    held = _Method()
    at = weakref.ref(held)
    return lambda: at().centre, lambda v: setattr(held.inner, "centre", v)


def _behind_words():
    held = SimpleNamespace(words=[str(k) for k in range(2500)], inner=SimpleNamespace(inner=SimpleNamespace(centre=0.0)))
    return lambda: held.words and held.inner.inner.centre, lambda v: setattr(held.inner.inner, "centre", v)


def _of_objects():
    held = np.array([SimpleNamespace(centre=0.0)], dtype=object)
    return lambda: held[0].centre, lambda v: setattr(held[0], "centre", v)


def _imported_late():
    sys.modules["settings_of_a_test"] = SETTINGS
    SETTINGS.centre = 0.0

    def read():
        import settings_of_a_test

        return settings_of_a_test.centre

    return read, lambda v: setattr(SETTINGS, "centre", v)


HIDDEN = [
    _in_array,
    _in_user_dict,
    _in_context,
    _in_queue,
    _in_method,
    _in_cache,
    _in_parameter,
    _behind_reference,
    _behind_words,
    _of_objects,
    _imported_late,
]


@pytest.mark.parametrize("made", HIDDEN)
def test_what_stands_behind_another_object_is_seen(made):
    read, put = made()

    def loss(x):
        return x - read()

    before = ReachableState(loss)
    assert before.is_still(ReachableState(loss), calls=1)
    put(float(np.random.default_rng(0).normal()))
    assert not before.is_still(ReachableState(loss), calls=1)


def test_a_hook_of_a_criterion_is_part_of_it_and_a_generator_is_closed():
    held, criterion, drawn = [0.0], nn.CrossEntropyLoss(), iter(k for k in range(3))
    criterion.register_forward_hook(lambda module, given, made: made * held[0])
    before = ReachableState(criterion)
    assert before.is_still(ReachableState(criterion), calls=1)
    held[0] = 1.5
    assert not before.is_still(ReachableState(criterion), calls=1)
    assert not ReachableState(lambda: next(drawn)).is_still(ReachableState(lambda: next(drawn)), calls=1)
