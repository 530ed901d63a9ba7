"""Calibration, group privacy, trade-offs, filters and odometers."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr
from scipy.stats import binom

from hushgrad.accounting import (
    Filter,
    Odometer,
    attack,
    calibrate,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_rate,
    calibrate_steps,
    delta_curve,
    epsilon,
    epsilon_for_group,
    epsilon_interval,
    estimate,
    for_group,
    gaussian_epsilon,
    trade_off,
)
from hushgrad.accounting.calibration import certified_calibration
from hushgrad.accounting.calibration_target import likely_noise
from hushgrad.accounting.pld import PLD
from hushgrad.errors import ArgumentError, BudgetExceeded, NoTheorem
from hushgrad.events import (
    ZCDP,
    ApproxDP,
    Compose,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Everyone,
    Exponential,
    FixedSize,
    Gaussian,
    Laplace,
    NonPrivate,
    PureDP,
    RandomizedResponse,
    Relation,
    Sampled,
    TruncatedPoisson,
)
from hushgrad.guarantee import Guarantee

# Calibration ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gdp", "zcdp", "rdp", "basic"])
@given(target=st.floats(0.02, 50.0), exponent=st.floats(-9.0, -3.0), steps=st.integers(1, 500))
@settings(max_examples=8, deadline=None)
def test_calibrated_noise_meets_the_target_tightly(name: str, target: float, exponent: float, steps: int) -> None:
    delta = 10.0**exponent
    sigma = calibrate(lambda s: Gaussian(s) * steps, epsilon=target, delta=delta, accountant=name)
    assert epsilon(Gaussian(sigma) * steps, delta=delta, accountant=name) <= target
    assert epsilon(Gaussian(sigma * (1 - 1e-4)) * steps, delta=delta, accountant=name) > target


def test_calibration_goes_in_either_direction() -> None:
    rate = calibrate_rate(Gaussian(1.0), epsilon=1.0, delta=1e-5, steps=200, accountant="rdp")
    assert epsilon(Gaussian(1.0).sampled(rate=rate) * 200, delta=1e-5, accountant="rdp") <= 1.0
    assert epsilon(Gaussian(1.0).sampled(rate=rate * 1.0002) * 200, delta=1e-5, accountant="rdp") > 1.0
    assert calibrate_rate(Gaussian(1e4), epsilon=1.0, delta=1e-5, steps=200, accountant="rdp") == 1.0


@given(sigma=st.floats(2.0, 200.0), target=st.floats(0.1, 5.0))
@settings(max_examples=15, deadline=None)
def test_calibrated_steps_are_the_largest(sigma: float, target: float) -> None:
    steps = calibrate_steps(Gaussian(sigma), epsilon=target, delta=1e-6, accountant="gdp")
    assert steps == 0 or epsilon(Gaussian(sigma) * steps, delta=1e-6, accountant="gdp") <= target
    assert epsilon(Gaussian(sigma) * (steps + 1), delta=1e-6, accountant="gdp") > target


def test_calibrated_batch_is_the_largest() -> None:
    budget = {"epsilon": 2.0, "delta": 1e-6, "accountant": "rdp"}
    size = calibrate_batch_size(Gaussian(1.2), steps=500, dataset_size=10_000, **budget)  # type: ignore[arg-type]
    cost = [epsilon(Gaussian(1.2).sampled(rate=b / 10_000) * 500, delta=1e-6, accountant="rdp") for b in (size, size + 1)]
    assert cost[0] <= 2.0 < cost[1]
    assert calibrate_batch_size(Gaussian(0.1), steps=500, dataset_size=10, **budget) == 0  # type: ignore[arg-type]
    assert calibrate_batch_size(Gaussian(1e5), steps=5, dataset_size=10, **budget) == 10  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), [(0.1, 0.3, 0.5, 3), (1.0, 0.5, 1.0, 1), (1.0, 5e-4, 1e-3, 1)])
def test_calibration_crosses_what_costs_nothing(target: float, delta: float, rate: float, steps: int) -> None:
    """With much noise epsilon is exactly 0 here: it gives the search no direction, and its end is a jump of the estimate."""
    sigma = calibrate_noise(epsilon=target, delta=delta, rate=rate, steps=steps)
    run = [Gaussian(s).sampled(rate=rate) * steps for s in (sigma, 0.999 * sigma)]
    assert epsilon(run[0], delta=delta) <= target < epsilon(run[1], delta=delta)


def test_no_noise_admits_no_steps() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibrate_steps(Gaussian(0.0), epsilon=1.0, delta=1e-5) == 0
        with pytest.raises(ArgumentError, match="to contain a value that meets"):
            calibrate_rate(Gaussian(0.0), epsilon=1.0, delta=1e-5, steps=10)


def test_unreachable_targets_are_refused() -> None:
    with pytest.raises(ArgumentError, match="bracket"):
        calibrate(lambda s: Gaussian(s), epsilon=0.1, delta=1e-5, accountant="gdp", bracket=(0.5, 2.0))
    with pytest.raises(ArgumentError, match=r"least that is reachable is epsilon=0\.99"):
        calibrate(lambda s: PureDP(1.0) + Gaussian(s), epsilon=0.5, delta=1e-5, accountant="rdp")
    assert all(
        0 < likely_noise(huge, 1e-5, 100, 0.01, "add_remove") < 1 for huge in (1e155, 1e308)
    )  # the guess does not overflow
    with pytest.raises(ArgumentError, match="epsilon"):
        calibrate_noise(epsilon=0.0, delta=1e-5, accountant="gdp")
    once = calibrate_noise(epsilon=1.0, delta=1e-5, accountant="gdp")
    assert once == calibrate_noise(epsilon=1.0, delta=1e-5, accountant="gdp", steps=1, rate=1.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tolerance": 0.6}, "tolerance=0.6"),
        ({"tolerance": 0.9e-9}, "tolerance=9e-10"),
        ({"bracket": (1.0,)}, "two ends"),
        ({"bracket": (1.0, 2.0, 9.0)}, "two ends"),
        ({"bracket": (0.0, 9.0)}, "greater than 0"),
    ],
)
def test_a_calibration_has_a_tolerance_and_two_ends(wrong, words):
    with pytest.raises(ArgumentError, match=words):
        calibrate(Gaussian, epsilon=1.0, delta=1e-5, accountant="gdp", **wrong)


def test_the_ends_of_a_calibration_may_come_in_any_order():
    found = [calibrate(Gaussian, epsilon=1.0, delta=1e-5, accountant="gdp", bracket=ends) for ends in ((1.0, 9.0), (9.0, 1.0))]
    assert found[0] == found[1] and 3.730 < found[0] < 3.732
    enough = certified_calibration(Gaussian, epsilon=100.0, delta=1e-5, accountant="gdp", bracket=(50.0, 90.0))
    assert (enough.value, enough.neighbour, enough.neighbour_epsilon) == (50.0, None, 0.0)  # nothing less was asked for
    loose = calibrate(Gaussian, epsilon=1.0, delta=1e-5, accountant="gdp", tolerance=0.4, start=50.0)
    assert 3.730 < loose < 3.732 * 2


# (rate, steps, epsilon, delta, sigma): contour quadrature and root finding.
CALIBRATED = [
    (256 / 60_000, 14_040, 1.0, 1e-5, 2.0234765822418277),
    (0.08, 2500, 3.0, 1e-5, 5.634948062189396),
    (0.004, 3000, 8.0, 1e-5, 0.5293670269609536),
    (1.0, 1000, 1.0, 1e-6, 133.59607673103446),
]


@pytest.mark.parametrize(("rate", "steps", "target", "delta", "sigma"), CALIBRATED)
def test_calibration_ends_certified_and_close_to_the_reference(
    rate: float, steps: int, target: float, delta: float, sigma: float
) -> None:
    found = calibrate_noise(epsilon=target, delta=delta, steps=steps, rate=rate)
    assert sigma * (1 - 1e-8) <= found <= sigma * (1 + 1e-4)
    assert epsilon(Gaussian(found).sampled(rate=rate) * steps, delta=delta) <= target


def test_steps_are_calibrated_on_the_certified_bound() -> None:
    step = Gaussian(1.0).sampled(rate=0.01)
    steps = calibrate_steps(step, epsilon=2.0, delta=1e-5)
    assert epsilon(step * steps, delta=1e-5) <= 2.0
    assert estimate(step * (steps + max(2, steps // 2000)), delta=1e-5).epsilon > 2.0


def test_an_interval_contains_the_truth() -> None:
    lower, upper = epsilon_interval(Gaussian(1.0), delta=1e-5)
    assert lower <= gaussian_epsilon(1.0, 1e-5) <= upper <= lower * (1 + 2e-4)


def test_one_sided_accountants_give_no_interval() -> None:
    with pytest.raises(NoTheorem, match="above only"):
        epsilon_interval(Gaussian(1.0), delta=1e-5, accountant="rdp")
    assert epsilon_interval(NonPrivate(), delta=1e-5, accountant="rdp") == (math.inf, math.inf)
    assert epsilon_interval(Compose(()), delta=1e-5, accountant="rdp") == (0.0, 0.0)


# Groups -------------------------------------------------------------------------------------------------------------------

GROUPED: list[Event] = [Gaussian(3.0) * 4, Laplace(5.0), PureDP(0.2) * 3, ZCDP(0.1), DiscreteGaussian(5.0)]


@pytest.mark.parametrize("event", [*GROUPED, ApproxDP(0.1, 1e-9), Gaussian(1.0).sampled(rate=0.1)])
def test_a_group_of_one_changes_nothing(event: Event) -> None:
    assert for_group(event, 1) == event
    assert epsilon_for_group(event, 1, delta=1e-6, accountant="rdp") == epsilon(event, delta=1e-6, accountant="rdp")


@pytest.mark.parametrize("event", GROUPED)
@pytest.mark.parametrize("size", [2, 5])
def test_the_groups_own_event_is_never_above_the_general_theorem(event: Event, size: int) -> None:
    """And never below the single record's epsilon."""
    own = epsilon_for_group(event, size, delta=1e-6, accountant="rdp")
    best = math.inf
    for exponent in np.linspace(-6, -30, 100):
        single = Guarantee(
            epsilon=epsilon(event, delta=10**exponent, accountant="rdp"), delta=10**exponent, event=event, accountant="rdp"
        )
        group = single.for_group(size)
        best = min(best, group.epsilon if group.delta <= 1e-6 else math.inf)
    assert epsilon(event, delta=1e-6, accountant="rdp") <= own <= best * (1 + 1e-9)


