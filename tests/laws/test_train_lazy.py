"""Lazy tables: the same run as the eager one, with the noise of unread rows added later. Formula, triggers, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hushgrad.clipping import Adaptive, PerLayer
from hushgrad.clipping.proof import untrained_tensors
from hushgrad.denoise import Laplacian
from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.noise import BLT
from hushgrad.noise.source import Source
from hushgrad.release.key_reuse import forget
from hushgrad.release.lazy import require_lazy_plan
from hushgrad.release.placement.world import World
from hushgrad.train import Ball, Plan, Tail, fit, make_private
from hushgrad.train.private import Private

F = nn.functional
KEY = bytes(range(32))
ROWS, WIDTH, N = 40, 3, 24


class Reader(nn.Module):
    """A table whose rows are averaged, and a linear layer; the table's noise has index 0."""

    def __init__(self, table: Callable[[], nn.Module] = lambda: nn.Embedding(ROWS, WIDTH)) -> None:
        super().__init__()
        self.table = table()
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        read = self.table(ids)
        return self.out(read.mean(1) if read.dim() == 3 else read)


def _model(*table: Callable[[], nn.Module]) -> Reader:
    torch.manual_seed(0)
    return Reader(*table).double()


def _data() -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(ROWS // 2, (N, 4), generator=g)  # the upper half of the rows is never read
    return TensorDataset(ids, torch.randint(2, (N,), generator=g))


def _plan(steps: int = 6, **options: object) -> Plan:
    options = {"noise_multiplier": 0.8, "delta": 1e-5, "max_grad_norm": 0.7, "batch_size": 5, "dataset_size": N, **options}
    return Plan.dpsgd(steps=steps, **options)


def _sgd(model: nn.Module, **options: object) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.4, **options})


def _private(model: nn.Module, plan: Plan | None = None, *, lazy: bool = True, **options: object) -> Private:
    return make_private(model, _sgd(model, **options), plan or _plan(), key=KEY, lazy_tables=lazy)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    if len(x):
        F.cross_entropy(model(x), y).backward()


def _run(private: Private, *, after=lambda step: None, decay: float = 0.8, micro: int | None = None) -> Private:
    schedule = torch.optim.lr_scheduler.ExponentialLR(private.optimizer, decay)
    for batch in private.loader(_data()):
        private.optimizer.zero_grad()
        for x, y in [batch] if micro is None else private.split(batch, micro):
            _loss(private.model, x, y)
        private.optimizer.step()
        schedule.step()
        after(private.steps)
    return private


def _raw_table(model: nn.Module) -> Tensor:
    """The table's memory as it is: reading it this way settles nothing."""
    return model.table.weight.detach().clone()


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# The formula -----------------------------------------------------------------------------------------------------------


def _clipped_sum(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(x)):
        grads = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        total = [t + g * torch.clamp(clip / norm, max=1.0) for t, g in zip(total, grads, strict=True)]
    return total


def _settled_by_hand(table: Tensor, owed: list[float], rows: list[int], step: int) -> None:
    for row in rows:
        if owed[row]:
            z = Source(key=KEY).z(step, 0, torch.empty(WIDTH, dtype=torch.float64), offset=row * WIDTH)
            table[row] -= owed[row] ** 0.5 * z
            owed[row] = 0.0


@torch.no_grad()
def _by_hand(plan: Plan, decay: float, evaluated: dict[int, list[int]]) -> Tensor:
    """The whole run, one example and one row at a time; ``evaluated[t]``: rows that are read after t steps."""
    model, rate = _model(), 0.4
    owed, std, last = [0.0] * ROWS, plan.noise_multiplier * plan.max_grad_norm / plan.batch_size, 0
    shadow = _private(_model(), plan, lazy=False)  # only for its batches
    for step, batch in enumerate(shadow.loader(_data())):
        (x, y), counted = batch, batch.examples - batch.padding
        _settled_by_hand(model.table.weight, owed, x.flatten().unique().tolist(), last)
        with torch.enable_grad():
            sums = _clipped_sum(model, x[:counted], y[:counted], plan.max_grad_norm)
        model.table.weight -= rate * sums[0] / plan.batch_size
        for index, p in enumerate(list(model.parameters())[1:], 1):
            p -= rate * (sums[index] / plan.batch_size + std * Source(key=KEY).z(step, index, p))
        owed, last = [v + (rate * std) ** 2 for v in owed], step
        _settled_by_hand(model.table.weight, owed, evaluated.get(step + 1, []), last)
        rate *= decay
        with torch.enable_grad():
            _loss(shadow.model, x, y)
        shadow.optimizer.step()
    _settled_by_hand(model.table.weight, owed, list(range(ROWS)), last)
    return _weights(model)


