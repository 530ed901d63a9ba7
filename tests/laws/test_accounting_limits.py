"""The ends of the range of doubles: curves keep their digits, a contradiction is an error, and no defect becomes a looser number."""

from __future__ import annotations

import math
import random
import sys

import mpmath as mp
import numpy as np
import pytest

from hushgrad.accounting import (
    calibrate,
    calibrate_noise,
    calibrate_steps,
    delta,
    delta_curve,
    epsilon,
    epsilon_interval,
    gaussian_delta,
)
from hushgrad.accounting.api import loss_of
from hushgrad.accounting.bracketing import Bracket, crossing, largest_integer
from hushgrad.accounting.calibration import certified_calibration
from hushgrad.accounting.pld import loss as losses
from hushgrad.accounting.pld.bounds.compose import _discounted_tails
from hushgrad.accounting.pld.bounds.from_below import touch
from hushgrad.accounting.pld.profiles.curve import ACCURACY, Curve, GaussianCurve, Mirror
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove, PoissonReplace
from hushgrad.accounting.pld.search import epsilon_bounds
from hushgrad.errors import ArgumentError, Contradiction, NoTheorem, NumericalLimit
from hushgrad.events import (
    ApproxDP,
    DiscreteLaplace,
    Event,
    Exponential,
    Gaussian,
    GaussianMixture,
    Laplace,
    PureDP,
    RandomizedResponse,
)

EXTREMES = [
    (rate, mu, tail)
    for rate in (1e-8, 1e-3, 0.5, 0.99)
    for mu in (1e-14, 1e-7, 0.03, 2.0, 100.0)
    for tail in (1e-3, 1e-60, 1e-280)
]


def _replaced(rate: float, mu: float, eps: float) -> mp.mpf:
    """Delta of the replace-one pair with 120 digits, from the two normal distributions themselves."""
    with mp.workdps(120):
        q, m, x = mp.mpf(rate), mp.mpf(mu), mp.exp(mp.mpf(eps))
        c, half = q * mp.exp(-(m**2) / 2), (1 - q) * (x - 1)
        z = mp.log((half + mp.sqrt(half**2 + 4 * c**2 * x)) / (2 * c)) / m

        def tail(y: mp.mpf) -> mp.mpf:
            return mp.erfc(y / mp.sqrt(2)) / 2

        return q * (tail(z - m) - x * tail(z + m)) - half * tail(z)


@pytest.mark.parametrize(("rate", "mu", "tail"), EXTREMES)
def test_replace_one_keeps_its_digits(rate: float, mu: float, tail: float) -> None:
    curve = PoissonReplace(mu, rate)
    for eps in (curve.reach(tail)[1], 0.3 * curve.reach(tail)[1]):
        truth = _replaced(rate, mu, eps)
        if truth > 1e-295:
            assert abs(float(curve.right(np.array([eps]))[0][0] / truth) - 1) < ACCURACY


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("rate", "mu", "tail"), [case for case in EXTREMES if 0.01 < case[1] < 50])
def test_the_lower_profile_is_below_the_curve_down_to_the_smallest_masses(
    rate: float, mu: float, tail: float, mirrored: bool
) -> None:
    curve: Curve = PoissonRemove(GaussianCurve(mu), rate)
    curve = Mirror(curve) if mirrored else curve
    low, high = curve.reach(tail)
    made = touch(curve, max(high / 300, (high - low) / 20_000), tail, 1.0)
    if made is None:
        return
    at = np.linspace(0.0, made.losses[-1], 700)[:-1]
    profile = np.array([float(np.sum(made.p[made.losses > e] * -np.expm1(e - made.losses[made.losses > e]))) for e in at])
    assert np.all(profile <= curve.right(at)[0] * (1 + 1e-12))


