"""The guard by itself: whom it refuses, what it notices, when it looks, and that it leaves nothing behind."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hushgrad.clipping.grad_scaler import SCALED
from hushgrad.errors import ArgumentError, BudgetExceeded, CaptureError
from hushgrad.train import guard
from hushgrad.train.guard import Guard, Room, Watch, checks

DIVIDES = "_step_supports_amp_scaling"


def pair(model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.SGD]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)) if model is None else model
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Marks:
    """In the place of what is released besides the trainable parameters: which looks were taken."""

    def __init__(self, *, seen: bool = False) -> None:
        self.seen, self.looks = seen, list[object]()

    def before(self) -> None:
        self.looks.append("before")

    def check(self, *, values: bool) -> None:
        self.looks.append(values)

    def require_known(self) -> None:
        self.looks.append("known")


class Run:
    """What a watch asks of a run."""

    def __init__(self, *, dealt: bool) -> None:
        self.dealt, self.told = dealt, list[str]()
        self.journal = SimpleNamespace(vouched=self.told.append)


def test_another_optimizer_that_steps_is_told_once_batches_are_dealt():
    begun, fresh = Run(dealt=True), Run(dealt=False)
    watches = [Watch(begun), Watch(fresh)]
    (_, other), (model, private), (_, checking) = pair(), pair(), pair()
    claimed = Guard(model, private)
    claimed.attach()
    checks(checking)
    private.step()
    checking.step()
    assert begun.told == []
    other.step()
    assert begun.told == [guard.OTHER] and fresh.told == []
    for watch in watches:
        watch.remove()
    other.step()
    claimed.detach()
    assert begun.told == [guard.OTHER]
    gc.collect()


def test_what_another_library_wrapped_is_refused():
    model, optimizer = pair()
    theirs = type("GradSampleModule", (nn.Sequential,), {"__module__": "opacus.grad_sample"})
    layer = type("DPLinear", (nn.Linear,), {"__module__": "opacus.layers.dp"})
    with pytest.raises(ArgumentError, match="not to be Opacus'"):
        Guard(*pair(theirs(nn.Linear(2, 1))))
    Guard(*pair(layer(2, 1)))
    bare = type("Wrapped", (torch.optim.SGD,), {"__init__": lambda self: None})()
    with pytest.raises(ArgumentError, match="to have the hooks of torch's optimizers"):
        Guard(model, bare)
    with pytest.raises(ArgumentError, match="not to be wrapped for parallel training"):
        Guard(nn.DataParallel(model), optimizer)
    with pytest.raises(ArgumentError, match="to need one dense gradient per step"):
        Guard(model, torch.optim.LBFGS(model.parameters()))
    for wrong in ((3, optimizer), (model, 3)):
        with pytest.raises(ArgumentError, match=r"=3 to be of type"):
            Guard(*wrong)


def test_parameters_that_do_not_match_are_refused():
    model, _ = pair()
    part = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"1\.weight.*to hold every trainable parameter"):
        Guard(model, part)
    Guard(model[0], part)
    with pytest.raises(ArgumentError, match="to hold parameters of this model only"):
        Guard(model[0], torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ArgumentError, match="to have a trainable parameter"):
        Guard(*pair(nn.Linear(2, 1).requires_grad_(False)))
    sparse = nn.Module()
    sparse.table = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ArgumentError, match=r"table.*to have dense parameters"):
        Guard(*pair(sparse))


@pytest.mark.parametrize("own", [None, False, True])
def test_model_and_optimizer_are_private_once_and_given_back_as_they_were(own):
    model, optimizer = pair()
    if own is not None:
        vars(optimizer)[DIVIDES] = own
    first = Guard(model, optimizer)
    first.attach()
    assert vars(optimizer)[DIVIDES] is True
    for other in ((model, torch.optim.SGD(model.parameters(), lr=0.1)), (model, optimizer)):
        with pytest.raises(ArgumentError, match="not private yet"):
            Guard(*other).attach()
    copied, _ = pair()
    taken = Guard(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
    taken._optimizer = optimizer  # an optimizer that is private, with a model that is not
    with pytest.raises(ArgumentError, match="not private yet"):
        taken.attach()
    first.detach()
    assert vars(optimizer).get(DIVIDES) is own
    again = Guard(model, optimizer)
    again.attach()
    again.detach()


def test_a_scaled_step_is_refused_and_its_traces_are_removed():
    model, optimizer = pair()
    held = Guard(model, optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.zeros(1)
    for options in ({}, {"grad_scaler": object()}):
        with pytest.raises(CaptureError) as refusal:
            held.check(options)
        assert str(refusal.value) == SCALED and not {"grad_scale", "found_inf"} & set(vars(optimizer))
    held.check({})


def test_a_raw_gradient_is_refused_by_its_parameter():
    model, optimizer = pair()
    held = Guard(model, optimizer)
    model[1].bias.grad = torch.zeros(1)
    with pytest.raises(CaptureError, match=r"Parameter 1\.bias has a gradient that did not pass the clipping"):
        held.check({})
    optimizer.zero_grad()
    held.check({})


@pytest.mark.parametrize("seen", [False, True])
def test_values_are_compared_at_steps_that_double(seen):
    held = Guard(*pair())
    held.released = marks = Marks(seen=seen)
    looked = []
    for step in range(1, 18):
        del marks.looks[:]
        held.before()
        held.check({})
        due = step & (step - 1) == 0
        assert marks.looks == (["before", True] if due else [False] if seen else [])
        looked += [step] if due else []
    assert looked == [1, 2, 4, 8, 16]


CHANGES = {
    "a group": lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "frozen": lambda model, optimizer: model[0].requires_grad_(False),
    "a layer": lambda model, optimizer: model.append(nn.Linear(1, 1)),
    "another parameter": lambda model, optimizer: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 3))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("look", [Guard.before, lambda held: held.check({})], ids=["before", "check"])
def test_a_change_of_the_model_or_the_optimizer_is_noticed(change, look):
    model, optimizer = pair()
    held = Guard(model, optimizer)
    look(held)
    change(model, optimizer)
    for _ in range(2):
        with pytest.raises(CaptureError, match="are not those that were made private"):
            look(held)


REGISTRATIONS = {
    "parameter": lambda module: module.register_parameter("new", nn.Parameter(torch.ones(1))),
    "buffer": lambda module: module.register_buffer("new", torch.ones(1)),
    "module": lambda module: module.add_module("new", None),
}


@pytest.mark.parametrize("register", REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_what_is_registered_anywhere_is_looked_for_once(register):
    held = Guard(*pair())
    held.released = marks = Marks()
    held._due = False
    held.before()
    assert marks.looks == []  # nothing was registered anywhere
    register(nn.Module())
    held.before()
    held.before()
    assert marks.looks == ["known"]


def room(**given: object) -> Room:
    made = Room()
    made.plan = SimpleNamespace(steps=3)  # type: ignore[assignment]
    made.issued = made.foreign = made.taken = 0
    made.declared, made.max_epsilon, made.limit = None, None, 3
    vars(made).update(given)
    return made


def test_steps_are_counted_and_end_with_the_plan():
    made = room()
    for issued in (True, False, True):
        made.require_room(issued=issued)
        made.charge(issued=issued)
    assert (made.taken, made.issued, made.foreign) == (3, 2, 1)
    with pytest.raises(BudgetExceeded, match="All 3 steps of the plan are taken"):
        made.require_room(issued=True)


def test_steps_end_with_the_budget():
    made = room(limit=1, max_epsilon=2.0)
    made.require_room(issued=True)
    with pytest.raises(BudgetExceeded, match="costs an unknown epsilon"):
        made.require_room(issued=False)
    made.charge(issued=True)
    with pytest.raises(BudgetExceeded, match=r"Step 2 would exceed max_epsilon=2; it was not taken"):
        made.require_room(issued=True)
    room(max_epsilon=2.0, declared=object()).require_room(issued=False)
    with pytest.raises(BudgetExceeded, match="Step 1 would exceed max_epsilon=0;"):
        room(limit=0).require_room(issued=False)