def test_a_sampled_group_is_a_mixture_between_its_neighbours() -> None:
    """K records at rate q: at least one record at rate q, at most all k together at rate 1 - (1 - q)^k."""
    q, k, sigma = 0.02, 3, 4.0
    own = epsilon_for_group(Gaussian(sigma).sampled(rate=q) * 100, k, delta=1e-6, accountant="rdp")
    together = epsilon(Gaussian(sigma / k).sampled(rate=1 - (1 - q) ** k) * 100, delta=1e-6, accountant="rdp")
    alone = epsilon(Gaussian(sigma).sampled(rate=q) * 100, delta=1e-6, accountant="rdp")
    assert 1.5 * alone < own < together


def test_a_group_keeps_what_the_event_says_of_itself() -> None:
    assert for_group(DiscreteLaplace(2.0, vector=True), 3) == DiscreteLaplace(2.0, 3, vector=True)
    assert for_group(Laplace(3.0, scalar=True), 3) == Laplace(1.0, scalar=True)
    for kind in (PureDP, Exponential):
        assert for_group(kind(0.5, absent="nothing"), 2) == kind(1.0, absent="nothing")
    assert for_group(Sampled(Everyone(), Gaussian(2.0)), 2) == Gaussian(1.0)


def test_a_group_that_changes_a_public_number_of_records_has_no_theorem() -> None:
    """One record, or three of which two are drawn: with -1 against -1, 1 and 1 the sum is 3 away in a third of all cases, not 2."""
    event = Sampled(TruncatedPoisson(rate=1.0, dataset_size=1, size=2), Gaussian(1.0))
    delta, chain = 1e-100, 45.3815525537115  # the epsilon that a chain of two steps, each a Gaussian at distance 1, would allow
    at = np.linspace(1.0, 40.0, 2000)
    far, near = log_ndtr(3 - at), log_ndtr(-at)
    share = 3 * np.exp(np.minimum(0.0, chain + near - far))
    attained = far - math.log(3) + np.log1p(-np.minimum(share, 0.999))
    assert attained[share < 0.999].max() > math.log(delta)  # is not enough
    for chained in (event, event * 3, event + Gaussian(1.0)):
        with pytest.raises(NoTheorem, match="public number"):
            epsilon_for_group(chained, 2, delta=delta)
        with pytest.raises(NoTheorem, match="public number"):
            Guarantee(epsilon=1.0, delta=1e-6, accountant="pld", event=chained).for_group(2)
        assert math.isfinite(epsilon_for_group(chained, 2, delta=1e-6, relation="zero_out"))
        assert epsilon_for_group(chained, 1, delta=1e-6) == epsilon(chained, delta=1e-6)


