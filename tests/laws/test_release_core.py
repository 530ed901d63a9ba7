"""The core of a step against its formula, number by number: any capture, any noise, any placement, and steps that are refused."""

from __future__ import annotations

import pytest
import torch

from hushgrad.clipping import Adaptive
from hushgrad.clipping.adaptive import AdaptiveOnDevice
from hushgrad.clipping.base import ClippedSum
from hushgrad.denoise import Kalman
from hushgrad.errors import CaptureError
from hushgrad.events import Relation
from hushgrad.noise import BLT
from hushgrad.noise.source import Source
from hushgrad.release.core import Noised, Release
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.whole import Whole
from hushgrad.release.placement.world import World
from hushgrad.train import Plan

KEY, BATCH, NORM, NOISE = RunKey(bytes(range(32))), 4, 0.5, 3.0
HOW = {"noise_multiplier": NOISE, "delta": 1e-5, "max_grad_norm": NORM, "batch_size": BATCH, "dataset_size": 16}
DPSGD = Plan.dpsgd(**HOW, steps=4)
BANDS = Plan.dpftrl(**HOW, epochs=1, noise=BLT(buffers=2))
PLANS = {"independent": DPSGD, "stream": BANDS, "certified": Plan.dpsgd(**HOW, steps=4, certified=True)}
PARAMS = {"a": torch.ones(5, 3), "none": torch.ones(0), "b": torch.ones(4)}
NORMS = torch.tensor([0.3, 0.9])
STD = NOISE * NORM / BATCH


class Seen:
    """What the core asks of a capture."""

    def __init__(self, *, scattered=(), norms=NORMS, fixed=None, step=0):
        generator = torch.Generator().manual_seed(step)
        self.sums = {name: torch.randn(p.shape, generator=generator) for name, p in PARAMS.items()}
        self.scattered, self.norms, self.fixed = frozenset(scattered), norms, fixed

    def check(self):
        return len(self.norms)

    def collect(self, clip, out, scale):
        self.clip = clip
        made = {name: out[name].add_(t, alpha=scale) if name in out else t * scale for name, t in self.sums.items()}
        return ClippedSum(made, self.norms, torch.ones(len(self.norms)), 0, self.fixed)


