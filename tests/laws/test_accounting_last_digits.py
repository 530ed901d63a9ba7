"""Where the last digit decides: what is revealed outright, and the largest loss, against exact rational numbers and 60 digits."""

from __future__ import annotations

import math
import random
import re
from fractions import Fraction

import mpmath
import pytest

from hushgrad.accounting import Attack, delta, epsilon
from hushgrad.budget.pricing import advice, fits, scaled
from hushgrad.budget.values import Dataset
from hushgrad.events import ApproxDP, Compose, DiscreteLaplace, Event, Gaussian, Laplace, PureDP, RandomizedResponse

STATEMENTS = ("pld", "rdp", "zcdp", "optimal", "advanced", "basic")


def _just_below(exact: Fraction) -> float:
    found = float(exact)
    while Fraction(found) >= exact:
        found = math.nextafter(found, 0.0)
    return found


@pytest.mark.parametrize("accountant", STATEMENTS)
def test_less_delta_than_is_revealed_outright_buys_nothing(accountant: str) -> None:
    """N mechanisms reveal everything with probability 1 - (1 - d)^n, exactly: below it there is no epsilon, were it by one digit."""
    rng = random.Random(20)
    cases = [(1e-6, 1), (1e-6, 2), (1e-5, 7), (1e-17, 3), (0.1, 3)] + [
        (10 ** rng.uniform(-30, -1), rng.randint(1, 30)) for _ in range(8)
    ]
    for d, n in cases:
        truth = 1 - (1 - Fraction(d)) ** n
        for event in (ApproxDP(1.0, d) * n, Compose([ApproxDP(1.0, d)] * (n - 1) + [ApproxDP(0.5, d)])):
            assert epsilon(event, delta=_just_below(truth), accountant=accountant) == math.inf
            assert Fraction(delta(event, epsilon=2.0 * n, accountant=accountant)) >= truth
            enough = epsilon(event, delta=float(truth) * (1 + 1e-12), accountant=accountant)
            assert enough <= n * (1 + 1e-9) or accountant == "zcdp"
    assert epsilon(ApproxDP(1.0, 1e-6), delta=1e-6, accountant=accountant) <= 1.0 + 1e-9 or accountant == "zcdp"


@pytest.mark.parametrize("accountant", ["pld", "rdp", "optimal", "advanced", "basic"])
def test_the_delta_that_a_sample_reveals_buys_an_epsilon_and_a_digit_less_does_not(accountant: str) -> None:
    """It was rounded up by 1e-12, so that half of a mechanism's delta had no epsilon on half of the records."""
    rng = random.Random(24)
    cases = [(0.5, 1e-6), (0.25, 1e-5), (0.1, 1e-6), *((rng.uniform(0.01, 0.99), 10 ** rng.uniform(-20, -2)) for _ in range(8))]
    for q, d in cases:
        event, truth = ApproxDP(1.0, d).sampled(rate=q), Fraction(q) * Fraction(d)
        least = math.nextafter(_just_below(truth), 1.0)
        assert epsilon(event, delta=_just_below(truth), accountant=accountant) == math.inf
        assert epsilon(event, delta=least, accountant=accountant) <= math.log1p(q * math.expm1(1.0)) * (1 + 1e-9)
        assert Fraction(delta(event, epsilon=1.0, accountant=accountant)) >= truth


def _largest(rng: random.Random) -> tuple[Event, mpmath.mpf, str]:
    """An event with a largest loss, that loss, and a relation."""
    kind = rng.choice(["laplace", "discrete", "response", "sampled"])
    if kind == "response":
        p, k = rng.uniform(0.01, 0.99), rng.randint(2, 5)
        return RandomizedResponse(p, k), mpmath.log1p((1 - mpmath.mpf(p)) * k / mpmath.mpf(p)), "replace_one"
    scale = rng.choice([3.0, 7.0, 49.0, 10 ** rng.uniform(-1, 2)])
    if kind == "discrete":
        return DiscreteLaplace(scale), 1 / mpmath.mpf(scale), "add_remove"
    if kind == "laplace":
        return Laplace(scale), 1 / mpmath.mpf(scale), "add_remove"
    q = rng.uniform(0.01, 0.9)
    return Laplace(scale).sampled(rate=q), mpmath.log1p(mpmath.mpf(q) * mpmath.expm1(1 / mpmath.mpf(scale))), "add_remove"


