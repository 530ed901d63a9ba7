"""Shares of noise that clients add: the discrete Gaussian's numbers, the theorem by enumeration, drop-outs made up for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("flwr", reason="needs hushgrad[federated]")
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from hushgrad import accounting
from hushgrad.clipping import Adaptive
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import MinSep, Once, Poisson
from hushgrad.federated import DPFedAvg, LocalGrid, MinSeparation, Shares, add_share, clip_update, discrete_gaussian, shares
from hushgrad.train import Plan

CLIENTS, SIZE = 12, 400
NODE = SimpleNamespace(node_config={})
NO_NORMS = (0.0, -1.0, math.nan, math.inf, "1")


def pmf(std: float, far: int) -> np.ndarray:
    weights = np.exp(np.maximum(-(np.arange(-far, far + 1.0) ** 2) / (2 * std * std), -300))
    return weights / weights.sum()


@pytest.mark.parametrize("bits", [62, 6])
def test_the_numbers_have_the_distribution_also_where_the_first_bits_do_not_decide(monkeypatch, bits):
    """With 6 bits of a first look nearly every number needs the second one."""
    monkeypatch.setattr(discrete_gaussian, "_BITS", bits)
    draw = np.random.default_rng(1).bytes
    for std in (1, 3):
        numbers = discrete_gaussian.discrete_gaussian(std, 20_000, draw)
        near = 3 * std
        expected = pmf(std, 40 * std)[40 * std - near : 40 * std + near + 1]
        found = np.array([(numbers == k).sum() for k in range(-near, near + 1)])
        rest = len(numbers) - found.sum(), len(numbers) * (1 - expected.sum())
        assert stats.chisquare([*found, rest[0]], [*(len(numbers) * expected), rest[1]]).pvalue > 1e-4


def error(c: float) -> float:
    return 3 * math.exp(-2 * math.pi**2 * c * c)


@pytest.mark.parametrize("std", [0.6, 0.8, 1.0])
@pytest.mark.parametrize("parties", [2, 3, 5])
def test_shares_add_up_to_one_discrete_gaussian(std, parties):
    """Step (1) of the proof, with parameters so small that the factor is seen."""
    far = 20
    total, factor = pmf(std, far), 1.0
    for k in range(1, parties):
        total = np.convolve(total, pmf(std, far))
        factor *= (1 + error(std * math.sqrt(k / (k + 1)))) / (1 - error(std * math.sqrt(k / (k + 1))))
    middle, near = len(total) // 2, math.ceil(3 * std * math.sqrt(parties))
    one = pmf(std * math.sqrt(parties), 60)[60 - near : 60 + near + 1]
    ratio = total[middle - near : middle + near + 1] / one
    assert 1 / factor <= ratio.min() < ratio.max() <= factor and (std > 0.7 or ratio.max() > 1 + 1e-6)


@pytest.mark.parametrize("rounding", [0.5, 0.7])
def test_a_gaussian_that_is_rounded_at_random_is_a_discrete_one(rounding):
    """Step (2), by numerical integration."""
    std, ks = 1.3, np.arange(-40, 41.0)
    w = np.linspace(-12, 12, 24_001)
    density = np.exp(-(w**2) / (2 * (std**2 - rounding**2)))
    kernel = np.exp(-((ks[:, None] - w) ** 2) / (2 * rounding**2))
    rounded = (kernel / kernel.sum(0) * density).sum(1) / density.sum()
    ratio = rounded[36:45] / pmf(std, 40)[36:45]
    factor = (1 + error(rounding)) * (1 + error(std)) / ((1 - error(rounding)) * (1 - error(std)))
    assert 1 / factor <= ratio.min() < ratio.max() <= factor and ratio.max() > 1 + 1e-8


@pytest.mark.parametrize("parties", [1, 2, 4])
def test_the_privacy_of_the_sum_of_shares_is_the_events(parties):
    """Delta at many epsilons, summed over all values of shares of parameter 64, and the event's own."""
    std, sigma = 64, 1.25
    shift = math.floor(std * math.sqrt(parties) / sigma)
    total = pmf(std, 1000)
    for _ in range(parties - 1):
        total = np.convolve(total, pmf(std, 1000))
    event = Shares(least=parties).event(std * math.sqrt(parties) / shift, Once(), 1)
    for epsilon in (0.0, 0.3, 1.0, 2.0, 4.0):
        found = np.maximum(total[shift:] - math.exp(epsilon) * total[:-shift], 0).sum() + total[:shift].sum()
        assert found <= accounting.delta(event, epsilon=epsilon, relation="zero_out") * (1 + 1e-9)