class Part(Whole):
    """Draws the noise of the second half of each parameter."""

    draws_all = False

    def own(self, buffers):
        return [(name, t.view(-1)[t.numel() // 2 :], t.numel() // 2) for name, t in buffers.items()]


def release(plan=DPSGD, place=Whole, **options):
    return Release(plan, place(PARAMS, World()), KEY, **options)


def rows(plan, steps, scale=STD):
    """The noise of each step, by a stream of its own."""
    stream, likes = plan.noise.stream(Source(key=KEY.secret), steps=plan.steps), [PARAMS["a"], PARAMS["b"]]
    return [
        dict(zip("ab", stream.rows(t, likes, indices=[0, 2], offsets=[0, 0], scale=scale), strict=True)) for t in range(steps)
    ]


def expected(plan, seen, step, scale=STD):
    return {name: seen.sums[name] / BATCH + row for name, row in rows(plan, step + 1, scale)[step].items()}


def close(found, wanted):
    assert not found["none"].numel()
    for name in "ab":
        assert torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6) and found[name].dtype is torch.float32


@pytest.mark.parametrize("scattered", [(), ("a",)], ids=["plain", "a table"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_each_step_is_the_formula_also_after_refusals(plan, scattered):
    core = release(plan)
    for step in range(4):
        seen = Seen(scattered=scattered, step=step)
        with pytest.raises(CaptureError, match=f"step {step} has 3 contributions, but 2 were captured"):
            core.privatise(seen, step, 3)
        core.privatise(Seen(scattered=scattered, step=step + 9), step, None)  # the books refuse it: its row is drawn again
        noised, clipped = core.privatise(seen, step, 2)
        assert (noised.step, noised.std, noised.raw_rows, clipped.raw_sums) == (step, STD, {}, {})
        assert clipped.raw_norms is noised.norms is NORMS and seen.clip is core.live_clip
        close(noised.sums, expected(plan, seen, step))
        assert core.finished(noised, 0.1) == noised.sums


def test_a_refused_step_draws_nothing_before_and_settling_twice_is_once():
    core = release(BANDS)
    drawn = []
    core.stream.rows = lambda *args, real=core.stream.rows, **kwargs: drawn.append(args[0]) or real(*args, **kwargs)
    with pytest.raises(CaptureError):
        core.privatise(Seen(scattered="a"), 0, 3)
    assert not drawn
    core.settle(0)
    assert not drawn and core.finished(core.privatise(Seen(scattered="a"), 0, 2)[0], None)
    stream = core.stream
    core.settle(1)  # the step is done: nothing to bring back
    assert core.stream is stream
    core.begin(1)
    core.settle(1)
    assert core.stream is not stream


class Halves(Part):
    """One of two processes that hold the same."""

    finishes = False

    def add_up(self, buffers):
        for t in buffers.values():
            t.mul_(2)

    def gather(self, buffers):
        self.gathered = buffers


@pytest.mark.parametrize("scattered", [(), ("a",)], ids=["plain", "a table"])
@pytest.mark.parametrize("plan", [DPSGD, PLANS["certified"]], ids=["ordinary", "certified"])
def test_each_process_adds_its_own_part_of_the_noise_and_certified_sums_are_complete_before(plan, scattered):
    seen, core = Seen(scattered=scattered), release(plan, Halves)
    found = core.privatise(seen, 0, 2)[0].sums
    assert not plan.certified or core.placement.gathered is found
    noise = rows(plan, 1)[0]
    for name in "ab":
        own = torch.arange(noise[name].numel()).view(noise[name].shape) >= noise[name].numel() // 2
        wanted = 2 * seen.sums[name] / BATCH + own * noise[name] * (1 if plan.certified else 2)
        assert torch.allclose(found[name], wanted, atol=1e-6)


def test_a_secure_sum_is_on_its_grid_and_has_its_noise():
    core, seen = release(Plan.dpsgd(**HOW, steps=4, secure=True)), Seen(scattered="a")
    found = core.privatise(seen, 0, 2)[0].sums
    away = torch.cat([(found[name] - seen.sums[name] / BATCH).flatten() for name in "ab"])
    assert 0.2 * STD < float(away.std()) < 3 * STD and torch.equal(found["a"] * 2**20, (found["a"] * 2**20).round())


@pytest.mark.parametrize("certified", [False, True])
def test_lazy_tables_are_handed_over_without_noise(certified):
    core, seen = release(PLANS["certified"] if certified else DPSGD, type("Sends", (Whole,), {"finishes": not certified})), Seen()
    core.lazy = frozenset("a")
    noised, clipped = core.privatise(seen, 0, 2)
    assert list(noised.sums) == ["none", "b"] and list(noised.raw_rows) == ["a"] == list(clipped.raw_sums)
    assert torch.equal(noised.raw_rows["a"], seen.sums["a"] / BATCH)
    assert torch.allclose(noised.sums["b"], expected(DPSGD, seen, 0)["b"], atol=1e-6)
    table = release()
    table.lazy, asked = frozenset("a"), Seen(scattered="a")
    assert torch.equal(table.privatise(asked, 0, 2)[0].raw_rows["a"], asked.sums["a"] / BATCH)
    assert core.witness(noised) != core.witness(noised._replace(raw_rows={"a": noised.raw_rows["a"] + 1}))


ADAPTIVE = Adaptive(NORM, batch_size=BATCH, quantile=0.3, count_noise=4.0)


def test_an_adaptive_clip_norm_moves_by_its_noisy_count():
    plan = Plan.dpsgd(**{name: value for name, value in HOW.items() if name != "max_grad_norm"}, steps=4, clip=ADAPTIVE)
    core, count = release(plan), torch.tensor([ADAPTIVE.raw_count(NORMS)], dtype=torch.float64)
    clip, counted = core.clip, []
    std = clip.gradient_noise(NOISE) * NORM / BATCH
    Source(key=KEY.secret).z(0, len(PARAMS), count, out=count, scale=clip.count_noise)
    object.__setattr__(core.placement.world, "add_up", lambda counts: counted.append(float(counts[0])))
    noised, _ = core.privatise(Seen(), 0, 2)
    assert core.clip is clip and noised.std == std and counted == [ADAPTIVE.raw_count(NORMS)]
    close(noised.sums, expected(plan, Seen(), 0, std))
    assert noised.moved == clip.moved(float(count)) != clip
    assert core.witness(noised) != core.witness(noised._replace(moved=clip))
    core.finished(noised, None)
    assert core.clip == noised.moved and core.clip_norm == core.clip.sensitivity(Relation.ADD_REMOVE) != NORM
    there = release(plan)  # the same where the clip norm lies on a device, also if the batch there is filled up
    there.use_clip(AdaptiveOnDevice(clip, torch.tensor([NORM])))
    filled = Seen(fixed=torch.cat([NORMS, torch.tensor([-1.0])]))
    for waited in (True, False):
        there.placement.waited_for = waited
        noised, _ = there.privatise(filled, 0, 2)
        assert (noised.norms is NORMS) is waited and isinstance(noised.moved, AdaptiveOnDevice)
        assert noised.moved.fetched.max_grad_norm == pytest.approx(core.clip.max_grad_norm, rel=1e-6)
    assert there.witness(noised) == there.witness(noised._replace(moved=noised.moved.fetched))
    there.finished(noised, None)
    assert there.clip.max_grad_norm == pytest.approx(core.clip.max_grad_norm, rel=1e-6) and isinstance(there.clip, Adaptive)


def test_a_witness_is_of_everything_that_is_released():
    core = release(witnessed=True)
    noised, _ = core.privatise(Seen(), 0, 2)
    assert core.source.seen is not None  # hashed while the noise was added
    first = core.witness(noised)
    assert core.source.seen is None and core.witness(noised) == first
    others = [
        noised._replace(norms=NORMS + 1),
        noised._replace(sums={**noised.sums, "b": noised.sums["b"] + 1}),
        noised._replace(moved=ADAPTIVE),
    ]
    core.noted = lambda: b"released between the steps"
    assert len({first, core.witness(noised), *(core.witness(other) for other in others)}) == 5
    assert (
        release().source.hashed
        is None
        is release(place=type("Sends", (Whole,), {"finishes": False}), witnessed=True).source.hashed
    )


@pytest.mark.parametrize("saved", [False, True])
def test_a_restarted_stream_goes_on(saved):
    first, again = release(BANDS), release(BANDS)
    for step in range(2):
        first.finished(first.privatise(Seen(step=step), step, 2)[0], None)
    again.load_noise(first.stream.state_dict() if saved else None, 2)
    close(again.privatise(Seen(step=2), 2, 2)[0].sums, expected(BANDS, Seen(step=2), 2))
    other = release(BANDS)
    other.stream.takes = lambda state, likes: len(likes) != 3
    other.load_noise(first.stream.state_dict(), 2)
    close(other.privatise(Seen(step=2), 2, 2)[0].sums, expected(BANDS, Seen(step=2), 2))


class Told(Kalman):
    """Remembers what it is told, and fails if asked to."""

    def __call__(self, grads, info, state):
        self.told.append((info, torch.is_grad_enabled()))
        if info.learning_rate is None:
            raise RuntimeError("no rate")
        return grads

    def probes(self, params, state):
        return self.asked(params, state)


def test_a_denoiser_is_told_of_the_noise_and_its_failure_does_not_keep_the_clip_norm():
    denoise = Told(0.5)
    object.__setattr__(denoise, "told", [])
    object.__setattr__(denoise, "asked", lambda params, state: (list(params), torch.is_grad_enabled(), state))
    how = {name: value for name, value in HOW.items() if name != "max_grad_norm"}
    core = release(Plan.dpsgd(**how, steps=4, clip=ADAPTIVE, denoise=denoise))
    core.filter_state = {"kept": 1}
    assert core.filter_state == {"kept": 1} and core.probes() == (list(PARAMS), False, {"kept": 1})
    assert core.scales() == denoise.scales({}) and release().scales() is None and len(release().probes()) == 1
    noised, _ = core.privatise(Seen(), 0, 2)
    core.finished(noised, 0.25)
    (info, enabled) = denoise.told[0]
    assert (info.std, info.step, info.max_grad_norm, info.learning_rate) == (noised.std, 0, NORM, 0.25) and not enabled
    noised, _ = core.privatise(Seen(step=1), 1, 2)
    with pytest.raises(RuntimeError, match="no rate"):
        core.finished(noised, None)
    assert core.clip == noised.moved and not core._ahead


def test_a_denoiser_of_a_stream_is_told_its_own_std():
    denoise = Told(0.5)
    object.__setattr__(denoise, "told", [])
    core = release(Plan.dpftrl(**HOW, epochs=1, noise=BLT(buffers=2), denoise=denoise))
    core.finished(core.privatise(Seen(), 0, 2)[0], 0.25)
    core.finished(core.privatise(Seen(step=1), 1, 2)[0], 0.25)
    assert denoise.told[1][0].std == pytest.approx(STD * BANDS.noise.row_std(1, steps=BANDS.steps)) != STD


def test_a_plan_without_noise_adds_none():
    seen = Seen()
    found = release(Plan.dpsgd(**{**HOW, "noise_multiplier": 0.0}, steps=4)).privatise(seen, 0, 2)[0]
    assert found.std == 0.0 and torch.equal(found.sums["a"], seen.sums["a"] / BATCH)


def test_a_gradient_has_its_parameters_precision():
    core = Release(DPSGD, Whole({"half": torch.ones(3, dtype=torch.bfloat16)}, World()), KEY)
    found = core.finished(Noised(0, {"half": torch.full((3,), 2.0)}, NORMS, None, STD, {}), None)["half"]
    assert found.dtype is torch.bfloat16 and found.tolist() == [2.0] * 3


def test_sums_that_are_not_those_that_were_begun_are_not_released():
    core = release()
    core.begin(0)
    begun = {"a": torch.zeros(5, 3)}
    for sums in ({"a": begun["a"]}, {**PARAMS, "a": begun["a"].clone()}):
        with pytest.raises(CaptureError, match="Nothing was released"):
            core.noised(0, sums, NORMS, begun=begun)