def test_a_large_sampled_group_is_answered_too() -> None:
    """Rare numbers of participants count as larger ones; binomial coefficients beyond all doubles are no obstacle."""
    one = Gaussian(200.0).sampled(rate=0.01) * 10
    answers = [epsilon_for_group(one, size, delta=1e-5) for size in (100, 101, 2000)]
    assert answers[0] < answers[1] < answers[0] * 1.03
    assert epsilon(Gaussian(10.0) * 10, delta=1e-5) < answers[2] < epsilon(Gaussian(5.0) * 10, delta=1e-5)  # 20 to 40 take part
    assert for_group(Gaussian(2.0).sampled(rate=1.0), 3) == for_group(Gaussian(2.0), 3)


@pytest.mark.parametrize(("size", "rate"), [(2, 0.3), (150, 1e-3), (400, 0.5), (10**6, 1e-5)])
def test_how_many_of_a_group_take_part_is_never_understated(size: int, rate: float) -> None:
    """Weights whose upper tails are at least those of the binomial distribution: more participants cost more."""
    mixture = for_group(Gaussian(1.0).sampled(rate=rate), size)
    counts, weights = np.array(mixture.sensitivities), np.array(mixture.probabilities)
    assert weights.sum() == pytest.approx(1, abs=1e-12) and len(counts) <= 1100
    least = np.concatenate([[0.0], counts[:-1] + 1])  # of a cell, which counts as its largest number
    tails, truth = np.cumsum(weights[::-1])[::-1], binom.sf(least - 1, size, rate)
    assert np.all(tails >= truth * (1 - 1e-13) - 1e-16) and np.all(tails[truth > 1e-30] <= truth[truth > 1e-30] * (1 + 1e-8))


