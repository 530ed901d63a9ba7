"""Every mechanism of the room keeps its promises, and the check that says so rejects known defects of other libraries."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad import noise, testing
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import (
    BallsInBins,
    CyclicPoisson,
    Everyone,
    FixedSize,
    Gaussian,
    MinSep,
    Once,
    Poisson,
    Sampled,
    TruncatedPoisson,
)
from hushgrad.noise import (
    BLT,
    AntiPGD,
    Banded,
    BandedInverse,
    Dense,
    Independent,
    Nu,
    PrefixSums,
    SGDWorkload,
    Spectral,
    Toeplitz,
    Tree,
)
from hushgrad.noise.error import rmse_lower_bound
from hushgrad.noise.optimise_banded import optimise_banded
from hushgrad.noise.optimise_dense import lower_factor, optimise_dense
from hushgrad.noise.participation import Pattern, pattern_of
from hushgrad.noise.power_series import binomial, inverse, lower_toeplitz
from hushgrad.noise.sensitivity import gram_sensitivity, leftmost, toeplitz_sensitivity
from hushgrad.noise.streams import FilterStream
from hushgrad.testing.mechanisms import brute_force_sensitivity, check_mechanism

MIXED_SIGNS = np.tril(np.random.default_rng(0).normal(size=(12, 12))) + 3 * np.eye(12)

EXAMPLES = [mechanism for kind in testing.members(noise, noise.Mechanism).values() for mechanism in kind.examples()]


@pytest.mark.parametrize("mechanism", EXAMPLES, ids=lambda m: str(m)[:60])
def test_conformance(mechanism):
    check_mechanism(mechanism)


# Planted defects: each was found in a library that people use ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoCrossTerms(Toeplitz):
    """Adds the squared column norms of several participations and forgets their inner products."""

    def sensitivity(self, *, steps, participation):
        return float(np.sqrt(pattern_of(participation, steps).times) * np.linalg.norm(self.strategy_coefficients(steps)))


@dataclass(frozen=True)
class SignedSum(Dense):
    """Adds the entries of CᵀC with their signs: the worst record has signs of its own."""

    def sensitivity(self, *, steps, participation):
        X = self.strategy(steps).T @ self.strategy(steps)
        p = pattern_of(participation, steps)
        orders = [range(f, steps, p.gap)[: p.times] for f in range(p.gap)]
        return float(np.sqrt(max(X[np.ix_(o, o)].sum() for o in orders)))


@dataclass(frozen=True)
class WrongFactor(Dense):
    """Takes cholesky(X) for the C of X = CᵀC, with the sensitivity of X."""

    def strategy(self, steps):
        C = super().strategy(steps)
        return np.linalg.cholesky(C.T @ C)

    def sensitivity(self, *, steps, participation):
        C = Dense.strategy(self, steps)
        return gram_sensitivity(C.T @ C, pattern_of(participation, steps))


@dataclass(frozen=True, kw_only=True)
class LiteralNu(Nu):
    """The noise of beta_t = -t^(-3/2) (1-nu)^t with the sensitivity of the right series."""

    def noising_coefficients(self, steps):
        t = np.arange(1, steps)
        return np.r_[1.0, -(t**-1.5) * (1 - self.nu) ** t]


@dataclass(frozen=True, kw_only=True)
class LiteralNuWithItsInverse(LiteralNu):
    """The same, with its own C, but still the sensitivity of the right series."""

    def strategy_coefficients(self, steps):
        return inverse(self.noising_coefficients(steps), steps)

    def sensitivity(self, *, steps, participation):
        return toeplitz_sensitivity(binomial(-0.5, steps, 1 - self.nu), pattern_of(participation, steps))


@dataclass(frozen=True, kw_only=True)
class OffByOne(BandedInverse):
    """Streams the right filter of the wrong rows: z_{t+1} for z_t."""

    def stream(self, source, *, steps=None, memory=8):
        return FilterStream(source, np.r_[0.0, self.noising_coefficients(steps)][:steps].tolist(), steps=steps, memory=memory)


@dataclass(frozen=True, kw_only=True)
class EndlessStream(AntiPGD):
    """Runs past its last row."""

    def stream(self, source, *, steps=None):
        return FilterStream(source, [1.0, -self.damping], steps=steps + 1, memory=0)


@dataclass(frozen=True, kw_only=True)
class EagerAmplification(Banded):
    """Claims the amplification of cyclic Poisson sampling for any number of bands."""

    def _amplified(self, noise_multiplier, participation, steps):
        if isinstance(participation, CyclicPoisson):
            return Gaussian(noise_multiplier).sampled(rate=participation.rate) * -(-steps // participation.period)
        return None


@dataclass(frozen=True, kw_only=True)
class WrongRowNorm(Nu):
    """Reports the norm of the whole filter for every row."""

    def row_std(self, step, *, steps):
        return float(np.linalg.norm(self.noising_coefficients(steps)))


@dataclass(frozen=True, kw_only=True)
class CheapBeginning(Toeplitz):
    """Right for the whole run, too low for its first steps."""

    def sensitivity(self, *, steps, participation):
        return super().sensitivity(steps=steps, participation=participation) * (1.0 if steps == 12 else 0.9)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (NoCrossTerms(), "sensitivity"),
        (SignedSum(MIXED_SIGNS), "sensitivity"),
        (WrongFactor(lower_factor(np.minimum.outer(np.arange(12), np.arange(12)) + 1.0 + np.eye(12))), "identity|sensitivity"),
        (LiteralNu(nu=0.1), "identity"),
        (LiteralNuWithItsInverse(nu=0.1), "sensitivity"),
        (OffByOne(bands=4), "live rows"),
        (EndlessStream(damping=0.5), "past its last row"),
        (EagerAmplification(bands=5, coefficients=(1.0, 0.5, 0.4, 0.3, 0.2)), "overlap"),
        (WrongRowNorm(nu=0.1), "row_std"),
        (CheapBeginning(), "for 1 steps"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_planted_defects_are_rejected(planted, message):
    with pytest.raises(AssertionError, match=message):
        check_mechanism(planted)


# Sensitivity -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "steps", "promised"),
    [
        (Once(), 7, Pattern(7, 1, False)),
        (Everyone(), 7, Pattern(1, 7, False)),
        (MinSep(gap=3, times=2), 7, Pattern(3, 2, False)),
        (MinSep(gap=3, times=9), 7, Pattern(3, 3, False)),
        (MinSep(gap=9, times=2), 7, Pattern(7, 1, False)),
        (CyclicPoisson(period=3, rate=0.5), 7, Pattern(3, 3, True)),
        (BallsInBins(bins=4, epochs=2), 7, Pattern(4, 2, True)),
        (BallsInBins(bins=4, epochs=3, fresh=True), 12, Pattern(1, 3, False)),
        (BallsInBins(bins=4, epochs=3, fresh=True), 7, Pattern(1, 2, False)),
    ],
)
def test_what_each_participation_promises(who, steps, promised):
    assert pattern_of(who, steps) == promised


@settings(max_examples=60, deadline=None)
@given(
    coefficients=st.lists(st.floats(-1, 1), min_size=7, max_size=7),
    gap=st.integers(1, 7),
    times=st.integers(1, 4),
)
def test_toeplitz_sensitivity_is_never_below_brute_force(coefficients, gap, times):
    c = np.r_[1.0, coefficients]
    who = MinSep(gap=gap, times=times)
    claimed = toeplitz_sensitivity(c, pattern_of(who, len(c)))
    assert claimed >= brute_force_sensitivity(lower_toeplitz(c), who) * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(entries=st.lists(st.floats(-1, 1), min_size=49, max_size=49), gap=st.integers(1, 7), times=st.integers(1, 4))
def test_gram_sensitivity_is_never_below_brute_force(entries, gap, times):
    C = np.tril(np.array(entries).reshape(7, 7)) + np.eye(7)
    who = MinSep(gap=gap, times=times)
    assert gram_sensitivity(C.T @ C, pattern_of(who, 7)) >= brute_force_sensitivity(C, who) * (1 - 1e-12)


@settings(max_examples=30, deadline=None)
@given(steps=st.integers(1, 12), gap=st.integers(1, 12), times=st.integers(1, 12), decay=st.floats(0.1, 1.0))
def test_decreasing_coefficients_have_exact_sensitivity(steps, gap, times, decay):
    c, who = binomial(-0.5, steps, decay), MinSep(gap=gap, times=times)
    assert toeplitz_sensitivity(c, pattern_of(who, steps)) == pytest.approx(
        brute_force_sensitivity(lower_toeplitz(c), who), rel=1e-12
    )


@pytest.mark.parametrize(
    "who", [Once(), MinSep(gap=7, times=3), MinSep(gap=7, times=100), Everyone(), BallsInBins(bins=9, epochs=40)]
)
def test_closed_form_of_blt_equals_its_series(who):
    blt = BLT(buffers=3, decay=(0.999, 0.9, 0.3), inverse_decay=(0.99, 0.6, 0.1))
    for steps in (1, 2, 40, 301):
        c, beta = blt.strategy_coefficients(steps), blt.noising_coefficients(steps)
        assert blt.sensitivity(steps=steps, participation=who) == pytest.approx(
            toeplitz_sensitivity(c, pattern_of(who, steps)), rel=1e-11
        )
        b = np.cumsum(np.cumsum(beta) ** 2)
        assert blt.unit_error(steps=steps) == pytest.approx((np.sqrt(b.mean()), np.sqrt(b[-1])), rel=1e-11)
        assert np.allclose(inverse(c, steps), beta, atol=1e-12)


def test_many_participations_are_summed_exactly():
    blt = BLT.optimal(steps=3000, buffers=2, participation=MinSep(gap=2, times=1500))
    who = MinSep(gap=2, times=1500)
    exact = toeplitz_sensitivity(blt.strategy_coefficients(3000), pattern_of(who, 3000))
    assert blt.sensitivity(steps=3000, participation=who) == pytest.approx(exact, rel=1e-10)


def test_the_factor_of_a_gram_matrix():
    X = MIXED_SIGNS.T @ MIXED_SIGNS
    C = lower_factor(X)
    assert np.allclose(C.T @ C, X) and not np.triu(C, 1).any()
    assert not np.allclose(np.linalg.cholesky(X).T @ np.linalg.cholesky(X), X)


# Bounds ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [Once(), MinSep(gap=4, times=4), Everyone()])
@pytest.mark.parametrize("work", [PrefixSums(), SGDWorkload(momentum=0.9, weight_decay=0.01)])
def test_no_mechanism_is_better_than_the_bound(who, work):
    steps = 16
    bound, _ = rmse_lower_bound(work, steps, pattern_of(who, steps))
    for mechanism in (Independent(), Tree(), Toeplitz(), BLT(buffers=2), Banded(bands=4), Nu(), AntiPGD()):
        assert mechanism.error(steps=steps, participation=who, workload=work).rmse >= bound


@pytest.mark.parametrize("rate", [1.0, tuple(np.linspace(1, 0.1, 200).tolist())])
def test_blocks_bound_the_nuclear_norm_from_below(rate, monkeypatch):
    work = SGDWorkload(learning_rate=rate, momentum=0.5, weight_decay=1e-9)
    exact, _ = rmse_lower_bound(work, 200, Pattern(200, 1))
    rmse_lower_bound.cache_clear()
    monkeypatch.setattr("hushgrad.noise.error._DECOMPOSED", 64)
    block, how = rmse_lower_bound(work, 200, Pattern(200, 1))
    rmse_lower_bound.cache_clear()
    assert "blocks" in how and 0.6 * exact < block <= exact


@pytest.mark.parametrize("loss", ["mean", "max"])
@pytest.mark.parametrize("work", [PrefixSums(), SGDWorkload(learning_rate=tuple(np.linspace(1, 0.1, 24).tolist()), momentum=0.9)])
def test_dense_optimum_is_certified(loss, work):
    found = optimise_dense(work.matrix(24), Pattern(24, 1), loss=loss)
    assert 0 <= found.gap < 1e-3
    rng = np.random.default_rng(0)
    for _ in range(20):  # no neighbour is better than the lower bound, and none much better than the optimum
        C = found.strategy * np.exp(0.05 * rng.normal(size=found.strategy.shape))
        rmse, worst = Dense(C).unit_error(steps=24, workload=work)
        error = (rmse if loss == "mean" else worst) * Dense(C).sensitivity(steps=24, participation=Once())
        assert error >= found.lower


def test_dense_optimum_of_several_epochs_is_certified_and_beats_the_others():
    who = BallsInBins(bins=6, epochs=8)
    found = Dense.optimum(steps=48, participation=who)
    assert 0 <= found.gap < 1e-3
    error = Dense(found.strategy).error(steps=48, participation=who)
    assert error.rmse == pytest.approx(found.upper)
    assert 0.9 * found.lower < error.lower_bound <= found.lower  # the bound that needs no optimisation is weaker
    for other in (BLT(buffers=3), Banded(bands=6), Toeplitz(), Nu(), Independent()):
        assert other.error(steps=48, participation=who).rmse > found.upper


@pytest.mark.parametrize("steps", [1, 3, 8, 11])
@pytest.mark.parametrize("variant", ["plain", "online", "full"])
def test_a_tree_that_is_not_at_its_end_costs_what_its_nodes_cost(variant, steps):
    """A ledger asks for the first steps: one of a tree of 8 must not be charged for the levels that are still to come."""
    tree = Tree(variant=variant, restart=8)
    true = brute_force_sensitivity(tree.strategy(steps), Once())
    assert tree.sensitivity(steps=steps, participation=Once()) == pytest.approx(true)


@pytest.mark.parametrize(
    ("steps", "bands", "who"),
    [
        (2, 2, MinSep(gap=1, times=2)),
        (60, 10, MinSep(gap=5, times=12)),
        (64, 16, MinSep(gap=1, times=3)),  # a search over patterns that start at 0 alone ends 45 % above the square root
        (40, 20, MinSep(gap=7, times=3)),
    ],
)
def test_optimised_bands_may_overlap(steps, bands, who):
    cut = Banded.square_root(bands=bands).error(steps=steps, participation=who)
    assert Banded(bands=bands).error(steps=steps, participation=who).rmse <= cut.rmse
    best = Banded.optimal(steps=steps, bands=bands, loss="max", participation=who)
    assert best.error(steps=steps, participation=who).max <= cut.max
    pattern = pattern_of(who, steps)
    assert best.sensitivity(steps=steps, participation=who) == pytest.approx(leftmost(best.strategy_coefficients(steps), pattern))


def test_dense_optimum_of_several_epochs_is_feasible_for_every_min_sep_pattern():
    who = MinSep(gap=3, times=4)
    found = Dense.optimum(steps=12, participation=who)
    assert brute_force_sensitivity(found.strategy, who) <= 1 + 1e-9
    assert found.lower <= found.upper


# Events and refusals -----------------------------------------------------------------------------------------------------------


def test_independent_noise_is_amplified_by_every_sampling():
    event = Independent().event
    assert str(event(2.0, Poisson(0.1), 10)) == "10 x Poisson(0.1) Gaussian(2)"
    assert str(event(2.0, FixedSize(dataset_size=10, size=2), 10)) == "10 x FixedSize(10, 2) Gaussian(2)"
    assert "TruncatedPoisson" in str(event(2.0, TruncatedPoisson(rate=0.1, dataset_size=100, size=20), 10))
    assert str(event(2.0, CyclicPoisson(period=4, rate=0.1), 10)) == "3 x Poisson(0.1) Gaussian(2)"
    assert str(event(2.0, BallsInBins(bins=5, epochs=2), 10)) == "BallsInBins(5, 2) Gaussian(2)"
    for steps, passes in [(1, 1), (5, 1), (6, 2)]:  # what was stopped early pays for the passes that have begun
        for fresh in (False, True):
            begun = BallsInBins(bins=5, epochs=passes, fresh=fresh)
            assert event(2.0, BallsInBins(bins=5, epochs=3, fresh=fresh), steps) == Sampled(begun, Gaussian(2.0))
    assert str(event(2.0, Everyone(), 10)) == "10 x Gaussian(2)"
    assert event(2.0, MinSep(gap=2, times=4), 10) == Gaussian(1.0)
    with pytest.raises(ArgumentError, match="bins x epochs"):
        event(2.0, BallsInBins(bins=5, epochs=1), 10)


def test_banded_noise_is_amplified_by_cycles_as_long_as_its_bands():
    banded = Banded.square_root(bands=4)
    who = CyclicPoisson(period=4, rate=0.2)
    column = float(np.linalg.norm(binomial(-0.5, 4)))
    assert banded.event(2.0, who, 10) == Gaussian(2.0 / column).sampled(rate=0.2) * 3
    assert isinstance(banded.event(2.0, CyclicPoisson(period=3, rate=0.2), 10), Gaussian)


@pytest.mark.parametrize("who", [Poisson(0.1), FixedSize(dataset_size=10, size=2)])
@pytest.mark.parametrize("mechanism", [Tree(), Toeplitz(), BLT(buffers=2), Banded(bands=2), Dense(np.eye(12))])
def test_correlated_noise_has_no_theorem_for_independent_batches(mechanism, who):
    with pytest.raises(NoTheorem, match="round-robin"):
        mechanism.event(1.0, who, 12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BLT(buffers=0), "buffers=0"),
        (lambda: Nu(nu=0.1).error(steps=4, participation=Once(), workload="sgd"), "workload='sgd' to be a Workload or a matrix"),
        (lambda: BLT(buffers=11), "at most 10"),
        (lambda: BLT(buffers=1, decay=(0.5,), inverse_decay=(0.6,)), "interlace"),
        (lambda: BLT(buffers=1, decay=(0.5,)), "both or neither"),
        (lambda: Banded(bands=13).error(steps=12, participation=Once()), "at most steps=12"),
        (lambda: BandedInverse(bands=13).error(steps=12, participation=Once()), "at most steps=12"),
        (lambda: Banded(bands=2, coefficients=(0.0, 1.0)), "singular"),
        (lambda: Toeplitz(coefficients=(0.0, 1.0)), "singular"),
        (lambda: Dense(np.array([[1.0, 0.0], [1.0, 0.0]])), "singular"),
        (lambda: Dense(np.ones((2, 2))), "lower-triangular"),
        (lambda: Dense(np.eye(4)).event(1.0, Once(), 5), "rows of C"),
        (lambda: Dense.optimal(steps=100_000), "BLT.optimal"),
        (lambda: BLT().event(1.0, BallsInBins(bins=5, epochs=1), 6), "bins x epochs"),
        (lambda: Nu(nu=0.2, series="slide"), "sensitivity 8e58"),
        (lambda: Nu(nu=1.0), "nu=1.0"),
        (lambda: Nu().stream(noise.Source(seed=0), steps=4), "resolved"),
        (lambda: BLT().stream(noise.Source(seed=0), steps=4), "resolved"),
        (lambda: Toeplitz().stream(noise.Source(seed=0)), "pass steps="),
        (lambda: Tree(completion=True), "restart"),
        (lambda: Tree(variant="full").error(steps=100_000, participation=Once()), "online"),
        (lambda: Spectral(curvatures=(1.0,), learning_rate=2.0), "diverges"),
        (lambda: Toeplitz().row_std(5, steps=5), "less than steps=5"),
        (lambda: Toeplitz().error(steps=4, participation=Once(), workload=np.ones((4, 4))), "lower-triangular"),
        (lambda: SGDWorkload(learning_rate=(1.0, 0.5)).matrix(3), "whole schedule"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_the_sgd_workload_is_what_torch_does():
    import torch

    rates, momentum, decay = (0.5, 0.4, 0.3, 0.2), 0.9, 0.1
    gradients = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=1.0, momentum=momentum, weight_decay=decay)
    path = []
    for rate, gradient in zip(rates, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        theta.grad = gradient.reshape(1).clone()
        optimizer.step()
        path.append(-theta.item())
    A = SGDWorkload(learning_rate=rates, momentum=momentum, weight_decay=decay).matrix(4)
    assert A @ gradients.numpy() == pytest.approx(path)
    constant = SGDWorkload(learning_rate=0.5, momentum=momentum, weight_decay=decay)
    assert np.allclose(lower_toeplitz(constant.coefficients(6)), constant.matrix(6))


@pytest.mark.parametrize("bands", [2, 3])
def test_the_search_for_a_band_steps_back_from_unstable_trials(bands):
    """A trial with a root inside the unit circle has an inverse beyond the floating-point range after 2000 steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        column = optimise_banded.__wrapped__(2000, bands, "mean", 2000, 1)
    assert np.abs(np.roots(column)).max() < 1  # the one that is found is stable


@pytest.mark.parametrize(
    "mechanism",
    [
        Banded(bands=np.int64(3)),
        BLT(buffers=np.int64(2)),
        BandedInverse(bands=np.int64(3), exponent=np.float32(0.5)),
        Tree(restart=np.int64(4)),
        Nu(nu=np.float32(0.25)),
        SGDWorkload(learning_rate=(np.float32(0.5), np.int64(1)), momentum=np.float32(0.5)),
        SGDWorkload(learning_rate=np.linspace(1.0, 0.1, 4)),
    ],
    ids=str,
)
def test_numpy_numbers_are_written_as_numbers(mechanism):
    """A plan with a number out of an array must not fail when the finished run is saved."""
    assert type(mechanism).from_json(json.loads(json.dumps(mechanism.to_json()))) == mechanism
