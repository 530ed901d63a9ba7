"""Values with their source: closed forms, dp-accounting 0.6, opacus 1.6, and reference figures by contour quadrature."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from mpmath import mp
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.integrate import quad
from scipy.special import logsumexp, ndtr, ndtri

from hushgrad.accounting import (
    RDP,
    ZCDP,
    advantage,
    calibrate,
    epsilon,
    estimate,
    gaussian_delta,
    gaussian_epsilon,
    renyi,
    renyi_sampled,
    trade_off,
)
from hushgrad.accounting.api import accountant_of
from hushgrad.accounting.optimal import responses_delta
from hushgrad.accounting.rdp import RDPLoss, _success_exponent
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    FixedSize,
    Gaussian,
    GaussianMixture,
    Laplace,
    PureDP,
    RandomizedResponse,
    Relation,
    RepeatAndSelect,
    Sampled,
)

# (rate, noise multiplier, steps, delta, epsilon): contour quadrature at two resolutions that agree to 1e-9.
REFERENCE = [
    (256 / 60_000, 1.1, 14_040, 1e-5, 2.3795545188271445),
    (256 / 60_000, 1.1, 14_040, 1e-8, 3.2478977787417063),
    (256 / 60_000, 1.1, 14_040, 1e-12, 4.171173934992108),
    (0.08, 3.0, 2500, 1e-5, 6.39694662768633),
    (0.08, 10.0, 2500, 1e-5, 1.564531248513688),
    (1.0, 1.0, 1, 1e-5, 4.377178095681224),
    (1.0, 100.0, 1000, 1e-6, 1.3675714750842431),
]


def _renyi(event: Event, alpha: float, relation: Relation = Relation.ADD_REMOVE) -> float:
    loss = RDP().loss(event, relation)
    assert isinstance(loss, RDPLoss)
    return loss.renyi(alpha)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta", "truth"), REFERENCE)
def test_estimate_agrees_with_the_reference(rate: float, sigma: float, steps: int, delta: float, truth: float) -> None:
    found = estimate(Gaussian(sigma).sampled(rate=rate) * steps, delta=delta)
    assert found.epsilon == pytest.approx(truth, rel=1e-8)
    assert not found.certified


def test_estimate_agrees_with_its_closed_form_at_tiny_delta() -> None:
    for delta in (1e-15, 1e-50, 1e-200):
        assert estimate(Gaussian(20.0) * 300, delta=delta).epsilon == pytest.approx(
            gaussian_epsilon(math.sqrt(300) / 20, delta), rel=1e-8
        )


def test_estimate_refuses_where_it_cannot_be_trusted() -> None:
    for event in (Laplace(1.0), Gaussian(0.4).sampled(rate=1e-3), PureDP(1.0) + Gaussian(1.0)):
        with pytest.raises(NoTheorem):
            estimate(event, delta=1e-5)


@pytest.mark.parametrize(("mu", "epsilons"), [(1.0, (0, 0.5, 4, 30)), (0.01, (0, 1e-4, 0.03, 0.3)), (20.0, (0, 100, 250, 400))])
def test_gaussian_delta_is_the_printed_formula(mu: float, epsilons: tuple[float, ...]) -> None:
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 60
    for e in epsilons:
        x, y = mpmath.mpf(mu) / 2 - mpmath.mpf(e) / mu, -mpmath.mpf(mu) / 2 - mpmath.mpf(e) / mu
        truth = mpmath.ncdf(x) - mpmath.exp(e) * mpmath.ncdf(y)
        assert truth <= gaussian_delta(mu, e) <= truth * (1 + 1e-8), (mu, e)


@pytest.mark.parametrize("mu", [1e-3, 1e-5, 1e-7])
def test_gaussian_delta_keeps_its_digits_at_small_distances(mu: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 80
    for e in (0.0, mu / 3, 3 * mu, 8 * mu):
        x, y = mpmath.mpf(mu) / 2 - mpmath.mpf(e) / mu, -mpmath.mpf(mu) / 2 - mpmath.mpf(e) / mu
        truth = mpmath.ncdf(x) - mpmath.exp(e) * mpmath.ncdf(y)
        assert truth <= gaussian_delta(mu, e) <= truth * (1 + 1e-6), (mu, e)


@pytest.mark.parametrize(("sigma", "rate"), [(1.1, 0.01), (0.6, 0.004), (10.0, 0.08), (2.0, 0.5)])
def test_sampled_gaussian_divergence_against_opacus(sigma: float, rate: float) -> None:
    orders = [1.5, 2.0, 3.7, 8.0, 20.0, 64.0, 256.0]
    theirs = compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=orders)
    ours = [renyi_sampled.poisson_gaussian(sigma, rate)(a) for a in orders]
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)


def test_sampled_gaussian_divergence_keeps_its_digits_at_tiny_rates() -> None:
    # Order 2 in closed form: ln(1 + q² (e^{1/s²} - 1)). A sum that starts at 1 loses all digits here.
    for rate in (1e-6, 1e-9):
        for sigma in (0.7, 1.0, 5.0):
            truth = math.log1p(rate**2 * math.expm1(sigma**-2))
            assert renyi_sampled.poisson_gaussian(sigma, rate)(2.0) == pytest.approx(truth, rel=1e-9)


def test_mixture_of_gaussians_by_brute_force() -> None:
    sigma, shifts, weights = 1.7, (0.0, 1.0, 2.5), (0.7, 0.2, 0.1)
    curve = renyi_sampled.gaussian_mixture(sigma, shifts, weights)

    def density(x: float, shift: float) -> float:
        return math.exp(-((x - shift) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))

    for alpha in (1.3, 2.0, 4.5):

        def both(x: float, power: float) -> float:
            p = sum(w * density(x, s) for s, w in zip(shifts, weights, strict=True))
            return p**power * density(x, 0.0) ** (1 - power)

        brute = [math.log(quad(both, -20, 28, args=(p,), limit=500)[0]) / (alpha - 1) for p in (alpha, 1 - alpha)]
        assert curve(alpha) == pytest.approx(max(brute), rel=1e-7)
    assert _renyi(
        GaussianMixture(noise_multiplier=2.0, sensitivities=(0.0, 1.0), probabilities=(0.9, 0.1)), 3.0
    ) == pytest.approx(_renyi(Gaussian(2.0).sampled(rate=0.1), 3.0), rel=1e-9)


@pytest.mark.parametrize("alpha", [1.2, 2.0, 7.5])
def test_discrete_divergences_by_brute_force(alpha: float) -> None:
    k = np.arange(-4000, 4001)

    def divergence(p: np.ndarray, shift: int) -> float:
        p = p / p.sum()
        q = np.roll(p, shift)
        keep = (p > 1e-280) & (q > 1e-280)
        return float(logsumexp(alpha * np.log(p[keep]) + (1 - alpha) * np.log(q[keep])) / (alpha - 1))

    for scale, distance in ((3.0, 1), (3.0, 2), (8.0, 5)):
        brute = divergence(np.exp(-np.abs(k) / scale), distance)
        assert _renyi(DiscreteLaplace(scale, distance), alpha) == pytest.approx(brute, rel=1e-9)
    for sigma, distance in ((2.0, 1), (5.0, 3), (0.6, 1)):
        brute = divergence(np.exp(-(k.astype(float) ** 2) / (2 * sigma**2)), distance)
        assert brute * (1 - 1e-9) <= _renyi(DiscreteGaussian(sigma, distance), alpha)
    for noise, categories in ((0.5, 2), (0.3, 5)):
        p = np.full(categories, noise / categories)
        p[0] += 1 - noise
        brute = divergence(p, 1)
        event = RandomizedResponse(noise, categories)
        assert _renyi(event, alpha, Relation.REPLACE_ONE) == pytest.approx(brute, rel=1e-9)


@pytest.mark.parametrize(("e", "alpha"), [(0.5, 1.5), (2.0, 3.0)])
def test_laplace_divergence_by_brute_force(e: float, alpha: float) -> None:
    def integrand(x: float) -> float:
        return 0.5 * math.exp(-alpha * abs(x) - (1 - alpha) * abs(x - e))

    value = quad(integrand, -60, 60, points=[0, e])[0]
    assert renyi.laplace(e)(alpha) == pytest.approx(math.log(value) / (alpha - 1), rel=1e-7)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), [(0.01, 1.1, 1000, 1e-5), (0.2, 4.0, 200, 1e-8)])
def test_rdp_epsilon_is_at_most_dp_accountings(rate: float, sigma: float, steps: int, delta: float) -> None:
    theirs = rdp_privacy_accountant.RdpAccountant()
    theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), steps)
    event = Gaussian(sigma).sampled(rate=rate) * steps
    ours = epsilon(event, delta=delta, accountant="rdp")
    assert estimate(event, delta=delta).epsilon < ours <= theirs.get_epsilon(delta) * (1 + 1e-6)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0, math.inf])
def test_repeat_and_select_against_dp_accounting(shape: float) -> None:
    theirs = rdp_privacy_accountant.RdpAccountant(np.linspace(1.05, 250, 500))
    theirs.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(5.0), 10.0, shape))
    ours = epsilon(RepeatAndSelect(of=Gaussian(5.0), mean=10.0, shape=shape), delta=1e-6, accountant="rdp")
    assert ours == pytest.approx(theirs.get_epsilon(1e-6), rel=2e-3)
    assert ours <= theirs.get_epsilon(1e-6) * (1 + 1e-5)


@pytest.mark.parametrize("shape", [-0.999, -0.5, -1e-12, 0.0, 1e-300, 1e-12, 1.0, 1e4])
@pytest.mark.parametrize("mean", [1.5, 100.0, 1e9])
def test_the_number_of_repetitions_has_the_asked_mean(shape: float, mean: float) -> None:
    """For shapes near -1 gamma is below all doubles: it was cut off, and the penalty came out too small."""
    with mp.workdps(40):
        log_gamma = -mp.mpf(_success_exponent(mean, shape))
        gamma = mp.exp(log_gamma)
        reached = (1 / gamma - 1) * (mp.mpf(shape) / -mp.expm1(shape * log_gamma) if shape else -1 / log_gamma)
    assert 0 <= reached / mean - 1 + 1e-12 < 1e-6


def test_laplace_and_response_against_dp_accounting() -> None:
    theirs = rdp_privacy_accountant.RdpAccountant(np.linspace(1.05, 60, 3000))
    theirs.compose(dp_accounting.LaplaceDpEvent(2.0), 30)
    assert epsilon(Laplace(2.0) * 30, delta=1e-5, accountant="rdp") == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-4)
    theirs = rdp_privacy_accountant.RdpAccountant(
        np.linspace(1.01, 60, 3000), neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    theirs.compose(dp_accounting.RandomizedResponseDpEvent(0.5, 4), 100)
    ours = epsilon(RandomizedResponse(0.5, 4) * 100, delta=1e-5, accountant="rdp", relation="replace_one")
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-4)


def test_without_replacement_holds_for_the_achieved_pair() -> None:
    """The bound must lie above a pair of neighbours that a fixed-size sample really has: one moves from +1 to -1."""
    n, size, sigma, alpha = 1000, 100, 4.0, 6.0
    q = size / n

    def ratio(x: float) -> float:
        base = math.exp(-(x**2) / (2 * sigma**2))
        p = (1 - q) * base + q * math.exp(-((x - 1) ** 2) / (2 * sigma**2))
        r = (1 - q) * base + q * math.exp(-((x + 1) ** 2) / (2 * sigma**2))
        return p**alpha * r ** (1 - alpha) / (sigma * math.sqrt(2 * math.pi))

    achieved = math.log(quad(ratio, -50, 50, limit=500)[0]) / (alpha - 1)
    bound = _renyi(Sampled(FixedSize(dataset_size=n, size=size), Gaussian(sigma)), alpha, Relation.REPLACE_ONE)
    poisson = _renyi(Gaussian(sigma).sampled(rate=q), alpha, Relation.REPLACE_ONE)
    assert achieved < bound < _renyi(Gaussian(sigma), alpha, Relation.REPLACE_ONE)
    assert achieved < poisson == pytest.approx(bound)


@pytest.mark.parametrize(
    ("epsilon_", "steps", "first", "second", "kov", "basic"),
    [(0.1, 100, 6.31, 5.76, 4.80, 10.0), (0.5, 100, 58.7, 38.5, 34.0, 50.0)],
)
def test_composition_figures(epsilon_: float, steps: int, first: float, second: float, kov: float, basic: float) -> None:
    """Printed figures (slack 1e-6): both advanced forms, the optimal theorem on its grid, basic composition."""
    event = PureDP(epsilon_) * steps
    assert epsilon(event, delta=1e-6, accountant="basic") == pytest.approx(basic)
    assert epsilon(event, delta=1e-6, accountant="advanced") == pytest.approx(min(first, second, basic), rel=2e-3)
    on_grid = math.ceil(epsilon(event, delta=1e-6, accountant="optimal") / (2 * epsilon_) - 1e-9) * 2 * epsilon_
    assert on_grid == pytest.approx(kov)


def test_optimal_composition_is_the_printed_sum() -> None:
    """Kairouz, Oh and Viswanath's theorem 3.3 in exact integers, and dp-accounting's function of the same theorem."""
    e, n = 0.3, 25
    ours = responses_delta(e, n)
    for i in range(n // 2 + 1):
        terms = [math.comb(n, k) * (math.exp((n - k) * e) - math.exp((n - 2 * i + k) * e)) for k in range(i)]
        printed = math.fsum(terms) / (1 + math.exp(e)) ** n
        assert ours((n - 2 * i) * e) == pytest.approx(printed, rel=1e-7, abs=1e-15)
    million = epsilon(PureDP(0.001) * 10**6, delta=1e-6, accountant="optimal")
    assert 0.99 * gaussian_epsilon(1.0, 1e-6) < million < 1.02 * gaussian_epsilon(1.0, 1e-6)  # its central limit


def test_zcdp_conversion_is_below_the_classical_one() -> None:
    for rho in (1e-4, 0.1, 5.0, 400.0):
        loss = ZCDP().loss(Gaussian(1 / math.sqrt(2 * rho)))
        classical = rho + 2 * math.sqrt(rho * math.log(1e6))
        assert gaussian_epsilon(math.sqrt(2 * rho), 1e-6) < loss.epsilon(1e-6) < classical


@pytest.mark.parametrize("name", ["rdp", "zcdp", "gdp"])
@pytest.mark.parametrize("sigma", [1e3, 10.0, 1.0, 0.05, 0.025])
def test_range_of_epsilon(name: str, sigma: float) -> None:
    """Epsilon from 1e-3 to 1e3: close to the truth everywhere, so no order is missing."""
    truth = gaussian_epsilon(1 / sigma, 1e-6)
    ours = accountant_of(name).loss(Gaussian(sigma)).epsilon(1e-6)
    assert truth * (1 - 1e-9) <= ours <= truth * (1.25 if sigma > 100 else 1.12)


def test_trade_off_of_a_gaussian_is_known() -> None:
    alphas = [1e-3, 0.01, 0.1, 0.4, 0.9]
    truth = [float(ndtr(ndtri(1 - a) - 1.5)) for a in alphas]
    found = trade_off(Gaussian(1 / 1.5), alphas, accountant="gdp")
    for a, b in zip(found, truth, strict=True):
        assert a <= b + 1e-12  # a lower bound on the miss rate
        assert a == pytest.approx(b, abs=2e-4)
    assert advantage(Gaussian(1 / 1.5), accountant="gdp") == pytest.approx(2 * ndtr(0.75) - 1, rel=1e-9)


@pytest.mark.parametrize("target", [0.5, 1.0, 2.9, 3.0, 3.2, 8.0])
@pytest.mark.parametrize(("rate", "steps"), [(1 / 6, 6), (0.5, 2), (0.01, 1), (0.05, 40)])
def test_calibration_ends_at_the_target_for_few_steps_too(target, rate, steps):
    """With few steps the rough search is by Rényi divergences, far above the certified epsilon: the answer must not stop there."""

    def event(sigma):
        return Gaussian(sigma).sampled(rate=rate) * steps

    sigma = calibrate(event, epsilon=target, delta=1e-4)
    assert target * (1 - 1e-3) <= epsilon(event(sigma), delta=1e-4) <= target
