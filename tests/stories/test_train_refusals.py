"""Loops that are written wrongly: each is refused, with nothing released, or makes ``spent()`` infinite."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hushgrad import events
from hushgrad.errors import ArgumentError, BudgetExceeded, CaptureError, NoTheorem, NotIsolated
from hushgrad.guarantee import Ledger
from hushgrad.train import Checkpoint, Plan, guarantee_of, make_private

F = nn.functional


@pytest.fixture
def data():
    g = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(40, 4, generator=g), torch.randint(2, (40,), generator=g))


def _setup(steps=6, optimizer=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, batch_size=10, dataset_size=40, steps=steps)
    return model, optimizer, make_private(model, optimizer, plan, **options)


def _weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def _train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


# Batches -------------------------------------------------------------------------------------------------------------


def test_foreign_batches_make_epsilon_infinite_until_declared(data):
    model, optimizer, private = _setup()
    _train(model, optimizer, list(DataLoader(data, batch_size=10))[:3])
    assert math.isinf(private.spent().epsilon) and "loader did not issue" in str(private.spent())
    private.declare(events.MinSep(gap=4, times=1))
    spent = private.spent()
    assert spent.epsilon == pytest.approx(guarantee_of(_ledger(events.Gaussian(2.0)), private.plan).epsilon)
    with pytest.raises(ArgumentError, match="declare"):
        private.loader(data)


def _ledger(event):
    ledger = Ledger()
    ledger.record(event)
    return ledger


def test_one_foreign_batch_among_our_own_is_enough(data):
    model, optimizer, private = _setup()
    batches = iter(private.loader(data))
    _train(model, optimizer, [next(batches)])
    assert math.isfinite(private.spent().epsilon)
    _train(model, optimizer, list(DataLoader(data, batch_size=10))[:1])
    assert math.isinf(private.spent().epsilon)
    with pytest.raises(ArgumentError, match="before any batch"):
        private.declare(events.Once())


def test_declaring_what_no_theorem_covers_is_refused(data):
    from hushgrad.noise import BLT

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpftrl(noise_multiplier=2.0, delta=1e-5, batch_size=10, dataset_size=40, epochs=2, noise=BLT(buffers=2))
    private = make_private(model, optimizer, plan)
    with pytest.raises(NoTheorem):
        private.declare(events.Poisson(0.25))


def test_a_batch_without_a_step_is_refused(data):
    model, optimizer, private = _setup()
    batches = iter(private.loader(data))
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(CaptureError, match=r"optimizer\.step"):
        next(batches)
    _train(model, optimizer, private.loader(data))  # a new loader deals the untaken step again
    assert private.steps == 6


def test_a_detached_run_hands_out_no_batch(data):
    """Its model would be trained on it without any noise, and its ledger would not know."""
    model, optimizer, private = _setup()
    batches = iter(private.loader(data))
    _train(model, optimizer, itertools.islice(batches, 2))
    batch = next(batches)
    private.detach()
    for left in (lambda: next(batches), lambda: next(iter(private.loader(data))), lambda: next(batch.split(3))):
        with pytest.raises(CaptureError, match="detached"):
            left()


def test_two_loaders_cannot_deal_one_step_twice(data):
    model, optimizer, private = _setup()
    first, second = iter(private.loader(data)), iter(private.loader(data))
    _train(model, optimizer, [next(first)])
    with pytest.raises(CaptureError, match="1 steps have been taken"):
        next(second)


def test_two_backward_passes_over_one_batch_are_refused(data):
    model, optimizer, private = _setup()
    before = _weights(model)
    x, y = next(iter(private.loader(data)))
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(CaptureError, match="contributions"):
        optimizer.step()
    assert torch.equal(_weights(model), before) and private.steps == 0
    assert all(p.grad is None for p in model.parameters())
    _train(model, optimizer, private.loader(data))  # nothing was released, so the run may go on
    assert private.steps == 6


def test_a_forgotten_backward_or_part_is_refused(data):
    model, optimizer, private = _setup()
    batch = next(iter(private.loader(data)))
    with pytest.raises(CaptureError, match="contributions"):
        optimizer.step()
    x, y = next(iter(batch.split(2)))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(CaptureError, match="contributions"):
        optimizer.step()
    assert private.steps == 0


# Model and optimizer -----------------------------------------------------------------------------------------------


def test_an_optimizer_of_other_parameters_is_refused():
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=40, steps=2)
    with pytest.raises(ArgumentError, match="parameters of this model only"):
        make_private(model, torch.optim.SGD(other.parameters(), lr=0.1), plan)
    with pytest.raises(ArgumentError, match="every trainable parameter"):
        make_private(model, torch.optim.SGD([model.weight], lr=0.1), plan)
    model.bias.requires_grad_(False)
    make_private(model, torch.optim.SGD([model.weight], lr=0.1), plan)


@pytest.mark.parametrize("change", ["added", "unfrozen", "frozen", "group", "replaced"])
def test_a_model_that_changes_after_attaching_is_refused(data, change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, batch_size=10, dataset_size=40, steps=6)
    private = make_private(model, optimizer, plan)
    batches = iter(private.loader(data))
    _train(model, optimizer, [next(batches)])
    if change == "added":
        model.append(nn.Linear(2, 2))
    elif change == "unfrozen":
        model[0].bias.requires_grad_(True)
    elif change == "frozen":
        model[0].weight.requires_grad_(False)
    elif change == "group":
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    else:
        model[2] = nn.Linear(3, 2)
    before = _weights(model)
    with pytest.raises(CaptureError):
        _train(model, optimizer, [next(batches)])
    assert torch.equal(_weights(model), before) and private.steps == 1


def test_lbfgs_and_sparse_optimizers_are_refused():
    model = nn.Linear(4, 2)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=40, steps=2)
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(ArgumentError, match="one dense gradient"):
            make_private(model, kind(model.parameters()), plan)


def test_wrapped_models_and_double_attachment_are_refused(data):
    model, optimizer, private = _setup()
    with pytest.raises(ArgumentError, match="not private yet"):
        make_private(model, optimizer, private.plan)
    private.detach()
    again = make_private(model, optimizer, private.plan)
    again.detach()
    wrapped = nn.DataParallel(model)
    with pytest.raises(ArgumentError, match="bare module"):
        make_private(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), private.plan)


def test_raw_gradients_from_elsewhere_are_refused(data):
    model, optimizer, private = _setup()
    x, y = next(iter(private.loader(data)))
    loss = F.cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    with pytest.raises(CaptureError):
        optimizer.step()
    assert private.steps == 0 and all(p.grad is None for p in model.parameters())


def test_statistics_kept_in_buffers_are_refused(data):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(0), 0.1)  # never noised, and part of the state_dict
            return self.linear(x)

    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=40, steps=2)
    private = make_private(model, optimizer, plan, check_isolation=False)
    with pytest.raises(CaptureError, match="Buffer mean"):
        _train(model, optimizer, private.loader(data))
    private.detach()
    private = make_private(model, optimizer, plan)
    with pytest.raises(NotIsolated, match="buffer mean"):  # the check on the first batch finds it before the first step
        _train(model, optimizer, private.loader(data))


class _Statistics(nn.Module):
    """Keeps a mean of what it saw, once ``begun()``, in one of the ways in which people write that."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.begun = nn.Linear(4, 2), how, lambda: False
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.begun():
            mean = self.mean.lerp(x.detach().mean(0), 0.1)
            if self.how == "written":
                self.mean.copy_(mean)
            elif self.how == "replaced":
                self.mean = mean
            elif self.how == "data":
                self.mean.data = mean
            else:
                self.register_buffer("another", mean)
        return self.linear(x)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("how", ["written", "replaced", "data", "added"])