@pytest.mark.parametrize("evaluated", [{}, {2: [0, 39, 7], 4: [39], 5: list(range(ROWS))}], ids=["training only", "evaluations"])
def test_a_lazy_run_is_the_formula_with_the_rows_that_it_read(evaluated):
    model = _model()
    private = _private(model)

    def after(step: int) -> None:
        if step in evaluated:
            with torch.no_grad():
                model(torch.tensor([evaluated[step]]))

    _run(private, after=after)
    torch.testing.assert_close(_weights(model), _by_hand(private.plan, 0.8, evaluated), rtol=0, atol=1e-13)


TABLES = {
    "embedding": lambda: nn.Embedding(ROWS, WIDTH),
    "padding": lambda: nn.Embedding(ROWS, WIDTH, padding_idx=3),
    "bags": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=2),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("change", ["plain", "maximize", "micro-batches", "adaptive", "per layer"])
def test_settled_after_every_step_it_is_the_eager_run(table, change):
    """Then row r owes the noise of one step at a time, which is drawn where the eager run draws it."""
    clip = {"adaptive": Adaptive(max_grad_norm=0.7, batch_size=5, count_noise=1.0), "per layer": PerLayer(0.7)}.get(change)
    plan = _plan() if clip is None else replace(_plan(), clip=clip)
    runs = []
    for lazy in (False, True):
        forget()  # each stands for a process of its own: together, under one key, neither is private
        model = _model(TABLES[table])
        private = _private(model, plan, lazy=lazy, maximize=change == "maximize")
        _run(private, after=lambda _, p=private: p.settle(), micro=2 if change == "micro-batches" else None)
        runs.append((_weights(model), private.spent(), private.ledger.event(), private.clip))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=1e-13)
    assert runs[0][1:] == runs[1][1:]


@settings(max_examples=15, deadline=None)
@given(settle_at=st.sets(st.integers(1, 5)), steps=st.integers(1, 6))
def test_how_often_it_is_settled_moves_only_the_draws(settle_at, steps):
    """The same clipped sums (no record's gradient depends on the table here), hence the same table less its noise."""

    class Constant(Reader):
        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids).mean(1)).sum(1, keepdim=True)

    torch.manual_seed(0)
    model = Constant().double()
    model.out.requires_grad_(False)
    plan = replace(_plan(steps), noise_multiplier=1e-9)
    eager, lazy = copy.deepcopy(model), model
    for chosen, flag in ((eager, False), (lazy, True)):
        private = make_private(chosen, torch.optim.SGD([chosen.table.weight], lr=0.4), plan, key=KEY, lazy_tables=flag)
        for x, _ in private.loader(_data()):
            if len(x):
                chosen(x).mean().backward()
            private.optimizer.step()
            if private.steps in settle_at:
                private.settle()
    torch.testing.assert_close(eager.table.weight, lazy.table.weight, rtol=0, atol=1e-7)


class Positions(nn.Module):
    """Two tables behind other parameters, one of them read by ids that all examples share, and called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 2)
        self.words, self.places = nn.Embedding(ROWS, WIDTH), nn.Embedding(6, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(ids.shape[1])[None])
        return self.out((self.words(ids) * places + self.words(ids.flip(1))).mean(1))


def test_several_tables_shared_ids_and_a_table_that_is_called_twice():
    runs = []
    for lazy in (False, True):
        torch.manual_seed(0)
        model = Positions().double()
        private = _private(model, lazy=lazy)
        _run(private, after=lambda _, p=private: p.settle())
        runs.append(_weights(model))
        assert private._capture.by_rows == ({"words.weight", "places.weight"} if lazy else frozenset())
    torch.testing.assert_close(*runs, rtol=0, atol=1e-13)


def test_the_learning_rate_of_a_loaded_optimizer_state_is_used():
    """Loading replaces the optimizer's groups by others."""
    model = _model()
    private = _private(model, _plan(1))
    state = private.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.05
    private.optimizer.load_state_dict(state)
    before = _raw_table(model)
    private.optimizer.step()
    noise = (before - _raw_table(model)) / (0.05 * 0.8 * 0.7 / 5)
    torch.testing.assert_close(noise, Source(key=KEY).z(0, 0, noise), rtol=1e-9, atol=1e-9)