def test_a_user_pays_for_each_participation_and_chance_amplifies_nothing():
    once, thrice = (Shares(least=50).event(2.0, MinSep(gap=10, times=k), 25) for k in (1, 3))
    assert once.noise_multiplier == pytest.approx(math.sqrt(3) * thrice.noise_multiplier) and 1.9999 < once.noise_multiplier < 2
    with pytest.raises(NoTheorem):
        Shares(least=50).event(2.0, Poisson(0.1), 25)


@pytest.mark.parametrize("size", [1, 10, 5000])
def test_whole_numbers_never_exceed_the_clip_norm(size):
    rng = np.random.default_rng(size)
    for bound in (0.3, 1.0, 17.3, 3000.0):
        for length in (0.0, 0.5, 1.0, 1e9):
            update = rng.normal(size=size)
            update *= length * bound / np.linalg.norm(update)
            found = shares.whole(update, bound)
            assert float(np.linalg.norm(found.astype(float))) <= bound
            if bound > 100 * math.sqrt(size) and length == 0.5:
                assert np.abs(found - update).max() <= 0.5
    assert not shares.whole(np.array([1.0, math.nan]), 5.0).any()
    for bound in (math.nan, math.inf, 0.0, -1.0):
        assert not shares.whole(np.array([1.0, 2.0]), bound).any()


@pytest.mark.parametrize("mod", [add_share, clip_update])
@pytest.mark.parametrize("names", [("w", "more"), ("other",), ()])
def test_what_cannot_be_read_does_not_leave_the_device(names, mod):
    config = ConfigRecord({shares.CLIP_NORM: 0.5, shares.GRID: 1e-3})
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(3))}), "config": config})

    def client(message, context):
        raw = ArrayRecord({name: Array(np.full(5, 77.0)) for name in names})
        return SimpleNamespace(content=RecordDict({"arrays": raw, "again": raw}), has_error=lambda: False)

    reply = mod(SimpleNamespace(content=content), NODE, client)
    assert not reply.content.array_records


@pytest.mark.parametrize("mod", [add_share, clip_update])
@pytest.mark.parametrize("config", [{}, {shares.GRID: 1e-3}, *({shares.CLIP_NORM: c, shares.GRID: 1e-3} for c in NO_NORMS)])
@pytest.mark.parametrize("model", [True, False])
def test_no_word_of_the_server_switches_a_mod_off(mod, config, model):
    """Whatever is missing in its message: no array leaves as the client made it; metrics do."""
    arrays = {"arrays": ArrayRecord({"w": Array(np.zeros(3))})} if model else {}

    def client(message, context):
        raw = ArrayRecord({"w": Array(np.full(3, 77.0))})
        content = RecordDict({"arrays": raw, "metrics": MetricRecord({"accuracy": 0.5})})
        return SimpleNamespace(content=content, has_error=lambda: False)

    reply = mod(SimpleNamespace(content=RecordDict({**arrays, "config": ConfigRecord(config)})), NODE, client)
    assert not reply.content.array_records and reply.content["metrics"]["accuracy"] == 0.5


def _asked(mod, norm: float, grid: float, **limits: float | str) -> bool:
    """Whether arrays leave a client with these limits of its own when a server asks for this."""
    config = ConfigRecord({shares.CLIP_NORM: norm, shares.GRID: grid})
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(3))}), "config": config})

    def client(message, context):
        return SimpleNamespace(content=RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(3))})}), has_error=lambda: False)

    node = SimpleNamespace(node_config={f"hushgrad-{name.replace('_', '-')}": value for name, value in limits.items()})
    return bool(mod(SimpleNamespace(content=content), node, client).content.array_records)


def test_a_client_says_itself_how_much_a_server_may_ask_for():
    """A large clip norm, or a fine grid, is the word of a server that wants the update as it is."""
    for mod in (add_share, clip_update):
        assert _asked(mod, 1.0, 1e-3) and _asked(mod, 1.0, 1e-3, clip_norm=1.0)
        assert not _asked(mod, 1.0 + 1e-9, 1e-3, clip_norm=1.0)
        for wrong in (0.0, -1.0, math.nan, "much"):
            with pytest.raises(ArgumentError):
                _asked(mod, 1.0, 1e-3, clip_norm=wrong)
    assert _asked(add_share, 1.0, 1 / 256, share=1.0) and not _asked(add_share, 1.0, 0.99 / 256, share=1.0)
    for grid in (1e-13, 1e-30, 1e-300):  # no plan asks for so little noise, and the numbers would not be whole
        assert not _asked(add_share, 1.0, grid) and not _asked(add_share, 1.0, grid, share=1e-200)