@pytest.mark.parametrize(
    "proved, error, words",
    [
        (
            True,
            NotIsolated,
            r"buffer (mean|another) keeps something of the data",
        ),  # a pass does what none has done, and is proved
        (False, CaptureError, r"Buffer (mean|another) was changed"),  # by the watch over all that is released
    ],
)
def test_statistics_that_begin_after_the_first_batch_are_refused(data, how, moved, proved, error, words):
    model = _Statistics(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=40, steps=20)
    private = make_private(model, optimizer, plan, seed=1, check_isolation=proved)
    model.begun = lambda: private.steps >= 2  # the proof on the first batch has passed by then, and sees no clock
    if moved:  # as a move to another device does
        model._buffers["mean"] = model.mean.clone()
    with pytest.raises(error, match=words):
        _train(model, optimizer, private.loader(data))
    assert 0 < private.steps < 20


def test_a_buffer_may_be_replaced_by_its_equal_and_a_cache_may_change(data):
    class Cached(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("scale", torch.ones(4))
            self.register_buffer("cache", torch.zeros(1), persistent=False)

        def forward(self, x):
            self.scale = self.scale.clone()
            self.cache = torch.arange(float(x.shape[1]))
            return super().forward(x * self.scale)

    model = Cached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=40, steps=4)
    private = make_private(model, optimizer, plan, check_isolation=False)
    _train(model, optimizer, private.loader(data))
    assert private.steps == 4