def test_every_group_is_answered() -> None:
    """Where a group's event has numbers that no event can have, the general theorem answers, and not an error."""
    assert epsilon_for_group(Gaussian(1e-100), 2, delta=1e-6) == math.inf
    assert epsilon_for_group(Laplace(1e-100), 2, delta=1e-6) == pytest.approx(2e100)
    assert epsilon_for_group(PureDP(1e308), 10, delta=1e-6) == math.inf
    assert epsilon_for_group(DiscreteLaplace(1.0, 3), 2**62, delta=1e-6) == pytest.approx(3 * 2.0**62)
    assert epsilon_for_group(RandomizedResponse(0.5) * 4, 2**62, delta=1e-6, relation="zero_out") == pytest.approx(
        4 * 2.0**62 * math.log(3)
    )
    fixed = Sampled(FixedSize(dataset_size=100, size=10), Gaussian(5.0))
    assert epsilon_for_group(fixed, 3, delta=1e-300, relation="replace_one") == math.inf  # d would leave the range of doubles
    assert epsilon_for_group(Gaussian(1e7).sampled(rate=0.5), 10**15, delta=1e-6) == math.inf


def test_groups_without_an_event_fall_back_to_the_general_theorem() -> None:
    event = Sampled(FixedSize(dataset_size=100, size=5), Gaussian(4.0))
    with pytest.raises(NoTheorem):
        for_group(event, 2)
    both = epsilon_for_group(event, 2, delta=1e-6, accountant="rdp", relation="replace_one")
    assert both > 2 * epsilon(event, delta=1e-6, accountant="rdp", relation="replace_one")
    assert for_group(RandomizedResponse(0.5) + NonPrivate(), 2) == Compose([RandomizedResponse(0.5) * 2, NonPrivate()])