def test_bounds_of_tiny_deltas_do_not_cross() -> None:
    rng = random.Random(5)
    event = Gaussian(2.7248227472050552).sampled(rate=0.2511650548209414) + Gaussian(0.15246069658734224).sampled(
        rate=0.11589181168353625
    )
    low, high = epsilon_interval(event, delta=2.674656905677141e-229)
    assert 230.4 < low <= high < 230.6
    for _ in range(6):
        parts = [Gaussian(10 ** rng.uniform(-1, 0.6)).sampled(rate=10 ** rng.uniform(-4, -0.1)) for _ in range(2)]
        low, high = epsilon_interval(
            parts[0] + parts[1], delta=10 ** rng.uniform(-290, -100), relation=rng.choice(["add_remove", "replace_one"])
        )
        assert low <= high  # a crossing raises


def test_a_contradiction_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = losses.epsilon_bound

    def wrong(*arguments: object, upper: bool, **options: object) -> epsilon_bounds.Answer:
        answer = real(*arguments, upper=upper, **options)  # type: ignore[arg-type]
        return answer if upper else epsilon_bounds.Answer(answer.epsilon * 1.001)

    monkeypatch.setattr(losses, "epsilon_bound", wrong)
    with pytest.raises(Contradiction, match="exclude each other"):
        epsilon_interval(Gaussian(1.1).sampled(rate=0.01) * 100, delta=1e-5)


@pytest.mark.parametrize("defect", [ValueError, OverflowError, FloatingPointError, ZeroDivisionError])
def test_a_defect_inside_a_bound_is_seen(defect: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise defect("operands could not be broadcast together")

    monkeypatch.setattr(epsilon_bounds, "compose", broken)
    for ask in (epsilon, epsilon_interval):
        with pytest.raises(defect):
            ask(Gaussian(1.1).sampled(rate=0.01) * 100, delta=1e-5)


def test_a_limit_of_doubles_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(*arguments: object, **options: object) -> None:
        raise NumericalLimit("Doubles do not reach this.")

    event = Gaussian(1.1).sampled(rate=0.01) * 100
    truth = epsilon(event, delta=1e-5)
    monkeypatch.setattr(epsilon_bounds, "compose", limited)
    assert truth <= epsilon(event, delta=1e-5) < math.inf


# Calibration ------------------------------------------------------------------------------------------------------------


def test_calibrations_end_with_their_certificate() -> None:
    rng = random.Random(11)
    questions = [(2.5, 7e-9, 0.0018, 430), (1.8, 3e-4, 0.02, 60)]  # where an estimate once led the search astray
    for _ in range(8):
        questions.append(
            (
                10 ** rng.uniform(-1.5, 1.3),
                10 ** rng.uniform(-12, -3),
                min(1.0, 10 ** rng.uniform(-4, 0.2)),
                int(10 ** rng.uniform(0, 4)),
            )
        )
    for target, tail, rate, steps in questions:
        found = certified_calibration(lambda s, q=rate, n=steps: Gaussian(s).sampled(rate=q) * n, epsilon=target, delta=tail)  # type: ignore[misc]
        assert found.neighbour == pytest.approx(found.value * (1 - 2e-5), rel=1e-12)
        asked = [epsilon(Gaussian(s).sampled(rate=rate) * steps, delta=tail) for s in (found.value, found.neighbour)]
        assert asked == [found.epsilon, found.neighbour_epsilon] and asked[0] <= target < asked[1]
        assert found.evaluations <= 60


@pytest.mark.parametrize("seed", range(20))
def test_a_search_on_a_jumping_bound_ends_on_both_sides_of_the_target(seed: int) -> None:
    rng = random.Random(seed)
    jumps = [(rng.uniform(-8, 8), rng.uniform(0, 3)) for _ in range(5)]
    infinite = rng.uniform(-9, -7)

    def g(u: float) -> float:
        return math.inf if u < infinite else -rng_slope * u + sum(size for place, size in jumps if u < place) - 2.0

    rng_slope = rng.choice([1e-3, 0.3, 2.0, 40.0])
    ask = Bracket(g)
    found, neighbour = crossing(ask, rng.uniform(-5, 5), (-14.0, 3000.0), 2e-5)
    assert neighbour is not None and neighbour == pytest.approx(found - 2e-5, abs=1e-12)
    assert g(found) <= 0 < g(neighbour)


def test_integers_end_with_their_neighbour() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        last, most = rng.randrange(0, 10**6), 10**6
        assert largest_integer(lambda n, last=last: math.log((n + 0.5) / (last + 1)), rng.randrange(1, 10**6), most) == last  # type: ignore[misc]
    step = Gaussian(1.0).sampled(rate=0.01)
    steps = calibrate_steps(step, epsilon=2.0, delta=1e-5)
    assert epsilon(step * steps, delta=1e-5) <= 2.0 < epsilon(step * (steps + 1), delta=1e-5)
    assert calibrate_steps(Gaussian(1e8), epsilon=1.0, delta=1e-6, accountant="gdp") == 10**8  # where the search ends


def test_what_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ArgumentError, match="least that is reachable is epsilon=1") as refusal:
        calibrate(lambda s: PureDP(1.0) + Gaussian(s), epsilon=0.5, delta=1e-9)
    assert "bracket" not in str(refusal.value)  # none was given