# The server ----------------------------------------------------------------------------------------------------------------


def plan(least: int, rounds: int = 1, **more) -> Plan:
    sampling = MinSeparation(cohort=CLIENTS, gap=1, times=rounds, steps=rounds)
    common = {"delta": 1e-5, "batch_size": CLIENTS, "dataset_size": CLIENTS, "unit": "user", "relation": "zero_out"}
    return Plan.dpsgd(
        **{"noise_multiplier": 1.5, "max_grad_norm": 0.5, "sampling": sampling, "noise": Shares(least=least), **common, **more}
    )


def fleet(kinds: dict[int, str]) -> LocalGrid:
    """Clients that move every weight by 1 (clipped); some are silent, send no whole numbers, or garbage."""
    bare, noising = ClientApp(), ClientApp(mods=[add_share])

    def answer(message, context):
        kind = kinds.get(context.node_config["partition-id"], "honest")
        if kind == "silent":
            raise RuntimeError("away")
        array = Array("int64", (SIZE,), "numpy.ndarray", b"PK garbage") if kind == "garbage" else None
        array = array or Array(message.content["arrays"]["w"].numpy() + 1)
        return Message(RecordDict({"arrays": ArrayRecord({"w": array})}), reply_to=message)

    for app in (bare, noising):
        app.train()(answer)

    def either(message, context):
        return (bare if kinds.get(context.node_config["partition-id"]) == "floats" else noising)(message, context)

    return LocalGrid(either, clients=CLIENTS)


def trained(least: int, kinds: dict[int, str], **more) -> tuple[DPFedAvg, np.ndarray]:
    strategy = DPFedAvg(FedAvg(), plan(least, **more), seed=0)
    result = strategy.start(fleet(kinds), ArrayRecord({"w": Array(np.zeros(SIZE))}))
    return strategy, result.arrays["w"].numpy()


@pytest.mark.parametrize(
    "kinds", [{}, {0: "silent"}, {i: "silent" for i in range(CLIENTS)}, {1: "garbage", 2: "floats", 3: "silent"}]
)
def test_whoever_drops_out_the_noise_is_that_of_the_least_number(kinds):
    """And who answers is counted once, clipped; 400 numbers show the standard deviation to 10 %."""
    strategy, weights = trained(CLIENTS, kinds)
    answered = CLIENTS - len(kinds)
    assert strategy.raw_round.accepted == answered
    noise = CLIENTS * weights - answered * 0.5 / math.sqrt(SIZE)
    assert noise.std() == pytest.approx(1.5 * 0.5, rel=0.1) and abs(noise.mean()) < 5 * 0.75 / math.sqrt(SIZE)
    assert strategy.spent().epsilon == strategy.plan.guarantee().epsilon < 20


def test_more_shares_than_needed_are_more_noise_and_a_server_that_adds_none_is_seen(monkeypatch):
    few = trained(3, {})[1]
    assert CLIENTS * few.std() == pytest.approx(1.5 * 0.5 * math.sqrt(CLIENTS / 3), rel=0.1)
    monkeypatch.setattr(shares, "discrete_gaussian", lambda std, size, draw: np.zeros(size, np.int64))
    silent = trained(CLIENTS, {i: "silent" for i in range(CLIENTS)})[1]
    assert not silent.any()  # the test above would have failed


def test_what_the_theorem_does_not_speak_of_is_refused():
    with pytest.raises(NoTheorem, match="zero_out"):
        DPFedAvg(FedAvg(), plan(3, relation="add_remove"), seed=0)
    with pytest.raises(ArgumentError, match="Flat"):
        DPFedAvg(FedAvg(), plan(3, clip=Adaptive(0.5, batch_size=CLIENTS, count_noise=2.0)), seed=0)


def test_a_plan_with_shares_is_calibrated_and_written_down_as_any_other():
    made = plan(3, rounds=4, noise_multiplier=None, epsilon=4.0)
    assert 3.9 < made.guarantee().epsilon <= 4.0 and Plan.from_json(made.to_json()) == made
