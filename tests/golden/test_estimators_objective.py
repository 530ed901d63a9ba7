"""Objective perturbation in one dimension: the exact privacy loss by change of variables stays below the theorems, and reaches them.

With one parameter the released θ has the density φ_σ(b(θ)) |b'(θ)|, b(θ) = -(Σ ℓ'(θ) + λθ), so the hockey-stick divergence of
neighbours is a one-dimensional integral that needs none of the theorems.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from scipy.special import ndtr

from hushgrad.errors import ArgumentError
from hushgrad.estimators.losses import HuberHinge, HuberResidual, Logistic, Softmax
from hushgrad.estimators.objective import Term, objective_delta, objective_noise, profile, pure_noise
from hushgrad.events import Relation

ADD, REPLACE = Relation.ADD_REMOVE, Relation.REPLACE_ONE


class Classical(NamedTuple):
    """The requirements of a classical theorem: noise of this scale, and at least this l2 (λ of the summed objective)."""

    scale: float
    l2: float


def classical_gaussian(epsilon, delta, *, lipschitz, smoothness):
    """Kifer, Smith and Thakurta 2012, theorem 2 (replace-one).

    sigma = L sqrt(8 ln(2/delta) + 4 epsilon)/epsilon, and λ >= 2 smoothness/epsilon.
    """
    sigma = lipschitz * math.sqrt(8 * math.log(2 / delta) + 4 * epsilon) / epsilon
    return Classical(sigma, 2 * smoothness / epsilon)


def classical_pure(epsilon, *, l2, curvature, row_norm=1.0):
    """Chaudhuri, Monteleoni and Sarwate 2011, algorithm 2 (replace-one), for rows of norm at most ``row_norm``.

    With c the curvature of a loss of slope at most 1, scaled to rows of norm R the smoothness is c R² (not c R, a slip that makes a
    published implementation exceed its epsilon). Where log(1 + 2cR²/λ + c²R⁴/λ²) leaves nothing of epsilon, λ is enlarged.
    """
    smoothness = curvature * row_norm**2
    left = epsilon - 2 * math.log1p(smoothness / l2)
    if left <= 0:
        l2, left = smoothness / math.expm1(epsilon / 4), epsilon / 2
    return Classical(2 * row_norm / left, l2)


def tilts(loss, data, theta, l2):
    """The tilt b that makes each θ the minimiser: decreasing in θ."""
    tilt = -l2 * theta
    for (x, y), count in Counter(data).items():
        tilt = tilt - count * x * loss.slopes((x * theta)[:, None], np.full_like(theta, y))[:, 0]
    return tilt


def masses(loss, data, theta, l2, sigma):
    """The exact probability of each cell of the grid, the two tails included."""
    edges = np.concatenate([[np.inf], tilts(loss, data, theta, l2), [-np.inf]]) / sigma
    return np.where(edges[:-1] > 0, ndtr(-edges[1:]) - ndtr(-edges[:-1]), ndtr(edges[:-1]) - ndtr(edges[1:]))


def density(loss, data, theta, l2, noise):
    """The exact density of the released parameter on a grid; ``noise`` is the density of the tilt."""
    curvature = np.full_like(theta, l2)
    for (x, y), count in Counter(data).items():
        curvature = curvature + count * x * x * loss.curvatures((x * theta)[:, None], np.full_like(theta, y))
    return noise(tilts(loss, data, theta, l2)) * curvature


def grid(sigma, l2):
    reach = (8 * sigma + 45) / l2
    return np.linspace(-reach, reach, 60_001)


def hockey_stick(p, q, epsilon):
    """The divergence of the two cell distributions, in the worse direction: at most the true one, and close to it on a fine grid."""
    assert p.sum() == pytest.approx(1, abs=1e-9)
    return max(np.maximum(p - np.exp(epsilon) * q, 0).sum(), np.maximum(q - np.exp(epsilon) * p, 0).sum())


CROWDS = [[], [(1.0, -1)] * 5, [(0.3, 1), (-1.0, 1), (0.9, -1)], [(1.0, 1)] * 20 + [(1.0, -1)] * 20]


@pytest.mark.parametrize("loss", [Logistic(), HuberHinge(0.5), HuberResidual(0.7)], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("l2_times_epsilon", [0.7, 1.0, 5.0])
def test_exact_delta_is_below_the_theorem(loss, epsilon, relation, l2_times_epsilon):
    l2, delta = l2_times_epsilon / epsilon * (1 if isinstance(loss, Logistic) else 3), 1e-3
    terms = profile(loss, row_norm=1.0, l2=l2, relation=relation, epsilon=epsilon)
    sigma = objective_noise(epsilon, delta, terms=terms)
    assert objective_delta(epsilon, sigma=sigma, terms=terms) <= delta
    theta = grid(sigma, l2)
    for crowd in CROWDS:
        for record in [(1.0, 1), (1.0, -1), (0.5, 1)]:
            other = [] if relation is ADD else [(-1.0, 1)]
            p = masses(loss, crowd + other, theta, l2, sigma)
            q = masses(loss, [*crowd, record], theta, l2, sigma)
            assert hockey_stick(p, q, epsilon) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_the_logistic_theorem_is_nearly_attained(epsilon):
    sigma = objective_noise(epsilon, 1e-3, terms=(Term(1.0, 1, 0.0),))
    theta = grid(sigma, 1 / epsilon)
    p = masses(Logistic(), [], theta, 1 / epsilon, sigma)
    q = masses(Logistic(), [(1.0, 1)], theta, 1 / epsilon, sigma)
    assert hockey_stick(p, q, epsilon) > 0.8e-3


@pytest.mark.parametrize("defect", [0.8, 0.5])
def test_less_noise_than_the_theorem_asks_for_is_caught(defect):
    """A planted defect: the same integral exceeds delta when sigma is too small, so the test above has power."""
    sigma = defect * objective_noise(1.0, 1e-3, terms=(Term(1.0, 1, 0.0),))
    theta = grid(sigma, 1.0)
    p = masses(Logistic(), [], theta, 1.0, sigma)
    q = masses(Logistic(), [(1.0, 1)], theta, 1.0, sigma)
    assert hockey_stick(p, q, 1.0) > 1e-3


def max_loss(loss, record, theta, l2, noise, crowd, other=()):
    """Of a record against none, or against another one in its place."""
    p = density(loss, [*crowd, *other], theta, l2, noise)
    q = density(loss, [*crowd, record], theta, l2, noise)
    return np.abs(np.log(p / q)).max()


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("row_norm", [1.0, 12.0, 30.0])
@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("l2_ratio", [0.3, 1.0, 4.0])
def test_pure_objective_perturbation_never_exceeds_epsilon(epsilon, row_norm, l2_ratio, relation):
    l2 = l2_ratio * row_norm**2 / epsilon
    scale = pure_noise(epsilon, loss=Logistic(), row_norm=row_norm, l2=l2, relation=relation)
    other = [] if relation is ADD else [(row_norm, -1)]
    theta = np.linspace(-60, 60, 100_001) * scale / l2
    laplace = lambda b: np.exp(-np.abs(b) / scale) / (2 * scale)  # noqa: E731
    for crowd in [[], [(row_norm, -1)], [(row_norm, 1)] * 4]:
        assert max_loss(Logistic(), (row_norm, 1), theta, l2, laplace, crowd, other) <= epsilon * (1 + 1e-9)


def test_the_ends_of_the_theorems():
    """Where the curvature is just free, just takes all of epsilon, and where nothing is left to say."""
    assert pure_noise(1.0, loss=Logistic(), row_norm=1.0, l2=1.0, relation=ADD) == 1.0
    assert pure_noise(1.0, loss=Logistic(), row_norm=1.0, l2=2.0, relation=REPLACE) == 2.0
    assert pure_noise(1.0, loss=Logistic(), row_norm=1.0, l2=1.9, relation=REPLACE) > 2.1
    terms = (Term(1.0, 3, 0.5),)
    assert objective_delta(0.4, sigma=9.0, terms=terms) == objective_delta(0.5, sigma=1e-3, terms=terms) == 1.0
    assert objective_delta(0.5, sigma=9.0, terms=terms) < 1.0
    with pytest.raises(ArgumentError, match="price"):
        objective_noise(0.5, 1e-5, terms=terms)
    price = HuberHinge(0.5).log_det(1.0)
    with pytest.raises(ArgumentError, match="price"):
        pure_noise(price, loss=HuberHinge(0.5), row_norm=1.0, l2=1.0, relation=ADD)


def test_where_terms_have_several_prices_the_dearest_decides():
    terms = (Term(1.0, 1, 0.0), Term(1.0, 1, 0.5))
    assert objective_delta(0.3, sigma=9.0, terms=terms) == 1.0 > objective_delta(0.6, sigma=9.0, terms=terms)
    with pytest.raises(ArgumentError, match=r"price 0\.5"):
        objective_noise(0.3, 1e-5, terms=terms)
    sigma = objective_noise(0.6, 1e-5, terms=terms)
    assert 0.999e-5 < objective_delta(0.6, sigma=sigma, terms=terms) <= 1e-5


@pytest.mark.parametrize("classes", [3, 4])
def test_a_replaced_record_has_every_pair_of_vertices(classes):
    """Of each hull its own vertices, and the differences of one of the first and one of the second."""
    loss = Softmax(classes)
    vertices = sum(count for _, count in loss.vertices())
    terms = profile(loss, row_norm=1.0, l2=10.0, relation=REPLACE, epsilon=1.0)
    longest = max(norm for norm, _ in loss.vertices())
    assert vertices > 1 and sum(term.copies for term in terms) == 2 * vertices + vertices**2
    assert max(term.norm for term in terms) == 2 * longest and len({term.price for term in terms}) == 1


def test_the_numbers_of_the_theorems():
    """By hand, with rows longer than 1, so that no norm is taken for a count; and no more noise than is needed."""
    found = classical_gaussian(0.5, 1e-5, lipschitz=2.0, smoothness=3.0)
    assert (found.scale, found.l2) == (pytest.approx(39.92965437651398), 12.0)
    half = 2 * math.log(2)  # what curvature takes of epsilon: at least all of it in the last two
    for epsilon, scale, l2 in [
        (2.0, 4 / (2 - half), 1.0),
        (1.0, 8.0, 1 / math.expm1(0.25)),
        (half, 8 / half, 1 / math.expm1(half / 4)),
    ]:
        pure = classical_pure(epsilon, l2=1.0, curvature=0.25, row_norm=2.0)
        assert (pure.scale, pure.l2) == (pytest.approx(scale), pytest.approx(l2))
    pure = classical_pure(1.0, l2=4.0, curvature=0.25)  # rows of norm 1
    assert (pure.scale, pure.l2) == (pytest.approx(2 / (1 - 2 * math.log1p(1 / 16))), 4.0)
    free, dear = (profile(Logistic(), row_norm=3.0, l2=l2, relation=REPLACE, epsilon=1.0) for l2 in (100.0, 1.0))
    price = Logistic().log_det(9.0)
    assert free == (Term(6.0, 1, 0.0), Term(3.0, 1, 0.0), Term(3.0, 1, 0.09))
    assert dear == (Term(3.0, 1, price), Term(3.0, 1, price), Term(6.0, 1, price))
    for epsilon in (0.1, 8.0):
        sigma = objective_noise(epsilon, 1e-3, terms=free[:1])
        less, enough = (objective_delta(epsilon, sigma=sigma * factor, terms=free[:1]) for factor in (1 - 1e-6, 1.0))
        assert enough <= 1e-3 < less


@pytest.mark.parametrize(("row_norm", "epsilon"), [(12.0, 0.5), (30.0, 1.0)])
def test_the_published_slip_of_c_r_for_c_r_squared_is_caught(row_norm, epsilon):
    """A planted defect: curvature c R instead of c R² breaks epsilon for long rows, as in a peer's implementation."""
    right = classical_pure(epsilon, l2=1.0, curvature=0.25, row_norm=row_norm)
    assert 2 * math.log1p(0.25 * row_norm**2 / right.l2) == pytest.approx(epsilon / 2)  # half of epsilon each
    slipped_l2 = 0.25 * row_norm / math.expm1(epsilon / 4)
    theta = np.linspace(-3, 3, 200_001)
    for l2, holds in [(right.l2, True), (slipped_l2, False)]:
        scale = 2 * row_norm / (epsilon / 2)
        laplace = lambda b, scale=scale: np.exp(-np.abs(b) / scale) / (2 * scale)  # noqa: E731
        worst = max_loss(Logistic(), (row_norm, 1), theta, l2, laplace, [])
        assert bool(worst <= epsilon) is holds, (l2, worst)