def test_fit_takes_them_too_and_returns_with_all_noise_added():
    tables = []
    for lazy in (False, True):
        model = _model()
        fit(model, F.cross_entropy, _sgd(model), _data(), _plan(1), seed=1, progress=False, lazy_tables=lazy)
        tables.append(model.table.weight)
    torch.testing.assert_close(*tables, rtol=0, atol=1e-13)  # one step: the very same noise


# When rows are settled -----------------------------------------------------------------------------------------------------


def _owing(**options: object) -> tuple[Reader, Private]:
    """A run after three steps of six."""
    model = _model()
    private = _private(model, **options)
    batches = iter(private.loader(_data()))
    for _ in range(3):
        _loss(model, *next(batches))
        private.optimizer.step()
    return model, private


def _changed(before: Tensor, after: Tensor) -> set[int]:
    return set((before != after).any(1).nonzero().flatten().tolist())


@pytest.mark.parametrize("how", ["training", "no_grad", "inference", "keyword", "int32"])
def test_a_forward_settles_exactly_the_rows_that_it_reads(how):
    model, _ = _owing()
    before, ids = _raw_table(model), torch.tensor([[39, 38], [30, 39]])
    if how == "training":
        model(ids)
    elif how == "no_grad":
        with torch.no_grad():
            model.eval()(ids)
    elif how == "inference":
        with torch.inference_mode():
            model(ids)
    elif how == "keyword":
        model.table(input=ids)
    else:
        model.table(ids.int())
    after = _raw_table(model)
    assert _changed(before, after) == {30, 38, 39}
    with torch.no_grad():
        assert torch.equal(model.table(ids), after[ids])  # what is read is what is there, and nothing is drawn twice
    assert torch.equal(_raw_table(model), after)