@pytest.mark.parametrize("accountant", ["pld", "rdp", "gdp", "zcdp", "basic", "advanced", "optimal"])
@pytest.mark.parametrize("event", [Gaussian(63.0), Gaussian(1e90), Gaussian(80.0) * 3, Gaussian(50.0).sampled(rate=1e-300)])
@pytest.mark.parametrize("at", [3.0, 1e300])
def test_a_delta_below_the_range_of_doubles_is_not_called_zero(event: Event, accountant: str, at: float) -> None:
    try:
        found = delta(event, epsilon=at, accountant=accountant)
    except NoTheorem:
        return  # this accountant does not know the event
    assert found >= sys.float_info.min
    assert delta_curve(event, [at], accountant=accountant)[0] >= sys.float_info.min
    assert gaussian_delta(1e-200, at) >= sys.float_info.min


def test_a_delta_is_zero_where_it_is() -> None:
    for event, at in [(Laplace(2.0), 0.5), (Laplace(2.0) * 3, 1.5), (PureDP(1.0) * 2000, 2000.0), (PureDP(0.3), 0.3)]:
        assert delta(event, epsilon=at) == 0.0
    assert delta(PureDP(1.0) * 2000, epsilon=1999.5) > 0  # e^-2626, which is no double


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 2.2e-308])
def test_a_delta_that_has_lost_its_digits_is_refused(tiny: float) -> None:
    for ask in (epsilon, epsilon_interval):
        with pytest.raises(ArgumentError, match="at least 2"):
            ask(Gaussian(1e10), delta=tiny)
    with pytest.raises(ArgumentError, match="at least"):
        ApproxDP(1.0, tiny)
    assert 37 < epsilon(Gaussian(1.0), delta=sys.float_info.min) < 39


def test_a_mixture_with_a_contribution_that_is_as_good_as_shown() -> None:
    """Rarer than delta it costs nothing: a bound from below that says otherwise is wrong. Lost digits are no bound."""
    for far in (30.0, 900.0, 1e8, 1e200, 1e308):
        event = GaussianMixture(noise_multiplier=1.0, sensitivities=(far, 0.0), probabilities=(1e-3, 1 - 1e-3))
        if far <= 1e3:
            assert epsilon_interval(event, delta=2.1e-3) == (0.0, 0.0)
        else:
            with pytest.raises(NoTheorem, match="as good as shown"):
                epsilon_interval(event, delta=2.1e-3)


@pytest.mark.parametrize("wanted", [1e-300, 1e-100, 1e300])
def test_noise_for_what_nobody_can_meet_is_refused(wanted: float) -> None:
    with pytest.raises(ArgumentError, match="epsilon"):
        calibrate_noise(epsilon=wanted, delta=1e-300, rate=0.5, steps=10, accountant="rdp")


