"""One step of the hall equals the formula, computed the slow way, for every optimizer, denoiser and kind of batch."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad import denoise
from hushgrad.clipping import Adaptive
from hushgrad.denoise.base import Denoiser, NoiseInfo
from hushgrad.noise.source import Source
from hushgrad.train import SVRG, Ball, Box, Plan, make_private
from hushgrad.train.private import Private

KEY = bytes(range(32))
F = nn.functional


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def _data(n: int = 24) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(n, 3, generator=g).double() * 3, torch.randint(2, (n,), generator=g))


def _plan(steps: int = 4, **options: object) -> Plan:
    options = {"noise_multiplier": 0.8, "delta": 1e-5, "max_grad_norm": 0.7, "batch_size": 6, "dataset_size": 24, **options}
    return Plan.dpsgd(steps=steps, **options)


def _per_example(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The gradients of single examples, one backward pass each, on a copy without hooks."""
    bare = copy.deepcopy(model)
    for module in bare.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    rows = []
    for i in range(len(x)):
        grads = torch.autograd.grad(F.cross_entropy(bare(x[i : i + 1]), y[i : i + 1]), list(bare.parameters()))
        rows.append(dict(zip(dict(bare.named_parameters()), grads, strict=True)))
    return rows


def _clipped_sum(rows: list[dict[str, torch.Tensor]], like: dict[str, torch.Tensor], clip: float) -> dict[str, torch.Tensor]:
    total = {name: torch.zeros_like(p) for name, p in like.items()}
    for row in rows:
        norm = torch.sqrt(sum(g.square().sum() for g in row.values()))
        for name, g in row.items():
            total[name] += g * torch.clamp(clip / norm, max=1.0)
    return total


def _formula(model: nn.Module, plan: Plan, rows: list[dict[str, torch.Tensor]], step: int) -> dict[str, torch.Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters()}
    total = _clipped_sum(rows, params, plan.max_grad_norm)
    source = Source(key=KEY)
    std = plan.noise_multiplier * plan.max_grad_norm
    return {n: (total[n] + std * source.z(step, i, p)) / plan.batch_size for i, (n, p) in enumerate(params.items())}


def _seen_by(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """What the optimizer is given, step by step: recorded by a pre-hook that runs after the hall's."""
    seen: list[list[torch.Tensor]] = []
    params = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in params]))
    return seen


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.3, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_private_run_is_the_formula_under_any_optimizer(name):
    model, plan = _model(), _plan()
    twin = copy.deepcopy(model)
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    kind = type(optimizer)
    private = make_private(model, optimizer, plan, key=KEY)
    for x, y in private.loader(_data()):
        gradient = _formula(twin, plan, _per_example(twin, x, y), private.steps)
        for n, p in twin.named_parameters():
            p.grad = gradient[n]
        other.step()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    assert private.steps == plan.steps and type(optimizer) is kind
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert optimizer.state_dict().keys() == other.state_dict().keys()


