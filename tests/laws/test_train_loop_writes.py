"""What the loop computes from a batch and puts where the model reads it is told, wherever that is; what passes write, and logs, are not."""

from __future__ import annotations

import copy
import operator
import random
import threading
from contextvars import ContextVar
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from hushgrad import Plan, make_private
from hushgrad.train.loop_writes import ModelState
from hushgrad.train.loss_tracking import PREPARED
from hushgrad.train.silent_hooks import is_silent

COUNT, WIDTH = 8, 4
CURRENT, LOCAL, SHARED = ContextVar("current", default=1.5), threading.local(), {"scale": 1.5}
SCALE = 1.5


class _Own(list):
    """A list with attributes."""


class _Slots:
    __slots__ = ("scale",)


class _Scaled(nn.Module):
    """Its hidden values are multiplied by a number or a tensor that is held somewhere."""

    of_class = 1.5

    def __init__(self, read):
        super().__init__()
        self.first, self.between, self.last, self.read = nn.Linear(3, WIDTH), nn.Identity(), nn.Linear(WIDTH, 2), read
        self.scale, self.held, self.numbers, self.by_name = (
            1.5,
            SimpleNamespace(inner=SimpleNamespace(scale=1.5)),
            [1.5],
            {"scale": 1.5},
        )
        self.own, self.slots, self.array, self.bytes = _Own(), _Slots(), np.full(WIDTH, 1.5, np.float32), bytearray(4 * WIDTH)
        self.own.scale = self.slots.scale = 1.5
        self.large, self.many = torch.full((300,), 1.5), np.full(300, 1.5, np.float32)
        with torch.inference_mode():
            self.inferred = torch.full((300,), 1.5)
        self.register_buffer("unsaved", torch.full((300,), 1.5), persistent=False)
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.last(torch.tanh(self.between(self.first(x)) * self.read(self)))


def _put_global(_, value):
    global SCALE
    SCALE = value


def _put_inferred(model, value):
    with torch.inference_mode():
        model.inferred.fill_(value)


# How the forward reads it, and how the loop writes to it.
PLACES = {
    "an attribute": (lambda m: m.scale, lambda m, v: setattr(m, "scale", v)),
    "a new attribute": (lambda m: getattr(m, "late", 1.5), lambda m, v: setattr(m, "late", v)),
    "an attribute that becomes a tensor": (lambda m: m.scale, lambda m, v: setattr(m, "scale", torch.tensor(v))),
    "a nested configuration": (lambda m: m.held.inner.scale, lambda m, v: setattr(m.held.inner, "scale", v)),
    "a list": (lambda m: m.numbers[0], lambda m, v: m.numbers.__setitem__(0, v)),
    "a dict": (lambda m: m.by_name["scale"], lambda m, v: m.by_name.update(scale=v)),
    "an attribute of a list": (lambda m: m.own.scale, lambda m, v: setattr(m.own, "scale", v)),
    "a slot": (lambda m: m.slots.scale, lambda m, v: setattr(m.slots, "scale", v)),
    "a class": (lambda m: type(m).of_class, lambda m, v: setattr(_Scaled, "of_class", v)),
    "a global": (lambda m: SCALE, _put_global),
    "a dict among globals": (lambda m: SHARED["scale"], lambda m, v: SHARED.update(scale=v)),
    "a context variable": (lambda m: CURRENT.get(), lambda m, v: CURRENT.set(v)),
    "a thread's own value": (lambda m: LOCAL.scale, lambda m, v: setattr(LOCAL, "scale", v)),
    "a tensor": (lambda m: m.large[1], lambda m, v: m.large.fill_(v)),
    "a tensor's data": (lambda m: m.large[1], lambda m, v: m.large.data[1:9].fill_(v)),
    "a tensor's numpy view": (lambda m: m.large[1], lambda m, v: m.large.numpy()[1:9].fill(v)),
    "a buffer's data": (lambda m: m.unsaved[1], lambda m, v: m.unsaved.data[1:9].fill_(v)),
    "an inference tensor": (lambda m: m.inferred[1].clone(), _put_inferred),
    "an array": (lambda m: torch.from_numpy(m.array), lambda m, v: m.array.fill(v)),
    "a large array": (lambda m: torch.from_numpy(m.many)[1:5], lambda m, v: m.many.fill(v)),
    "bytes": (
        lambda m: torch.frombuffer(m.bytes, dtype=torch.float32) + 1.5,
        lambda m, v: m.bytes.__setitem__(slice(None), np.full(WIDTH, v, np.float32).tobytes()),
    ),
    "an array by dlpack": (lambda m: torch.from_dlpack(m.array), lambda m, v: m.array.fill(v)),
}