@pytest.mark.parametrize("seed", range(30))
def test_the_delta_just_below_the_largest_loss_is_not_too_small(seed: int) -> None:
    """Delta = truth - e^eps lie, with 60 digits: there the last digits of epsilon decide."""
    rng = random.Random(seed)
    noise, categories = 10 ** rng.uniform(-9, -0.01), rng.choice([2, 3, 50])
    with mp.workdps(60):
        lie = mp.mpf(noise) / categories
        truth = 1 - mp.mpf(noise) + lie
        at = float(mp.log(truth / lie)) * (1 - 10 ** rng.uniform(-15, -3))
        exact = max(truth - mp.exp(mp.mpf(at)) * lie, 0)
        step = RandomizedResponse(noise, categories)
        for shown, event in ((1.0, step), (0.25, step.sampled(rate=0.25))):
            assert mp.mpf(delta(event, epsilon=at, relation="zero_out")) >= shown * exact
            low, high = loss_of(event, "pld", "zero_out").delta_interval(at)  # type: ignore[attr-defined]
            assert low <= shown * exact <= high


@pytest.mark.parametrize("rate", [2.3e-308, 1e-9, 0.1])
def test_a_sampled_mixture_is_a_mixture_for_every_accountant(rate: float) -> None:
    mixture = GaussianMixture(noise_multiplier=1.0, sensitivities=(0.0, 1.0), probabilities=(0.5, 0.5))
    plain = Gaussian(1.0).sampled(rate=rate / 2) if rate > 1e-300 else Gaussian(1.0).sampled(rate=rate)
    for accountant in ("pld", "rdp"):
        found = epsilon(mixture.sampled(rate=rate) * 3, delta=1e-9, accountant=accountant)
        assert found == pytest.approx(epsilon(plain * 3, delta=1e-9, accountant=accountant), rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("noise", [1e-100, 1e-250, 1e-300, 1e-310, 5e-324])
@pytest.mark.parametrize("categories", [2, 10**15])
@pytest.mark.parametrize("accountant", ["pld", "rdp", "basic", "optimal"])
def test_answers_that_are_nearly_always_true_cost_what_they_do(noise: float, categories: int, accountant: str) -> None:
    with mp.workdps(40):
        truth = float(mp.log1p((1 - mp.mpf(noise)) * categories / mp.mpf(noise)))
    for times in (1, 2):
        found = epsilon(RandomizedResponse(noise, categories) * times, delta=1e-9, relation="zero_out", accountant=accountant)
        assert times * truth - 1e-6 <= found <= times * truth * (1 + 1e-9)


def test_a_curve_that_is_not_a_number_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussianCurve, "delta", lambda curve, at: math.nan)
    assert epsilon_bounds.epsilon_bound([(GaussianCurve(1.0), 1)], 1e-5, 1e-4, upper=True).epsilon == math.inf
    assert epsilon_bounds.epsilon_bound([(GaussianCurve(1.0), 1)], 1e-5, 1e-4, upper=False).epsilon == 0.0


BEYOND = [
    (Gaussian(1.4) * 2 + Laplace(1e-100) * 10_000, "zero_out"),
    (Laplace(1e-100).sampled(rate=0.1) * 2, "add_remove"),
    (Laplace(1e-20).sampled(rate=0.1) * 2, "replace_one"),
    (Exponential(700.0) * 20, "zero_out"),
    (Exponential(1e8) * 2, "zero_out"),
    (PureDP(1e308) * 2, "add_remove"),
    (ApproxDP(1e8, 0.0) * 100, "add_remove"),
    (Laplace(0.9) * 200, "add_remove"),
    (PureDP(1e100) * 2 + Gaussian(1.0), "add_remove"),
    (Gaussian(1e-50).sampled(rate=0.1) * 2, "replace_one"),
]