def test_tighter_than_the_classical_theorem_and_than_the_two_sided_profile():
    epsilon, delta = 0.1, 1e-5
    ours = objective_noise(epsilon, delta, terms=profile(Logistic(), row_norm=1.0, l2=10.0, relation=ADD, epsilon=epsilon))
    two_sided = objective_noise(epsilon, delta, terms=(Term(1.0, 2, Logistic().log_det(0.1)),))
    classical = classical_gaussian(epsilon, delta, lipschitz=1.0, smoothness=0.25)
    assert ours < 0.75 * two_sided < 0.75 * classical.scale


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_softmax_log_det_is_the_largest_over_the_simplex(classes):
    rng = np.random.default_rng(0)
    for r in [0.01, 1.0, 100.0]:
        bound = Softmax(classes).log_det(r)
        for p in [*rng.dirichlet(np.ones(classes), 200), *rng.dirichlet(np.full(classes, 0.1), 200)]:
            hessian = np.diag(p) - np.outer(p, p)
            assert np.linalg.slogdet(np.eye(classes) + r * hessian)[1] <= bound * (1 + 1e-12)
        uniform = np.full(classes, 1 / classes)
        attained = np.linalg.slogdet(np.eye(classes) + r * (np.diag(uniform) - np.outer(uniform, uniform)))[1]
        assert attained == pytest.approx(bound)
        assert Softmax(classes).log_det(Softmax(classes).largest_ratio(bound)) == pytest.approx(bound)