def _model(read=lambda m: m.scale):
    torch.manual_seed(0)
    _Scaled.of_class, LOCAL.scale = 1.5, 1.5
    SHARED["scale"] = 1.5
    CURRENT.set(1.5)
    _put_global(None, 1.5)
    return _Scaled(read)


class _Seen(torch.optim.SGD):
    """Keeps the gradients that it is given, and the weights as they are."""

    def step(self, closure=None):
        self.sums = [*getattr(self, "sums", []), torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]) * COUNT]


def _run(model, *, before=lambda m, x: None, after=lambda m, x: None, steps=1, count=COUNT, late=lambda x: None):
    """The sums that were released, and what the guarantee says."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(COUNT, 3, generator=draw), torch.randint(2, (COUNT,), generator=draw)
    x[-1] *= 40  # the worst record
    optimizer = _Seen(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=COUNT, dataset_size=COUNT, steps=steps, max_grad_norm=1.0)
    private = make_private(model, optimizer, plan, seed=1)
    loss = private.loss(nn.CrossEntropyLoss())
    data = torch.utils.data.TensorDataset(x[:count], y[:count])
    for x, y in private.loader(data):
        optimizer.zero_grad()
        handle = before(model, x)
        made = loss(model(x), y)
        late(x)
        made.backward()
        optimizer.step()
        after(model, x)
        if isinstance(handle, RemovableHandle):
            handle.remove()
    notes = private.spent().notes
    private.detach()
    return optimizer.sums, notes


def _of_batch(x):
    return 0.5 + float(x.mean(0).norm())


@pytest.mark.parametrize("name", PLACES)
def test_what_the_loop_writes_is_told_in_a_run_of_one_step(name):
    """One record moved the sum by 2 clip norms without a word."""
    read, put = PLACES[name]
    assert PREPARED in _run(_model(read), before=lambda m, x: put(m, _of_batch(x)))[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_flag_that_is_set_once_is_told(seed):
    draw = random.Random(seed)
    read, put = PLACES[draw.choice([*PLACES])]
    steps, at, passes = 12, draw.randrange(11), iter(range(12))  # the last step is compared in any case

    def after(model, x):
        if next(passes) == at:
            put(model, 2.5)

    assert PREPARED in _run(_model(read), after=after, steps=steps)[1]


def test_it_is_what_moves_the_sum(monkeypatch):
    monkeypatch.setitem(globals(), "WIDTH", 32)  # batches of narrower layers are filled up, with rows that count in a mean

    def put(model, x):
        model.scale = _of_batch(x)

    (a,), notes = _run(_model(), before=put)
    (b,), _ = _run(_model(), before=put, count=COUNT - 1)
    assert float((a - b).norm()) > 1.5
    assert PREPARED in notes


class _Times:
    def __init__(self, by):
        self.by = by

    def __call__(self, module, given, made):
        return made * self.by


def _made_forward(model, by):
    model.between.forward = lambda x: x * by


HOOKS = {
    "a closure": lambda m, by: m.first.register_forward_hook(lambda module, given, made: made * by),
    "a default": lambda m, by: m.first.register_forward_hook(lambda module, given, made, by=by: made * by),
    "an object": lambda m, by: m.first.register_forward_hook(_Times(by)),
    "before a layer": lambda m, by: m.last.register_forward_pre_hook(lambda module, given: (given[0] * by,)),
    "of gradients": lambda m, by: m.last.register_full_backward_hook(lambda module, given, made: (given[0] * by,)),
    "of gradients, before": lambda m, by: m.last.register_full_backward_pre_hook(lambda module, made: (made[0] * by,)),
    "of all modules": lambda m, by: register_module_forward_hook(
        lambda module, given, made: made * by if module is m.first else None
    ),
    "a forward": _made_forward,
}


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_the_batch_is_told(name, kind):
    """A ``training_step`` that puts one on a layer for each batch moved the sum by 14.7 clip norms."""
    steps, everywhere = 2, nn.modules.module._global_forward_hooks

    def before(model, x):
        return HOOKS[name](model, kind(_of_batch(x)))

    try:
        assert PREPARED in _run(_model(), before=before, steps=steps)[1]
    except (RuntimeError, ValueError) as refused:  # a gradient of all modules' hooks may be refused instead
        assert name == "of all modules", refused
    finally:
        everywhere.clear()


def test_a_hook_on_a_result_that_was_kept_is_told():
    model, kept = _model(), {}
    model.first.register_forward_hook(lambda module, given, made: kept.update(made=made))
    assert PREPARED not in _run(model)[1]
    assert PREPARED in _run(model, late=lambda x: kept["made"].register_hook(lambda g: g * x.mean(0).norm()))[1]


# What is told already must not be told of these -----------------------------------------------------------------------------


class _Statistics:
    def __init__(self):
        self.means, self.last, self.count = [], 0.0, 0

    def __call__(self, module, given, made):
        self.means.append(float(made.detach().mean()))
        self.last, self.count = self.means[-1], self.count + 1


def _logged(model):
    log = _Statistics()
    model.first.register_forward_hook(log)
    return {"after": lambda m, x: log.means.clear()}


def _logged_by_closure(model):
    log = []
    model.first.register_forward_hook(lambda module, given, made: log.append(made.detach().mean()))
    return {"after": lambda m, x: log.clear()}


def _logged_sometimes(model):
    log, passes = {}, iter(range(9))

    def look(module, given, made):
        log["mean"] = made.detach().mean().item()

    return {"before": lambda m, x: m.first.register_forward_hook(look) if next(passes) % 3 == 1 else None}


def _gradients_logged(model):
    log = []
    model.last.register_full_backward_hook(lambda module, given, made: log.append(float(given[0].norm())))
    return {"after": lambda m, x: log.clear()}


def _averaged(model):
    held = copy.deepcopy(model)

    def after(now, x):
        with torch.no_grad():
            for a, b in zip(held.parameters(), now.parameters(), strict=True):
                a.lerp_(b, 0.1)

    return {"after": after}


def _evaluated(model):
    def after(now, x):
        now.eval()
        with torch.no_grad():
            now(torch.randn(2, 3))
        now.train()

    return {"after": after}


def _noted_beside(model):
    model.history, model.seconds = [], 0.0

    def after(now, x):
        now.history.append(float(x.mean()))  # no name that the forward uses

    return {"after": after}


def _cached(model):
    def read(m):
        if getattr(m, "cache", None) is None:
            m.cache = torch.full((WIDTH,), 1.5)
        return m.cache

    model.read = read
    return {}


ORDINARY = [
    _logged,
    _logged_by_closure,
    _logged_sometimes,
    _gradients_logged,
    _averaged,
    _evaluated,
    _noted_beside,
    _cached,
]


@pytest.mark.parametrize("idiom", ORDINARY)
def test_ordinary_loops_need_nobody_to_vouch_for_them(idiom):
    model = _model()
    assert PREPARED not in _run(model, steps=5, **idiom(model))[1]


def test_a_state_is_equal_to_itself_and_counters_may_count():
    model = _model()
    before = ModelState.of(model)
    assert not before.changes(ModelState(model, before.names), passes=0, own=set())
    model.step += 3
    assert before.changes(ModelState(model, before.names), passes=2, own=set())
    assert not before.changes(ModelState(model, before.names), passes=3, own=set())


def test_only_hooks_that_certainly_write_nothing_are_silent():
    log, held, total = [], {}, 0.0

    def stores(module, given, made):
        held[module] = made.detach()

    def counts(module, given, made):
        nonlocal total
        total += 1

    def into_what_it_is_given(module, given, made):
        made[0] = 1.0

    def in_place(module, given, made):
        made *= 2

    def by_method(module, given, made):
        made.mul_(2)

    def by_data(module, given, made):
        made.data[0] = 2

    def sometimes(module, given, made):
        if held:
            return made * 2
        return None

    assert all(map(is_silent, [stores, counts, lambda m, i, o: log.append(o), lambda m, i, o: None]))
    loud = [
        into_what_it_is_given,
        in_place,
        by_method,
        by_data,
        sometimes,
        _Times(2),
        lambda m, i, o: stores(m, i, o) or o,
        torch.relu,
    ]
    assert not any(map(is_silent, loud))


@pytest.mark.parametrize(
    "line",
    [
        "made.__imul__(2)",
        "made.__setitem__(0, 1.0)",
        "torch.mul(made, 2, out=made)",
        "functional.relu(made, inplace=True)",
        "functional.relu(made, True)",
        "operator.imul(made, 2)",
        "torch.Tensor.__setitem__(made, 0, 1.0)",
        "act(made)",
        "held.act(made)",
    ],
)
def test_a_hook_that_writes_into_what_it_is_given_is_never_silent(line):
    act = nn.ReLU(inplace=True)
    known = {"torch": torch, "functional": nn.functional, "operator": operator, "act": act, "held": SimpleNamespace(act=act)}
    exec(f"def hook(module, given, made):\n    {line}\n", known)
    assert not is_silent(known["hook"])