def test_schedulers_keep_working():
    model, plan = _model(), _plan(steps=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(model, optimizer, plan, key=KEY)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for x, y in private.loader(_data()):
        rates.append(optimizer.param_groups[0]["lr"])
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_micro_batches_are_the_same_step():
    ends = []
    for size in (100, 2):
        model, plan = _model(), _plan()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        private = make_private(model, optimizer, plan, key=KEY)
        for batch in private.loader(_data()):
            for x, y in batch.split(size):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert private.steps == plan.steps
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


def _gradients(n_removed: int | None, divisor_is_actual: bool = False) -> tuple[torch.Tensor, Plan]:
    """The first released gradient, with one record of the batch present or blanked out by its absence from the sum."""
    model, plan = _model(), _plan(steps=1, batch_size=12, dataset_size=24)
    if divisor_is_actual:
        plan = replace(plan, batch_size=12 if n_removed is None else 11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, key=KEY)
    seen = _seen_by(optimizer)
    (batch,) = private.loader(_data())
    x, y = batch
    if n_removed is not None:
        keep = torch.arange(len(x)) != n_removed
        x, y = x[keep], y[keep]
        private._issued = private._issued._replace(examples=len(x), counted=len(x), contributions=len(x))
        private._capture.examples(len(x))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    private.detach()
    return torch.cat([g.flatten() for g in seen[0]]), plan


def test_one_record_moves_the_release_by_the_clip_norm_at_most_and_the_divisor_is_public():
    whole, plan = _gradients(None)
    bound = plan.max_grad_norm / plan.batch_size
    for record in range(4):
        assert torch.linalg.norm(_gradients(record)[0] - whole) <= bound * (1 + 1e-9)
    # The planted defect: a divisor that counts the records moves everybody's contribution, noise included.
    assert torch.linalg.norm(_gradients(0, divisor_is_actual=True)[0] - whole) > bound


@settings(max_examples=10, deadline=None)
@given(rate_of=st.sampled_from([1, 2]), key=st.binary(min_size=32, max_size=32))
def test_an_empty_batch_is_a_noisy_step(rate_of, key):
    """Whether or not its rows, which do not count, are passed."""
    model, plan = _model(), _plan(steps=12, batch_size=rate_of, dataset_size=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, key=key)
    seen = _seen_by(optimizer)
    empty = []
    for batch in private.loader(_data()):
        x, y = batch
        if batch.examples == batch.padding:
            empty.append(batch.step)
        if batch.step not in empty or batch.step % 2:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    private.detach()
    assert private.steps == 12
    scale = plan.noise_multiplier * plan.max_grad_norm / plan.batch_size
    for step in empty:
        for i, p in enumerate(model.parameters()):
            torch.testing.assert_close(seen[step][i], scale * Source(key=key).z(step, i, p.detach()))


def test_an_empty_batch_may_also_be_run_through_the_model():
    model, plan = _model(), _plan(steps=30, batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, key=KEY)
    counts = []
    for batch in private.loader(_data()):
        x, y = batch
        counts.append(batch.examples - batch.padding)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert 0 in counts and all(p.isfinite().all() for p in model.parameters())


# Probes and closures -----------------------------------------------------------------------------------------------


def _closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def test_a_closure_is_run_by_the_hall_and_removed():
    """Hazard 4: torch would run it after the privatisation and step on raw gradients."""
    ends = []
    for with_closure in (False, True):
        model, plan = _model(), _plan()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        private = make_private(model, optimizer, plan, key=KEY)
        calls = 0
        for x, y in private.loader(_data()):
            closure = _closure(model, optimizer, x, y)
            if with_closure:

                def counted(closure=closure):
                    nonlocal calls
                    calls += 1
                    return closure()

                optimizer.step(counted) if private.steps % 2 else optimizer.step(closure=counted)
                assert private.raw_loss is not None
            else:
                closure()
                optimizer.step()
        assert calls == (plan.steps if with_closure else 0)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_a_hall_that_leaves_the_closure_in_place_is_caught(monkeypatch):
    honest = Private._before_step
    monkeypatch.setattr(Private, "_before_step", lambda self, o, args, kw: (honest(self, o, args, kw), (args, kw))[1])
    with pytest.raises(AssertionError):
        test_a_closure_is_run_by_the_hall_and_removed()


def test_svrg_is_the_formula():
    plan = _plan(steps=7, denoise=SVRG(period=4, snapshot_steps=2, ratio=0.25))
    model = _model()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(model, optimizer, plan, key=KEY)
    snapshot, mean = None, None
    for x, y in private.loader(_data()):
        step = private.steps
        phase = step % 4
        if phase == 0:
            snapshot = copy.deepcopy(twin)
        at_snapshot = _per_example(snapshot, x, y)
        if phase < 2:
            noisy = _formula(twin, plan, at_snapshot, step)
            mean = noisy if phase == 0 else {n: (mean[n] + noisy[n]) / 2 for n in noisy}
            gradient = mean
        else:
            rows = _per_example(twin, x, y)
            differences = [{n: (a[n] - b[n]) / 0.25 for n in a} for a, b in zip(rows, at_snapshot, strict=True)]
            noisy = _formula(twin, plan, differences, step)
            gradient = {n: mean[n] + 0.25 * noisy[n] for n in noisy}
        with torch.no_grad():
            for n, p in twin.named_parameters():
                p -= 0.5 * gradient[n]
        optimizer.step(_closure(model, optimizer, x, y))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert str(private.ledger.event()) == "7 x Poisson(0.25) Gaussian(0.8)"  # snapshots are charged like every step


def test_kalman_probes_leave_the_parameters_bit_for_bit():
    from hushgrad.denoise import Kalman

    model, plan = _model(), _plan(denoise=Kalman())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # any movement would be the hall's
    private = make_private(model, optimizer, plan, key=KEY)
    before = [p.detach().clone() for p in model.parameters()]
    for x, y in private.loader(_data()):
        optimizer.step(_closure(model, optimizer, x, y))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert private.steps == plan.steps


def test_a_failing_closure_leaves_the_parameters_and_the_books():
    from hushgrad.denoise import Kalman

    model, plan = _model(), _plan(denoise=SVRG(period=2))
    assert Kalman  # both probe; SVRG shifts from its second step on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(model, optimizer, plan, key=KEY)
    batches = iter(private.loader(_data()))
    x, y = next(batches)
    optimizer.step(_closure(model, optimizer, x, y))
    x, y = next(batches)
    before = [p.detach().clone() for p in model.parameters()]

    def failing():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(failing)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert private.steps == 1
    optimizer.step(_closure(model, optimizer, x, y))  # the same step, now taken
    assert private.steps == 2


class _Recorder(Denoiser):
    """Passes gradients on and remembers what it was told."""

    def __init__(self) -> None:
        object.__setattr__(self, "seen", [])

    def __call__(self, grads, info: NoiseInfo, state):
        self.seen.append((info, {n: g.clone() for n, g in grads.items()}))
        return {n: g.clone() for n, g in grads.items()}

    def to_json(self):
        return {"denoiser": "_Recorder"}


def test_a_denoiser_is_told_the_true_noise():
    recorder = _Recorder()
    model, plan = _model(), _plan(steps=3, denoise=recorder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    private = make_private(model, optimizer, plan, key=KEY)
    for x, y in private.loader(_data()):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    info = recorder.seen[1][0]
    assert info.std == pytest.approx(0.8 * 0.7 / 6) and info.step == 1
    assert info.max_grad_norm == 0.7 and info.learning_rate == 0.25


def test_adaptive_clipping_is_the_formula_and_costs_what_the_plan_says():
    from hushgrad.clipping import Adaptive
    from hushgrad.errors import NoTheorem
    from hushgrad.noise import BLT

    clip = Adaptive(0.7, batch_size=6, quantile=0.4, count_noise=1.0)
    plan = _plan(clip=clip)
    model = _model()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(model, optimizer, plan, key=KEY)
    source = Source(key=KEY)
    for x, y in private.loader(_data()):
        step, rows = private.steps, _per_example(twin, x, y)
        params = {n: p.detach() for n, p in twin.named_parameters()}
        total = _clipped_sum(rows, params, clip.max_grad_norm)
        std = clip.gradient_noise(0.8) * clip.max_grad_norm
        norms = torch.tensor([float(torch.sqrt(sum(g.square().sum() for g in row.values()))) for row in rows])
        with torch.no_grad():
            for i, (n, p) in enumerate(twin.named_parameters()):
                p -= 0.5 * (total[n] + std * source.z(step, i, params[n])) / 6
        z = float(source.z(step, 4, torch.zeros(1, dtype=torch.float64)))
        clip = clip.moved(clip.raw_count(norms) + 1.0 * z)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert private.clip.max_grad_norm == pytest.approx(clip.max_grad_norm, rel=1e-12)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert private.clip != plan.clip and str(private.ledger.event()) == "4 x Poisson(0.25) Gaussian(0.8)"
    saved = private.state_dict()
    private.detach()
    resumed = make_private(model, optimizer, plan, key=KEY)
    resumed.load_state_dict(saved)
    assert resumed.clip == private.clip
    with pytest.raises(NoTheorem, match="independent"):
        common = {"noise_multiplier": 0.8, "delta": 1e-5, "batch_size": 6, "dataset_size": 24, "epochs": 1}
        Plan.dpftrl(clip=clip, noise=BLT(buffers=2), **common)


# Averages and projections --------------------------------------------------------------------------------------------


def test_a_step_that_fails_moves_nothing_before_it_is_charged_and_everything_after(monkeypatch):
    """Up to the journal's word nothing has changed; what fails behind it is post-processing of a release that is charged."""
    clip = Adaptive(1.0, batch_size=8, count_noise=4.0)
    plan = Plan.dpsgd(
        noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=16, steps=3, clip=clip, denoise=denoise.Laplacian(1.0)
    )
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, seed=0)
    data = TensorDataset(torch.randn(16, 3))
    batches = iter(private.loader(data))

    def fails(place, name):
        (x,) = next(batches)
        model(x).square().mean().backward()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()

    fails(type(private.journal), "released")
    assert private.steps == 0 and private.clip == clip and private.attendance_state()["total"] == 0
    batches = iter(private.loader(data))
    fails(denoise.Laplacian, "__call__")
    assert private.steps == 1 and private.clip != clip and private.ledger.steps == 1
    (x,) = next(batches)  # and the next batch is the next step's
    model(x).square().mean().backward()
    optimizer.step()
    assert private.steps == 2


@pytest.mark.parametrize("average", ["tail", "polyak", "ema"])
def test_averages_are_means_of_the_iterates(average):
    model, plan = _model(), _plan(steps=8, average=average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(model, optimizer, plan, key=KEY)
    path = []
    for x, y in private.loader(_data()):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        path.append(model[0].weight.detach().clone())
    if average == "ema":
        expected = path[0]
        for t, w in enumerate(path[1:], start=1):
            expected = expected + (1 - min(0.999, (1 + t) / (10 + t))) * (w - expected)
    else:
        expected = torch.stack(path[4:] if average == "tail" else path).mean(0)
    own = model[0].weight.detach().clone()
    with private.averaged():
        torch.testing.assert_close(model[0].weight.detach(), expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(model[0].weight, own)


@pytest.mark.parametrize("projection", [Ball(0.5), Box(-0.1, 0.05)])
def test_projection_holds_after_every_step(projection):
    model, plan = _model(), _plan(steps=5, projection=projection)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    private = make_private(model, optimizer, plan, key=KEY)
    for x, y in private.loader(_data()):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        if isinstance(projection, Ball):
            assert flat.norm() <= 0.5 * (1 + 1e-12)
        else:
            assert flat.min() >= -0.1 and flat.max() <= 0.05
    assert private.plan == Plan.from_json(private.plan.to_json())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.floats(0.1, 5))
def test_ball_projection_is_the_nearest_point(values, radius):
    w = torch.tensor(values, dtype=torch.float64)
    moved = w.clone()
    Ball(radius).project_([moved[:1], moved[1:]])
    nearest = w * min(1.0, radius / max(float(w.norm()), 1e-300))
    torch.testing.assert_close(moved, nearest)


@pytest.mark.parametrize("cut", [None, 4])
@pytest.mark.parametrize("unit", ["example", "user"])
def test_formulas_are_chosen_by_sizes_that_no_record_changes(unit: str, cut: int | None):
    """One record more makes no other take another formula, which would round otherwise: the number that decides is the plan's."""
    data, groups = _data(), {"groups": [i % 7 for i in range(24)]} if unit == "user" else {}
    model = _model()
    plan = _plan(steps=6, unit=unit, dataset_size=7 if unit == "user" else 24, batch_size=3)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=3)
    decided, sizes = set(), set()
    for batch in private.loader(data, **groups):
        for part in [batch] if cut is None else private.split(batch, cut):
            decided.add(private._capture._tape.most)
            sizes.add(part.examples)
            F.cross_entropy(model(part[0]), part[1]).backward()
        private.optimizer.step()
    assert len(decided) == 1 and None not in decided
    assert cut is not None or len(sizes) > 1