@pytest.mark.parametrize("accountant", ["pld", "rdp", "optimal", "basic"])
def test_delta_is_0_from_the_largest_loss_on_and_not_before(accountant: str) -> None:
    """Losses that no double is (a third) were rounded to the nearest one, and delta was 0 a digit too early."""
    rng = random.Random(21)
    with mpmath.workdps(60):
        for _ in range(24):
            event, largest, relation = _largest(rng)
            at = float(largest)
            while mpmath.mpf(at) >= largest:
                at = math.nextafter(at, 0.0)
            mass = mpmath.exp(-3 * largest - 5)  # less than what has the largest loss
            for below in (at, at * (1 - 1e-14), at * (1 - 2e-12)):
                truth = -mass * mpmath.expm1(mpmath.mpf(below) - largest) * 1e-3
                assert delta(event, epsilon=below, accountant=accountant, relation=relation) >= truth > 0
            assert delta(event, epsilon=at * (1 + 1e-11), accountant=accountant, relation=relation) == 0.0


def _responses(loss: str | mpmath.mpf, times: int, at: str | mpmath.mpf) -> mpmath.mpf:
    """The delta of equal randomised responses at an epsilon, both as they are written."""
    e, target = mpmath.mpf(loss), mpmath.mpf(at)
    lie = 1 / (1 + mpmath.exp(e))
    over = ((k, (times - 2 * k) * e - target) for k in range(times + 1))
    return mpmath.fsum(
        -mpmath.binomial(times, k) * lie**k * (1 - lie) ** (times - k) * mpmath.expm1(-x) for k, x in over if x > 0
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp", "optimal", "basic"])
def test_delta_a_digit_below_a_loss_is_not_less_than_that_digit_says(accountant: str) -> None:
    """Next to (n - 2k) epsilon a last digit is all that is left of a loss, and it was rounded before: `pld` said 1e-308 for 4e-18."""
    rng = random.Random(23)
    cases = [(0.3, 6, 0), (0.7, 3, 0), (0.3, 6, 1)] + [
        (rng.choice([0.1, 0.3, 0.7, 10 ** rng.uniform(-4, 1)]), n := rng.randint(1, 40), rng.choice([0, rng.randint(0, n // 2)]))
        for _ in range(20)
    ]
    with mpmath.workdps(60):
        for e, n, k in cases:
            loss = float((n - 2 * k) * Fraction(repr(e)))
            for at in (loss, math.nextafter(loss, 0.0), math.nextafter(math.nextafter(loss, 0.0), 0.0), loss * (1 - 1e-13)):
                truth = min(_responses(repr(e), n, repr(at)), _responses(mpmath.mpf(e), n, mpmath.mpf(at)))
                assert delta(PureDP(e) * n, epsilon=at, accountant=accountant) >= truth


def test_what_was_stated_holds_to_its_last_digit() -> None:
    for accountant in ("pld", "rdp", "optimal"):
        assert delta(PureDP(0.3), epsilon=0.3, accountant=accountant) == 0.0
        assert delta(PureDP(0.1) * 10, epsilon=1.0, accountant=accountant) == 0.0
        assert delta(PureDP(0.7) * 3, epsilon=math.nextafter(2.1, 0.0), accountant=accountant) > 0.0
        assert delta(Laplace(2.0), epsilon=0.5, accountant=accountant) == 0.0 or accountant == "optimal"


@pytest.mark.parametrize("sigma", [0.5, 0.06, 0.011])
def test_the_noise_that_is_said_to_fit_fits(sigma: float) -> None:
    """It is printed to three digits: factors of 12.34 were rounded to the nearest, so that what was read did not fit."""
    for target in (0.9, 1.1, 1.3):
        dataset = Dataset(name="people", epsilon=target, delta=1e-6, composition="gdp")
        said = re.search(r"with ([0-9.]+) times its noise", advice(dataset, (), Gaussian(sigma)))
        assert said is not None and fits(dataset, (scaled(Gaussian(sigma), float(said[1])),))


def test_an_attackers_accuracy_is_printed_rounded_up() -> None:
    rng = random.Random(22)
    for x in [
        0.5,
        1.0,
        0.5988,
        0.5 + 1e-14,
        *(rng.random() for _ in range(100)),
        *(rng.randint(0, 10**4) / 1e4 for _ in range(100)),
    ]:
        sentence = str(Attack(advantage=x, accuracy=x, false_alarms=0.01, detections=x))
        printed = [Fraction(word[:-1]) / 100 for word in re.findall(r"at most\s([0-9.]+%)", sentence)]
        assert len(printed) == 2 and all(Fraction(repr(x)) <= p < Fraction(repr(x)) + Fraction(1, 10**4) for p in printed)