def test_bags_by_offsets_settle_their_rows():
    model = _model(lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum"))
    private = _private(model)
    x, y = next(iter(private.loader(_data())))
    _loss(model, x, y)
    private.optimizer.step()
    before = _raw_table(model)
    with torch.no_grad():
        model.table(torch.tensor([30, 31, 33]), offsets=torch.tensor([0, 2]))
    assert _changed(before, _raw_table(model)) == {30, 31, 33}


def test_ids_that_a_later_hook_changes_are_refused():
    model, _ = _owing()
    handle = model.table.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with pytest.raises(CaptureError, match=r"table\.weight has read other rows"):
        model(torch.tensor([[30, 31], [33, 35]]))
    handle.remove()
    model(torch.tensor([[30, 31], [33, 35]]))


SETTLERS = {
    "settle": lambda model, private: private.settle(),
    "spent": lambda model, private: private.spent(),
    "detach": lambda model, private: private.detach(),
    "state": lambda model, private: model.state_dict(),
    "parent": lambda model, private: nn.ModuleDict({"inside": model}).state_dict(),
    "table": lambda model, private: model.table.state_dict(),
    "private state": lambda model, private: private.state_dict(),
}


@pytest.mark.parametrize("how", SETTLERS)
def test_whatever_leaves_the_run_is_settled_whole(how):
    model, private = _owing()
    before = _raw_table(model)
    SETTLERS[how](model, private)
    after = _raw_table(model)
    assert _changed(before, after) == set(range(ROWS))
    private.settle()
    assert torch.equal(_raw_table(model), after)


def test_the_last_step_settles_also_where_the_budget_ends_it_and_nothing_is_owed_before_the_first():
    model = _model()
    private = _private(model)
    before = _raw_table(model)
    private.settle()
    assert torch.equal(before, _raw_table(model))
    _run(private)
    after = _raw_table(model)
    private.settle()
    assert torch.equal(after, _raw_table(model))
    model = _model()
    budget = _plan(3).guarantee().epsilon * (1 + 1e-9)
    private = make_private(model, _sgd(model), _plan(6), key=KEY, lazy_tables=True, max_epsilon=budget)
    assert private.steps_allowed == 3
    batches = iter(private.loader(_data()))
    for _ in range(3):
        _loss(model, *next(batches))
        private.optimizer.step()
    after = _raw_table(model)
    private.settle()
    assert torch.equal(after, _raw_table(model))


def test_loading_other_values_settles_first_so_that_they_get_no_noise_of_earlier_steps():
    model, private = _owing()
    fresh = _model().state_dict()
    model.load_state_dict(fresh)
    private.settle()
    assert torch.equal(_raw_table(model), fresh["table.weight"])


def test_a_row_that_a_pending_backward_has_read_is_not_changed_by_a_later_read():
    """EmbeddingBag saves its table for the gradient of per_sample_weights."""
    model = _model(lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum"))
    private = _private(model)
    x, y = next(iter(private.loader(_data())))
    _loss(model, x, y)
    private.optimizer.step()
    weights = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    with private._capture.pause():  # no part of a step
        read = model.table(torch.tensor([[30, 31]]), per_sample_weights=weights)
        expected = _raw_table(model)[[30, 31]].sum(1)
        model.state_dict()
        read.sum().backward()
    torch.testing.assert_close(weights.grad.flatten(), expected)


def test_tables_without_their_noise_are_neither_copied_nor_pickled():
    model, private = _owing()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"state_dict\(\), or detach"):
            copied(model)
    private.detach()
    assert torch.equal(copy.deepcopy(model).table.weight, model.table.weight)


def test_an_empty_batch_is_a_step_whose_noise_is_owed():
    model = _model()
    private = _private(model, _plan(2))
    before = _raw_table(model)
    private.optimizer.step()  # without any pass
    assert torch.equal(before, _raw_table(model))
    private.settle()
    noise = (before - _raw_table(model)) / (0.4 * 0.8 * 0.7 / 5)
    torch.testing.assert_close(noise, Source(key=KEY).z(0, 0, noise), rtol=1e-9, atol=1e-12)


# Refusals ----------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids).mean(1))


REFUSED = {
    "adam": (_model, lambda m: torch.optim.Adam(m.parameters()), _plan, "torch.optim.SGD"),
    "subclass": (_model, lambda m: type("Own", (torch.optim.SGD,), {})(m.parameters(), lr=0.1), _plan, "torch.optim.SGD"),
    "momentum": (_model, lambda m: _sgd(m, momentum=0.9), _plan, "neither momentum nor weight decay"),
    "weight decay": (_model, lambda m: _sgd(m, weight_decay=0.1), _plan, "neither momentum nor weight decay"),
    "no table": (lambda: nn.Linear(3, 2), _sgd, _plan, "nothing to gain"),
    "frozen table": (lambda: _frozen(), lambda m: _sgd(m.out), _plan, "nothing to gain"),
    "tied": (Tied, _sgd, _plan, "one module only"),
    "half": (lambda: _model().bfloat16(), _sgd, _plan, "float32 or float64"),
    "denoise": (_model, _sgd, lambda: _plan(denoise=Laplacian(1.0)), "plan.denoise"),
    "average": (_model, _sgd, lambda: _plan(average=Tail()), "plan.average"),
    "projection": (_model, _sgd, lambda: _plan(projection=Ball(1.0)), "plan.projection"),
    "correlated": (
        _model,
        _sgd,
        lambda: Plan.dpftrl(
            noise_multiplier=1.0, delta=1e-5, max_grad_norm=1.0, batch_size=6, dataset_size=N, epochs=1, noise=BLT(buffers=2)
        ),
        "plan.noise",
    ),
}


def _frozen() -> nn.Module:
    model = _model()
    model.table.requires_grad_(False)
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_lazy_is_refused_and_left_as_it_was(case):
    make_model, make_optimizer, make_plan, message = REFUSED[case]
    model, plan = make_model(), make_plan()
    optimizer = make_optimizer(model)
    with pytest.raises(ArgumentError, match=message) as refused:
        make_private(model, optimizer, plan, key=KEY, lazy_tables=True)
    assert "eave" in str(refused.value)  # the remedy
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_pre_hooks for m in model.modules())
    make_private(model, optimizer, plan, key=KEY).detach()  # eager it is accepted


def test_several_processes_and_shards_are_refused():
    for world, sharded in ((World(0, 2), False), (World(), True)):
        with pytest.raises(ArgumentError, match="processes"):
            require_lazy_plan(_plan(), world, sharded=sharded)
    require_lazy_plan(_plan(), World(), sharded=False)