# Trade-offs ---------------------------------------------------------------------------------------------------------------


@given(sigma=st.floats(0.5, 20.0), times=st.integers(1, 20))
@settings(max_examples=15, deadline=None)
def test_trade_off_is_a_trade_off_function(sigma: float, times: int) -> None:
    alphas = [0.0, 1e-4, 0.01, 0.1, 0.5, 0.9, 1.0]
    misses = trade_off(Gaussian(sigma) * times, alphas, accountant="gdp", points=60)
    assert all(0 <= f <= 1 - a + 1e-12 for a, f in zip(alphas, misses, strict=True))
    assert all(a >= b for a, b in pairwise(misses))


def test_attack_in_plain_words() -> None:
    words = str(attack(Gaussian(1.0), accountant="gdp", false_alarms=0.05))
    assert "69.15%" in words and "5.00% false alarms" in words and "25.96%" in words  # Phi(1/2), Phi(Phi^-1(0.05) + 1)
    nothing_hidden = attack(NonPrivate(), accountant="gdp")
    assert nothing_hidden.accuracy == 1.0 and nothing_hidden.detections == 1.0


def test_delta_curve_falls() -> None:
    curve = delta_curve(Gaussian(1.0) * 3, [0.0, 1.0, 3.0, 9.0], accountant="rdp")
    assert all(a > b for a, b in pairwise(curve))


# Filters and odometers ------------------------------------------------------------------------------------------------------


def _spend_all(budget: Filter, step: Event) -> int:
    steps = 0
    while budget.admits(step):
        budget.spend(step)
        steps += 1
    return steps


@pytest.mark.parametrize(("kind", "accountant"), [("gdp", "gdp"), ("zcdp", "zcdp"), ("rdp", "rdp")])
def test_filters_admit_about_what_fixed_composition_does_and_no_more(kind: str, accountant: str) -> None:
    step = Gaussian(30.0)
    steps = _spend_all(Filter(epsilon=1.0, delta=1e-6, kind=kind), step)
    fixed = calibrate_steps(step, epsilon=1.0, delta=1e-6, accountant=accountant)
    assert 0.9 * fixed <= steps <= fixed
    assert epsilon(step * steps, delta=1e-6, accountant="gdp") <= 1.0


def test_pure_filters() -> None:
    assert _spend_all(Filter(epsilon=1.0, delta=1e-6, kind="basic"), PureDP(0.1)) == 10
    many = _spend_all(Filter(epsilon=1.0, delta=1e-6, kind="advanced"), PureDP(0.005))
    squares = many * 0.005**2
    assert math.sqrt(2 * math.log(2e6) * squares) + squares / 2 <= 1.0
    assert many > 1.0 / 0.005  # more than basic composition admits
    assert _spend_all(Filter(epsilon=5.0, delta=1e-6, kind="basic"), ApproxDP(0.1, 4e-7)) == 2  # its deltas run out first