@pytest.mark.parametrize(("event", "relation"), BEYOND)
@pytest.mark.filterwarnings("error")
def test_losses_beyond_every_grid_have_an_answer(event: Event, relation: str) -> None:
    low, high = epsilon_interval(event, delta=1e-7, relation=relation)
    assert 0 <= low <= high
    for at in (1.0, low, high):
        assert not math.isfinite(at) or 0 <= delta(event, epsilon=at, relation=relation) <= 1


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "at"), [(5.37e-7, 0.25, 10, 4.67e-6), (1e-6, 0.3, 12, 1e-5), (1e-5, 0.4, 2, 1e-5)]
)
def test_rare_large_losses_cost_no_more_than_basic_composition(rate: float, sigma: float, steps: int, at: float) -> None:
    """Delta near the probability to take part at all: the answer is far below the saddle point, which the first grid is made for."""
    event = Gaussian(sigma).sampled(rate=rate) * steps
    low, high = epsilon_interval(event, delta=at)
    assert low <= high <= 0.5 * epsilon(event, delta=at, accountant="basic")
    assert gaussian_delta(1 / sigma, 0.0) * rate * steps > at or low == 0


@pytest.mark.parametrize(
    ("event", "at"),
    [
        (PureDP(2.56e-5) + DiscreteLaplace(2.896).sampled(rate=1.895e-8) * 1_000_000, 4.15e-6),
        (Gaussian(2.99) + PureDP(1.1e-6).sampled(rate=0.0053) * 100, 1e-300),
    ],
)
def test_delta_and_epsilon_agree_where_the_numerics_end(event: Event, at: float) -> None:
    high = epsilon(event, delta=at, relation="replace_one")
    assert delta(event, epsilon=high, relation="replace_one") <= 2 * at
    assert delta_curve(event, [high], relation="replace_one")[0] <= 2 * at


@pytest.mark.parametrize("step", [0.5, 4.1, 10.0, 400.0])
def test_discounted_tails_of_any_step(step: float) -> None:
    weights = np.exp(np.random.default_rng(8).uniform(-300, 300, 700))
    direct = [float(np.sum(weights[i:] * np.exp(-step * np.arange(700 - i)))) for i in range(700)]
    np.testing.assert_allclose(_discounted_tails(weights, step), direct, rtol=1e-12)


def test_a_renyi_delta_just_below_the_largest_loss_is_not_too_small() -> None:
    """Orders of 1e10 multiply the rounding of a difference of two losses."""
    rng = random.Random(8)
    with mp.workdps(60):
        for _ in range(40):
            noise = 10 ** rng.uniform(-12, -0.1)
            lie = mp.mpf(noise) / 2
            truth = 1 - lie
            at = float(mp.log(truth / lie)) * (1 - 10 ** rng.uniform(-13, -3))
            exact = max(truth - mp.exp(mp.mpf(at)) * lie, 0)
            assert mp.mpf(delta(RandomizedResponse(noise), epsilon=at, relation="zero_out", accountant="rdp")) >= exact


def test_a_delta_that_is_told_can_be_asked() -> None:
    """Below the least double with all its digits a delta is rounded up to it: questions refuse smaller ones."""
    for name in ("pld", "rdp", "gdp", "basic"):
        told = delta(Gaussian(0.5), epsilon=77.6, accountant=name)
        assert told == 0 or told >= sys.float_info.min
        assert told == 0 or epsilon(Gaussian(0.5), delta=told, accountant=name) >= 0
    (told,) = delta_curve(Gaussian(0.5), [77.6], accountant="gdp")
    assert told >= sys.float_info.min


def test_a_rate_that_lost_its_digits_is_refused_and_the_least_other_one_is_not() -> None:
    with pytest.raises(ArgumentError, match="all its digits"):
        Gaussian(1.0).sampled(rate=5e-324)
    for relation in ("add_remove", "replace_one"):
        least = Gaussian(1.0).sampled(rate=sys.float_info.min) * 2
        assert epsilon_interval(least, delta=1e-300, relation=relation) == (0.0, 0.0)


@pytest.mark.parametrize("at", [2.0**63, 1e30, 1e300])
def test_delta_at_an_epsilon_beyond_a_machines_whole_numbers_is_a_number(at: float) -> None:
    assert 0.0 <= delta(Gaussian(1.0).sampled(rate=0.125) * 10, epsilon=at) < 1e-100
