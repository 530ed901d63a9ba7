"""Laws that every accountant keeps, and planted defects that the conformance check must find."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.accounting import RDP, ZCDP, Basic, delta, epsilon, epsilon_interval
from hushgrad.accounting.api import accountant_of, accountants
from hushgrad.accounting.base import Accountant, Loss
from hushgrad.accounting.gdp import GDPLoss
from hushgrad.accounting.rdp import RDPLoss
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import (
    ApproxDP,
    Compose,
    CyclicPoisson,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    MinSep,
    NonPrivate,
    Once,
    PureDP,
    RandomizedResponse,
    Relation,
    Sampled,
)
from hushgrad.testing.accountants import EVENTS, check_accountant

NAMES = sorted(accountants())
SAMPLE = PureDP(1.0).sampled(rate=0.1)


def knows(name: str, event: Event, relation: Relation = Relation.ADD_REMOVE) -> bool:
    try:
        accountant_of(name).loss(event, relation)
    except NoTheorem:
        return False
    return True


def test_what_is_known() -> None:
    assert {name for name in NAMES if knows(name, Gaussian(1.0))} >= {"advanced", "basic", "gdp", "pld", "rdp", "zcdp"}
    assert {name for name in NAMES if knows(name, PureDP(1.0))} >= {"advanced", "basic", "optimal", "pld", "rdp", "zcdp"}
    samples = {name for name in NAMES if knows(name, SAMPLE, Relation.REPLACE_ONE)}
    assert samples >= {"advanced", "basic", "optimal", "pld", "rdp"} and not samples & {"gdp", "zcdp"}


@pytest.mark.parametrize("name", NAMES)
def test_every_accountant_conforms(name: str) -> None:
    check_accountant(accountant_of(name))


# Planted defects: each is a real accountant with one fault ------------------------------------------------------------


def _copy_leaves(of: type[Accountant], to: type[Accountant]) -> None:
    to._leaves.update(of._leaves)


class ForgetsTheCount(Accountant):
    name = "forgets the count"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        return RDP().total([(loss, 1) for loss, _ in parts])


class UnderReports(Accountant):
    name = "under-reports"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        loss = RDP().total(parts)
        assert isinstance(loss, RDPLoss)
        return RDPLoss(tuple((lambda a, c=c: 0.8 * c(a), n) for c, n in loss.curves), loss.revealed)


class CentralLimitGuess(Accountant):
    name = "central limit theorem"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        return GDPLoss(math.fsum(loss.mu_squared * n for loss, n in parts))  # type: ignore[attr-defined]


@CentralLimitGuess.analyses(Gaussian)
def _plain(event: Gaussian, relation: Relation) -> Loss:
    return GDPLoss((relation.contributions / event.noise_multiplier) ** 2)


@CentralLimitGuess.analyses(Sampled)
def _guess(event: Sampled, relation: Relation) -> Loss:
    if not isinstance(event.of, Gaussian) or isinstance(event.how, FixedSize):
        raise NoTheorem("only Gaussians")
    return GDPLoss(event.how.rate**2 * math.expm1(event.of.noise_multiplier**-2))  # type: ignore[attr-defined]


class GuessesTheUnknown(Accountant):
    name = "guesses the unknown"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        return Basic().total(parts)

    def _leaf(self, event: Event, relation: Relation) -> Loss:
        try:
            return Basic()._leaf(event, relation)
        except NoTheorem:
            return Basic()._leaf(PureDP(1.0), relation)


class ForgetsTheRelation(Accountant):
    name = "forgets the relation"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        return ZCDP().total(parts)


@ForgetsTheRelation.analyses(Gaussian)
def _swapped(event: Gaussian, relation: Relation) -> Loss:
    swapped = Relation.REPLACE_ONE if relation is Relation.ZERO_OUT else Relation.ADD_REMOVE
    return ZCDP()._leaf(event, swapped)


_copy_leaves(RDP, ForgetsTheCount)
_copy_leaves(RDP, UnderReports)


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (ForgetsTheCount, "forgot the count"),
        (UnderReports, "below the truth"),
        (CentralLimitGuess, "below the truth"),
        (GuessesTheUnknown, "cannot know"),
        (ForgetsTheRelation, "zero-out"),
    ],
)
def test_planted_defects_are_found(defect: type[Accountant], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_accountant(defect())


# Laws by hypothesis -----------------------------------------------------------------------------------------------------

noise = st.floats(0.4, 50.0)
rates = st.floats(1e-4, 0.9)
deltas = st.floats(-12.0, -2.0).map(lambda x: 10.0**x)
leaves = st.one_of(
    noise.map(Gaussian),
    st.floats(0.5, 50.0).map(Laplace),
    st.floats(0.0, 2.0).map(PureDP),
    st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1e-6, allow_subnormal=False)).map(lambda x: ApproxDP(*x)),
    st.tuples(st.floats(0.5, 20.0), st.integers(1, 3)).map(lambda x: DiscreteLaplace(*x)),
    st.tuples(noise, rates).map(lambda x: Gaussian(x[0]).sampled(rate=x[1])),
    st.tuples(st.floats(0.05, 2.0), rates).map(lambda x: PureDP(x[0]).sampled(rate=x[1])),
)
CLASSICAL = [name for name in NAMES if name != "pld"]


@pytest.mark.parametrize("name", CLASSICAL)
@given(event=leaves, times=st.integers(1, 30), delta_=deltas)
@settings(max_examples=15, deadline=None)
def test_repeating_is_listing(name: str, event: Event, times: int, delta_: float) -> None:
    try:
        repeated = epsilon(event * times, delta=delta_, accountant=name)
    except NoTheorem:
        return
    assert epsilon(Compose([event] * times), delta=delta_, accountant=name) == pytest.approx(repeated, rel=1e-9)


@pytest.mark.parametrize("name", CLASSICAL)
@given(event=leaves, first=deltas, second=deltas)
@settings(max_examples=15, deadline=None)
def test_more_delta_never_costs_epsilon(name: str, event: Event, first: float, second: float) -> None:
    small, large = sorted((first, second))
    try:
        high = epsilon(event * 3, delta=small, accountant=name)
    except NoTheorem:
        return
    assert epsilon(event * 3, delta=large, accountant=name) <= high * (1 + 1e-7)


@pytest.mark.parametrize("name", ["rdp", "basic", "advanced"])
@given(sigma=noise, more=st.floats(1.0, 3.0), rate=rates, larger=st.floats(1.0, 4.0), steps=st.integers(1, 2000))
@settings(max_examples=15, deadline=None)
def test_monotone_in_noise_rate_and_steps(name: str, sigma: float, more: float, rate: float, larger: float, steps: int) -> None:
    def cost(s: float, q: float, n: int) -> float:
        return epsilon(Gaussian(s).sampled(rate=q) * n, delta=1e-6, accountant=name)

    here = cost(sigma, rate, steps)
    assert cost(sigma * more, rate, steps) <= here * (1 + 1e-6)
    assert cost(sigma, min(1.0, rate * larger), steps) >= here * (1 - 1e-6)
    assert cost(sigma, rate, steps + 5) >= here * (1 - 1e-6)


@given(event=leaves, times=st.integers(1, 40), delta_=deltas)
@settings(max_examples=40, deadline=None)
def test_the_better_theorem_is_never_above(event: Event, times: int, delta_: float) -> None:
    def cost(name: str) -> float:
        try:
            return epsilon(event * times, delta=delta_, accountant=name)
        except NoTheorem:
            return math.nan

    basic, advanced, optimal = cost("basic"), cost("advanced"), cost("optimal")
    assert not advanced > basic * (1 + 1e-9)
    assert not optimal > advanced * (1 + 1e-6)


@given(event=leaves, times=st.integers(1, 40), delta_=st.floats(-9.0, -3.0).map(lambda x: 10.0**x))
@settings(max_examples=25, deadline=None)
def test_pld_is_never_above_the_others(event: Event, times: int, delta_: float) -> None:
    best = epsilon(event * times, delta=delta_, accountant="pld")
    for name in CLASSICAL:
        try:
            other = epsilon(event * times, delta=delta_, accountant=name)
        except NoTheorem:
            continue
        assert best <= other * (1 + 2e-4) + 1e-9, name


@pytest.mark.parametrize("name", NAMES)
def test_sampling_at_rate_one_is_not_sampling(name: str) -> None:
    for event in (Gaussian(2.0), PureDP(0.3), Laplace(2.0)):
        try:
            plain = epsilon(event * 5, delta=1e-6, accountant=name)
        except NoTheorem:
            continue
        assert epsilon(event.sampled(rate=1.0) * 5, delta=1e-6, accountant=name) == plain
        assert epsilon(Sampled(Everyone(), event) * 5, delta=1e-6, accountant=name) == plain


@pytest.mark.parametrize("name", NAMES)
def test_participation_without_randomness_is_counted(name: str) -> None:
    event = PureDP(0.3) if name == "optimal" else Gaussian(2.0)
    once = epsilon(event, delta=1e-6, accountant=name)
    assert epsilon(Sampled(Once(), event), delta=1e-6, accountant=name) == once
    four = epsilon(event * 4, delta=1e-6, accountant=name)
    assert epsilon(Sampled(MinSep(gap=5, times=4), event), delta=1e-6, accountant=name) == four


def test_a_cycle_of_cyclic_poisson_is_one_poisson_step() -> None:
    step = Gaussian(1.3).sampled(rate=0.2) * 10
    cycle = Sampled(CyclicPoisson(period=7, rate=0.2), Gaussian(1.3)) * 10
    assert epsilon(cycle, delta=1e-6, accountant="rdp") == epsilon(step, delta=1e-6, accountant="rdp")


@pytest.mark.parametrize("name", CLASSICAL)
def test_relations_are_never_mixed(name: str) -> None:
    """Randomised response and fixed-size samples have no epsilon under add/remove; nobody makes one up."""
    for event in (RandomizedResponse(0.5), Sampled(FixedSize(dataset_size=100, size=10), PureDP(1.0))):
        with pytest.raises(NoTheorem):
            epsilon(event, delta=1e-6, accountant=name)
    if knows(name, SAMPLE, Relation.REPLACE_ONE):  # a mechanism may show whom it was given, and then nothing is amplified
        assert 0.999 < epsilon(SAMPLE, delta=1e-6, accountant=name, relation="replace_one") < 1.001


@pytest.mark.parametrize("name", NAMES)
def test_no_privacy_stays_no_privacy(name: str) -> None:
    for known in (PureDP(0.1), Gaussian(1.0), Gaussian(0.0) * 2):
        for event in (NonPrivate() + known, known + NonPrivate().sampled(rate=1e-9)) if knows(name, known) else ():
            assert epsilon(event, delta=0.5, accountant=name) == math.inf
            assert delta(event, epsilon=100.0, accountant=name) == 1.0


def test_arguments_are_checked() -> None:
    for bad in (-0.1, 1.0, math.nan, "1e-5", True):
        with pytest.raises(ArgumentError, match="delta"):
            epsilon(Gaussian(1.0), delta=bad, accountant="gdp")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Did you mean 'rdp'"):
        epsilon(Gaussian(1.0), delta=1e-5, accountant="rpd")
    with pytest.raises(ArgumentError, match="event"):
        epsilon(1.0, delta=1e-5, accountant="gdp")  # type: ignore[arg-type]


def test_a_delta_of_zero_asks_for_pure_privacy() -> None:
    for name in ("basic", "advanced", "optimal", "rdp", "pld"):
        assert epsilon(PureDP(0.5) * 4, delta=0.0, accountant=name) == pytest.approx(2.0, rel=1e-9)
        assert epsilon(PureDP(0.1) * 1000, delta=0.0, accountant=name) >= 1000 * 0.1
    for name in ("basic", "zcdp", "rdp", "gdp", "pld", "advanced"):
        assert epsilon(Gaussian(1.0), delta=0.0, accountant=name) == math.inf
        assert epsilon(Gaussian(1.0), delta=1e-300, accountant=name) >= 36.0
    low, high = epsilon_interval(Laplace(2.0) * 3 + DiscreteLaplace(1.0, 2), delta=0.0)
    assert 3.5 * (1 - 1e-11) < low <= 3.5 <= high < 3.5 * (1 + 1e-11)
    for event in (DiscreteGaussian(2.0), DiscreteGaussian(2.0).sampled(rate=0.1) * 3, ApproxDP(1.0, 1e-9)):
        assert epsilon(event, delta=0.0) == math.inf and delta(event, epsilon=1e3) > 0.0


def test_accounting_imports_no_torch() -> None:
    script = "import sys, hushgrad.accounting as a; a.PLD().loss; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_conformance_events_cover_what_accountants_know() -> None:
    kinds = {type(event) for event in EVENTS}
    for name in CLASSICAL:
        assert set(type(accountant_of(name))._leaves) <= kinds, name