def test_batch_norm_is_refused(data):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=40, steps=2)
    private = make_private(model, optimizer, plan)
    for _ in range(2):  # refused again when the error was caught the first time
        with pytest.raises(NotIsolated, match="influence each other"):
            _train(model, optimizer, private.loader(data))
            optimizer.step()
    assert private.steps == 0


def test_mixing_without_any_layer_is_refused(data):
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0, keepdim=True))

    model = Centred(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=40, steps=2)
    private = make_private(model, optimizer, plan, seed=0)
    with pytest.raises(NotIsolated, match="influence each other"):
        _train(model, optimizer, private.loader(data))
    assert private.steps == 0


class _Centred(nn.Linear):
    """Mixes the examples wherever it is called from."""

    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True))


@pytest.mark.parametrize("way", ["evaluation mode", "forward", "part", "closure", "after its copy"])
def test_no_way_around_the_check_of_the_first_batch(data, way):
    model = nn.Sequential(_Centred(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=40, steps=2)
    private = make_private(model, optimizer, plan, seed=0)
    call = {"forward": model.forward, "closure": model.forward, "part": model[0]}.get(way, model)
    if way == "evaluation mode":
        model.eval()
    if way == "after its copy":
        copy.deepcopy(model)(data.tensors[0])
    with pytest.raises((NotIsolated, CaptureError)):
        for x, y in private.loader(data):

            def passes(x=x, y=y):
                F.cross_entropy(call(x), y).backward()

            optimizer.step(passes) if way == "closure" else (passes(), optimizer.step())
    assert private.steps == 0


@pytest.mark.parametrize("way", ["evaluation mode", "one by one", "evaluated in between", "vouched for"])
def test_what_needs_no_check_passes_it(data, way):
    model, optimizer, private = _setup(check_isolation=way != "vouched for")
    model.train(way != "evaluation mode")
    for batch in private.loader(data):
        for x, y in batch.split(1 if way == "one by one" else 40):
            F.cross_entropy(model.forward(x) if way == "vouched for" else model(x), y).backward()
        optimizer.step()
        if way == "evaluated in between":
            model.eval()
            model(data.tensors[0])  # gradients enabled, as people forget
            model.train()
    assert private.steps == 6


def test_a_copy_of_a_private_model_is_an_average_of_its_own(data):
    model, optimizer, private = _setup()
    average = torch.optim.swa_utils.AveragedModel(model)
    for x, y in private.loader(data):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        average(x)
    assert private.steps == 6 and not math.isinf(private.spent().epsilon)


# Budget and books ----------------------------------------------------------------------------------------------------


def test_the_budget_stops_before_it_is_exceeded(data):
    *_, probe = _setup()
    three = probe.plan.guarantee(steps=3).epsilon
    model, optimizer, private = _setup(max_epsilon=three * 1.0001)
    assert private.steps_allowed == 3
    with pytest.raises(BudgetExceeded, match="max_epsilon"):
        _train(model, optimizer, private.loader(data))
    assert private.steps == 3 and private.spent().epsilon <= three * 1.0001
    before = _weights(model)
    with pytest.raises(BudgetExceeded):
        optimizer.step()
    assert torch.equal(_weights(model), before)


def test_the_budget_counts_earlier_phases(data):
    model, optimizer, first = _setup()
    _train(model, optimizer, first.loader(data))
    first.detach()
    whole = first.spent().epsilon
    second = make_private(model, optimizer, first.plan, prior=first.ledger, max_epsilon=whole * 1.2)
    assert 0 < second.steps_allowed < 6
    assert second.spent().epsilon == pytest.approx(whole)
    _train(model, optimizer, [next(iter(second.loader(data)))])
    assert whole < second.spent().epsilon <= whole * 1.2
    assert (first.ledger + second.ledger).steps == 6 + 7  # the second ledger holds the first


def test_a_foreign_step_is_over_any_budget(data):
    model, optimizer, private = _setup(max_epsilon=100.0)
    with pytest.raises(BudgetExceeded, match="unknown"):
        _train(model, optimizer, list(DataLoader(data, batch_size=10))[:1])
    assert private.steps == 0


def test_more_steps_than_planned_are_refused(data):
    model, optimizer, private = _setup(steps=2)
    _train(model, optimizer, private.loader(data))
    with pytest.raises(BudgetExceeded, match="longer plan"):
        optimizer.step()
    assert private.steps == 2


def test_early_stopping_reports_what_was_spent(data):
    model, optimizer, private = _setup()
    batches = iter(private.loader(data))
    _train(model, optimizer, [next(batches) for _ in range(1)])
    assert private.spent().epsilon == private.plan.guarantee(steps=1).epsilon < private.plan.guarantee().epsilon


def test_an_optimizer_that_fails_has_spent_its_noise(data):
    """The gradient was released to it: the same noise must not be used for another batch."""

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory")

    model, optimizer, private = _setup(optimizer=lambda p: Failing(p, lr=0.1))
    with pytest.raises(RuntimeError, match="out of memory"):
        _train(model, optimizer, private.loader(data))
    assert private.steps == 1 and math.isfinite(private.spent().epsilon)


# The key -----------------------------------------------------------------------------------------------------------


def test_the_key_is_nowhere_but_where_it_was_asked_for(data):
    key = bytes(range(1, 33))
    model, optimizer, private = _setup(key=key)
    _train(model, optimizer, private.loader(data))
    public = [private, private.state_dict(), private.spent(), private.ledger, private.plan, private.key]
    texts = [repr(x) for x in public] + [str(x) for x in public] + [repr(optimizer.state_dict()), repr(model.state_dict())]
    for text in texts:
        assert key.hex() not in text and repr(key) not in text
    assert key in private.state_dict(with_key=True).values()
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(private.key)


def test_a_pickled_model_holds_no_record_and_no_key(data):
    """Its hooks know the batch and the loader; a file of the model must not."""
    key = bytes(range(1, 33))
    model, _, private = _setup(key=key)
    batches = iter(private.loader(data))
    inputs, targets = next(batches)
    F.cross_entropy(model(inputs), targets).backward()
    content = pickle.dumps(model)
    assert key not in content and not any(row.numpy().tobytes() in content for row in inputs)
    assert torch.equal(pickle.loads(content)(inputs), model(inputs))


def test_a_seeded_run_says_that_it_is_reproducible(data):
    *_, private = _setup(seed=4)
    assert "whoever knows the seed" in str(private.spent())
    *_, private = _setup()
    assert private.spent().notes == ()


def test_a_key_serves_one_run(data):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    plan = Plan.dpftrl(noise_multiplier=2.0, delta=1e-5, batch_size=10, dataset_size=40, epochs=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, key=bytes(32))
    _train(model, optimizer, private.loader(data))
    private.detach()
    with pytest.raises(ArgumentError, match="One key serves one run"):
        make_private(model, optimizer, plan, key=bytes(32), prior=private.ledger)
    for bad in (b"short", "x" * 32, bytes(31)):
        with pytest.raises(ArgumentError, match="32 bytes") as error:
            make_private(nn.Linear(2, 2), optimizer, plan, key=bad)
        assert repr(bad) not in str(error.value)


def test_a_run_does_not_go_back_to_a_step_whose_noise_is_released(data, tmp_path):
    """Rolling back after a bad stretch, with another learning rate, would release two sums under one noise."""
    model, optimizer, private = _setup()
    checkpoint = Checkpoint(tmp_path, private)
    batches = iter(private.loader(data))
    _train(model, optimizer, itertools.islice(batches, 2))
    early = private.state_dict()
    checkpoint.save()
    _train(model, optimizer, itertools.islice(batches, 2))
    before = _weights(model)
    with pytest.raises(ArgumentError, match="of step 4 or later, got one of step 2"):
        private.load_state_dict(early)
    with pytest.raises(ArgumentError, match="of step 4 or later, got one of step 2"):
        Checkpoint(tmp_path, private)
    assert private.steps == 4 and torch.equal(before, _weights(model))
    private.load_state_dict(private.state_dict())  # the same step: nothing is repeated
    assert private.steps == 4


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 40


@pytest.mark.parametrize("stream", [_Stream(), iter([1, 2]), (x for x in range(3))])
def test_a_stream_cannot_be_sampled(stream):
    *_, private = _setup()
    with pytest.raises(ArgumentError, match="read a stream into a list"):
        private.loader(stream)


def test_users_need_groups_and_examples_have_none(data):
    *_, private = _setup()
    with pytest.raises(ArgumentError, match="groups"):
        private.loader(data, groups=[0] * 40)
    model = nn.Linear(4, 2)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=10, steps=3, unit="user")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, seed=0)
    with pytest.raises(ArgumentError, match="groups"):
        private.loader(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(model, optimizer, private.loader(data, groups=[i // 4 for i in range(40)]))
    assert private.steps == 3 and len(private.raw_norms) <= 10 and "per user" in str(private.spent())