def test_momentum_for_the_other_parameters_is_accepted_and_for_the_table_never():
    model = _model()
    groups = [{"params": model.out.parameters(), "momentum": 0.9}, {"params": model.table.parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.4)
    private = make_private(model, optimizer, _plan(), key=KEY, lazy_tables=True)
    batches = iter(private.loader(_data()))
    _loss(model, *next(batches))
    optimizer.step()
    optimizer.param_groups[1]["momentum"] = 0.5  # as a one-cycle schedule does
    _loss(model, *next(batches))
    before = _weights(model)
    with pytest.raises(CaptureError, match=r"momentum or weight decay for table\.weight"):
        optimizer.step()
    assert torch.equal(before, _weights(model)) and private.steps == 1


def test_a_table_that_is_used_beside_its_module_is_refused_at_the_step():
    model = _model()
    private = _private(model)
    x, y = next(iter(private.loader(_data())))
    (F.cross_entropy(model(x), y) + F.embedding(x, model.table.weight).sum()).backward()
    with pytest.raises(CaptureError, match="does not come through the outputs"):
        private.optimizer.step()


BESIDE = {  # whatever sees a value of the table without a call of its module: its rows lack noise
    "embedding": lambda m, ids: F.embedding(ids, m.table.weight).mean(1),
    "rows": lambda m, ids: m.table.weight[ids].mean(1),
    "taken": lambda m, ids: m.table.weight.index_select(0, ids.flatten()).view(*ids.shape, -1).mean(1),
    "forward": lambda m, ids: m.table.forward(ids).mean(1),
    "mean": lambda m, ids: m.table.weight.mean(0),
    "without a gradient": lambda m, ids: m.table.weight.detach().mean(0),
    "product": lambda m, ids: (m.table(ids).mean(1) @ m.table.weight.t())[:, :WIDTH],
    "in a list": lambda m, ids: torch.cat([m.table.weight, m.table.weight]).mean(0),
    "number": lambda m, ids: torch.linalg.vector_norm(m.table.weight.data).item(),
    "numbers": lambda m, ids: m.table.weight[0, 0].tolist(),
    "answer": lambda m, ids: 1.0 if torch.equal(m.table.weight, torch.zeros(ROWS, WIDTH)) else 0.0,
    "functional call": lambda m, ids: torch.func.functional_call(m.table, {"weight": m.table.weight * 1}, (ids,)).mean(1),
    "its memory": lambda m, ids: m.alias.mean(0),
}
KNOWN = {  # what sees no value, or calls the module
    "dtype and device": lambda m, ids: torch.zeros((), dtype=m.table.weight.dtype, device=m.table.weight.device),
    "shape": lambda m, ids: float(m.table.weight.shape[0] + m.table.weight.size(1) + m.table.weight.dim() + len(m.table.weight)),
    "called": lambda m, ids: m.table(ids.flip(1)).amax(1),
    "by checkpoint": lambda m, ids: torch.utils.checkpoint.checkpoint(m.table, ids, use_reentrant=False).mean(1),
}


class Beside(Reader):
    """Reads its table by its module, and in another way, too."""

    def __init__(self, how: Callable[[nn.Module, Tensor], object], first: bool) -> None:
        super().__init__()
        self.double()
        self.how, self.first = how, first
        self.__dict__["alias"] = self.table.weight.data

    def forward(self, ids: Tensor) -> Tensor:
        made = self.how(self, ids) if self.first else None
        own = self.table(ids).mean(1)
        return self.out(own + (made if self.first else self.how(self, ids)))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", [*BESIDE, *KNOWN])
def test_a_model_that_reads_a_table_beside_its_module_is_refused(how, first, checked):
    torch.manual_seed(0)
    model = Beside((BESIDE | KNOWN)[how], first)
    private = make_private(model, _sgd(model), _plan(), key=KEY, lazy_tables=True, check_isolation=checked)
    if how in KNOWN:
        _run(private).detach()
        return
    x, y = next(iter(private.loader(_data())))
    with pytest.raises(CaptureError, match="beside its module"):
        _loss(model, x, y)
    assert private.steps == 0
    private.detach()


def test_a_lazy_run_is_resumed_as_a_lazy_run_only():
    lazy, eager = _owing()[1].state_dict(), _private(_model(), lazy=False).state_dict()
    with pytest.raises(ArgumentError, match="lazy_tables=False"):
        _private(_model(), lazy=False).load_state_dict(lazy, key=KEY)
    with pytest.raises(ArgumentError, match="lazy_tables=True"):
        _private(_model()).load_state_dict(eager, key=KEY)
    eager.pop("lazy_tables")  # as an earlier version wrote it
    _private(_model(), lazy=False).load_state_dict(eager, key=KEY)


def test_what_a_table_owes_is_looked_for_once(monkeypatch):
    """Its own hooks write to it in every pass: a later proof knows it, and searches neither the process nor a longer list."""
    model = _model()
    private = make_private(model, _sgd(model), _plan(), key=KEY, lazy_tables=True)
    searched = []
    held = untrained_tensors._held
    monkeypatch.setattr(untrained_tensors, "_held", lambda tensors: searched.append(len(tensors)) or held(tensors))
    for examples in (4, 5, 6, 7):  # each is proved
        model(_data()[:examples][0]).sum().backward()
        private.optimizer.step()
    assert searched == [1]