def test_a_refused_step_costs_nothing_and_smaller_ones_still_fit() -> None:
    budget = Filter(epsilon=1.0, delta=1e-6, kind="gdp")
    budget.spend(Gaussian(6.0))
    used = budget.used
    with pytest.raises(BudgetExceeded, match="not taken"):
        budget.spend(Gaussian(1.0))
    with pytest.raises(BudgetExceeded):
        budget.spend(NonPrivate())
    assert budget.used == used
    budget.spend(Gaussian(60.0))
    assert budget.used > used


def test_filters_refuse_what_their_theorem_does_not_cover() -> None:
    for kind, step in (
        ("gdp", Laplace(1.0)),
        ("advanced", Gaussian(1.0)),
        ("zcdp", ApproxDP(0.1, 1e-9)),
        ("rdp", ApproxDP(0.1, 1e-9)),
    ):
        with pytest.raises(NoTheorem):
            Filter(epsilon=1.0, delta=1e-6, kind=kind).spend(step)
    with pytest.raises(ArgumentError, match="order"):
        Filter(epsilon=1.0, delta=1e-6, kind="zcdp", order=3.0)
    with pytest.raises(ArgumentError, match="order"):
        Filter(epsilon=1.0, delta=1e-6, kind="rdp", order=2.0)


def test_odometer_is_above_fixed_composition_at_all_times() -> None:
    meter = Odometer(delta=1e-5)
    last = 0.0
    for step in range(1, 60):
        meter.spend(Gaussian(5.0))
        rho = step / 50
        assert meter.rho == pytest.approx(rho)
        fixed = rho + 2 * math.sqrt(rho * math.log(1e5))
        assert max(last, fixed) <= meter.epsilon() <= 1.6 * fixed
        last = meter.epsilon()
    before = meter.rho
    for _ in range(40):
        meter.spend(Gaussian(2e8))  # each less than the last digit of the sum
    assert meter.rho > before
    meter.spend(NonPrivate())
    assert meter.epsilon() == math.inf


def test_odometer_bound_holds_for_an_adaptive_adversary() -> None:
    """Realised losses of Gaussian steps whose noise is chosen from past outputs stay below the odometer, at all times.

    2000 runs at delta = 0.05: with a valid bound more than 140 failures have probability below 1e-4 (binomial tail).
    """
    rng = np.random.default_rng(7)
    delta, failures = 0.05, 0
    for _ in range(2000):
        meter, loss, failed = Odometer(delta=delta), 0.0, False
        for _ in range(8):
            sigma = 2.0 if loss > 0 else 4.0  # spends more when it is winning
            meter.spend(Gaussian(sigma))
            loss += rng.normal(1 / (2 * sigma**2), 1 / sigma)
            failed = failed or loss > meter.epsilon()
        failures += failed
    assert failures <= 140


@pytest.mark.parametrize(
    "event",
    [
        Gaussian(1.0).sampled(rate=0.125) * 10,
        Gaussian(0.8).sampled(rate=0.004) * 2000,
        Laplace(2.0) * 30,
        Compose((Gaussian(1.0).sampled(rate=0.01) * 100, Laplace(3.0) * 4)),
    ],
    ids=str,
)
def test_a_curve_of_deltas_is_certified_and_as_sharp_as_single_questions(event):
    loss = PLD().loss(event, Relation.ADD_REMOVE)
    epsilons = [loss.epsilon(1e-8) * k / 12 for k in range(13)]
    for asked, swept in zip(epsilons, loss.deltas(epsilons), strict=True):
        low, high = loss.delta_interval(asked)
        assert low <= swept <= high * 1.003