def test_softmax_vertex_bound_against_simulation():
    """Three classes, one feature: the loss is simulated through the exact minimiser; its delta stays below the bound."""
    loss, l2, epsilon, delta = Softmax(3), 30.0, 1.0, 0.02
    terms = profile(loss, row_norm=1.0, l2=l2, relation=ADD, epsilon=epsilon)
    sigma = objective_noise(epsilon, delta, terms=terms)
    b = sigma * np.random.default_rng(1).normal(size=(200_000, 3))
    theta = -b / l2  # the minimiser without data
    slope = loss.slopes(theta, np.zeros(len(b), dtype=int))
    p = slope.copy()
    p[:, 0] += 1
    hessian = np.einsum("ni,ij->nij", p, np.eye(3)) - np.einsum("ni,nj->nij", p, p)
    log_det = np.linalg.slogdet(np.eye(3) + hessian / l2)[1]
    privacy_loss = (((b - slope) ** 2).sum(1) - (b**2).sum(1)) / (2 * sigma**2) - log_det
    excess = np.maximum(1 - np.exp(epsilon - privacy_loss), 0)
    assert 0 < excess.mean() + 4 * excess.std() / math.sqrt(len(b)) <= delta


def test_slopes_and_curvatures_are_derivatives():
    z = np.linspace(-4, 4, 41)[:, None] + 0.013
    h = 1e-6
    for loss, y in [(Logistic(), 1.0), (Logistic(), -1.0), (HuberHinge(0.5), 1.0), (HuberResidual(0.7), 0.3)]:
        labels = np.full(len(z), y)
        value = [np.array([loss.value(row[None] + s, labels[:1]) for row in z]) for s in (-h, 0, h)]
        np.testing.assert_allclose(loss.slopes(z, labels)[:, 0], (value[2] - value[0]) / (2 * h), atol=1e-7)
        slopes = [loss.slopes(z + s, labels)[:, 0] for s in (-h, h)]
        np.testing.assert_allclose(loss.curvatures(z, labels), (slopes[1] - slopes[0]) / (2 * h), atol=1e-5)
