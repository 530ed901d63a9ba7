"""The estimators: scikit-learn's conventions, refusals, sensitivities, and guarantees that are what was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special, stats
from sklearn.base import MetaEstimatorMixin, clone
from sklearn.datasets import load_breast_cancer, load_digits, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, normalize
from sklearn.utils.estimator_checks import parametrize_with_checks

from hushgrad import accounting, estimators
from hushgrad.accounting.classical import classical_gaussian_sigma
from hushgrad.accounting.rdp import success_probability
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.estimators import (
    DPEstimator,
    DPGridSearch,
    DPLinearSVC,
    DPLogisticRegression,
    DPMean,
    DPMedian,
    DPRidge,
    bounds,
    quantile,
    select,
)
from hushgrad.estimators.bounded import bounded_rows
from hushgrad.estimators.losses import HuberHinge, Logistic
from hushgrad.estimators.methods import Budget
from hushgrad.estimators.randomness import REPRODUCIBLE, Randomness, randomness
from hushgrad.estimators.search import base_epsilon, trials
from hushgrad.estimators.solver import Objective, minimum
from hushgrad.events import Relation
from hushgrad.testing import members


@parametrize_with_checks(
    [
        example
        for kind in members(estimators, DPEstimator).values()
        for example in kind.examples()
        if not isinstance(example, MetaEstimatorMixin)  # which has what its own estimator has
    ]
)
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def cancer():
    X, y = load_breast_cancer(return_X_y=True)
    return normalize(X / np.array([30.0] * 30)), y


@pytest.mark.parametrize("kind", [DPLogisticRegression, DPLinearSVC])
@pytest.mark.parametrize("method", ["auto", "objective", "output", "gd"])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one", "zero_out"])
def test_the_guarantee_is_what_was_asked_for(kind, method, relation, cancer):
    model = kind(0.7, delta=1e-4, data_norm=1.0, method=method, relation=relation, classes=[0, 1]).fit(*cancer)
    guarantee = model.guarantee_
    assert (guarantee.epsilon, guarantee.delta, guarantee.relation) == (0.7, 1e-4, Relation.of(relation))
    assert guarantee.unit == "row"
    assert guarantee.notes == ()
    # Where the event is a composition of Gaussians, the accountant must agree with the claim.
    certified = accounting.epsilon(guarantee.event, delta=1e-4, relation=guarantee.relation)
    assert certified <= 0.7 * (1 + 1e-6)


def test_seeded_and_data_derived_choices_are_noted(cancer):
    notes = DPLogisticRegression(1.0, data_norm=1.0, random_state=3).fit(*cancer).guarantee_.notes
    assert REPRODUCIBLE in notes
    assert any("labels" in note for note in notes)


@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_accuracy_grows_with_epsilon_and_noise_falls(delta):
    X, y = make_classification(n_samples=3000, n_features=10, random_state=1)
    X = normalize(X)
    models = [DPLogisticRegression(e, delta=delta, data_norm=1.0, random_state=0).fit(X, y) for e in (0.05, 0.5, 5.0, 50.0)]
    noise = [m.noise_scale_ for m in models]
    assert noise == sorted(noise, reverse=True)
    assert models[-1].score(X, y) > 0.85
    assert models[-1].score(X, y) >= models[0].score(X, y)


def test_multinomial_beats_one_against_the_rest_at_the_same_budget():
    X, y = load_digits(return_X_y=True)
    X = normalize(X - 8.0)
    score = {kind: DPLogisticRegression(3.0, delta=1e-5, data_norm=1.0, multi_class=kind, random_state=0).fit(X, y).score(X, y)
             for kind in ("multinomial", "ovr")}  # fmt: skip
    assert score["multinomial"] > 0.8
    assert score["multinomial"] > score["ovr"]


def test_pipelines_clones_and_grid_search():
    X, y = make_classification(n_samples=600, random_state=0)
    pipeline = make_pipeline(Normalizer(), DPLogisticRegression(5.0, data_norm=1.0, random_state=0))
    search = GridSearchCV(pipeline, {"dplogisticregression__l2": [0.5, 5.0]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.7
    assert clone(pipeline[1]).get_params() == pipeline[1].get_params()


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("data_norm=None", lambda X, y: DPLogisticRegression(1.0).fit(X, y)),
        ("out_of_bounds=", lambda X, y: DPLogisticRegression(1.0, data_norm=1.0, out_of_bounds="ignore").fit(X, y)),
        ("bound the L2 norm of every row; it does not", lambda X, y: DPLogisticRegression(1.0, data_norm=0.5).fit(X, y)),
        ("epsilon=-1", lambda X, y: DPLogisticRegression(-1.0, data_norm=1.0).fit(X, y)),
        ("delta=1", lambda X, y: DPLogisticRegression(1.0, delta=1.0, data_norm=1.0).fit(X, y)),
        ("Did you mean 'objective'", lambda X, y: DPLogisticRegression(1.0, data_norm=1.0, method="objectve").fit(X, y)),
        ("l2=-3", lambda X, y: DPLogisticRegression(1.0, data_norm=1.0, l2=-3).fit(X, y)),
        ("larger l2", lambda X, y: DPLogisticRegression(0.1, data_norm=1.0, l2=1e-6).fit(X, y)),
        ("classes=", lambda X, y: DPLogisticRegression(1.0, data_norm=1.0, classes=[1, 2]).fit(X, y)),
        ("delta=0.0", lambda X, y: DPLogisticRegression(1.0, delta=0.0, data_norm=1.0, method="gd").fit(X, y)),
        ("target_bounds=None", lambda X, y: DPRidge(1.0, data_norm=1.0).fit(X, y)),
        ("low < high", lambda X, y: DPRidge(1.0, data_norm=1.0, target_bounds=(1, 0)).fit(X, y)),
        ("bounds=None", lambda X, y: DPMedian(1.0).fit(X)),
        ("data_norm=None", lambda X, y: DPMean(1.0).fit(X)),
        ("param_grid=", lambda X, y: DPGridSearch(DPLogisticRegression(data_norm=1.0), {"epsilon": [1.0]}).fit(X, y)),
        ("tol=", lambda X, y: DPLogisticRegression(1.0, data_norm=1.0, method="objective", max_iter=1).fit(X, y)),
        ("tol=nan", lambda X, y: DPLogisticRegression(1.0, data_norm=1.0, tol=math.nan).fit(X, y)),
        ("max_iter=0", lambda X, y: DPLinearSVC(1.0, data_norm=1.0, max_iter=0).fit(X, y)),
        ("gd_steps=0", lambda X, y: DPLogisticRegression(1.0, data_norm=1.0, method="gd", gd_steps=0).fit(X, y)),
        ("rate=-1", lambda X, y: DPLogisticRegression(1.0, data_norm=1.0, method="gd", learning_rate=-1).fit(X, y)),
        ("l2=0", lambda X, y: DPRidge(1.0, data_norm=1.0, target_bounds=(0, 1), method="objective", l2=0).fit(X, y)),
        ("low, high", lambda X, y: DPRidge(1.0, data_norm=1.0, target_bounds=1.0).fit(X, y)),
        ("parameters classes, delta", lambda X, y: DPGridSearch(LogisticRegression(), {}).fit(X, y)),
        ("to be a classifier", lambda X, y: DPGridSearch(DPRidge(data_norm=1.0), {}).fit(X, y)),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_remedy(words, make, cancer):
    with pytest.raises(ArgumentError, match=words):
        make(*cancer)


def test_rows_beyond_the_bound_are_clipped_when_asked(cancer):
    X, y = cancer
    long = X.copy()
    long[0] *= 1000
    same = [
        DPLogisticRegression(5.0, data_norm=1.0, out_of_bounds="clip", random_state=0).fit(rows, y).coef_ for rows in (X, long)
    ]
    np.testing.assert_allclose(*same, atol=1e-12)


# Sensitivities -----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 10), st.sampled_from([Logistic(), HuberHinge(0.3)]))
@example(244, 0.125, HuberHinge(0.3))  # Newton steps that went in a circle
def test_the_minimum_moves_by_at_most_the_lectures_bound(seed, l2, loss):
    rng = np.random.default_rng(seed)
    X, y = normalize(rng.normal(size=(6, 3))), rng.choice([-1.0, 1.0], 6)
    other, label = normalize(rng.normal(size=(1, 3)))[0], rng.choice([-1.0, 1.0])
    a = minimum(Objective(loss, X, y, l2, np.zeros(3)), tol=1e-10, max_iter=500).theta
    X2, y2 = X.copy(), y.copy()
    X2[0], y2[0] = other, label
    replaced = minimum(Objective(loss, X2, y2, l2, np.zeros(3)), tol=1e-10, max_iter=500).theta
    removed = minimum(Objective(loss, X[1:], y[1:], l2, np.zeros(3)), tol=1e-10, max_iter=500).theta
    assert np.linalg.norm(a - replaced) <= 2 / l2 + 1e-8
    assert np.linalg.norm(a - removed) <= 1 / l2 + 1e-8


def test_the_bound_is_attained_by_a_worst_case_pair():
    """A planted defect, the sensitivity divided by a batch size, would promise less than what happens here."""
    l2 = 1000.0
    X, y = np.ones((1, 1)), np.ones(1)
    hinge = HuberHinge(0.01)
    one = minimum(Objective(hinge, X, y, l2, np.zeros(1)), tol=1e-12, max_iter=500).theta
    other = minimum(Objective(hinge, X, -y, l2, np.zeros(1)), tol=1e-12, max_iter=500).theta
    assert np.abs(one - other)[0] == pytest.approx(2 / l2, rel=1e-9)


def test_newton_and_lbfgs_find_the_same_certified_minimum(monkeypatch):
    X, y = make_classification(n_samples=300, n_features=8, random_state=0)
    objective = Objective(Logistic(), X, 2.0 * y - 1, 0.5, np.linspace(-3, 3, 8))
    newton = minimum(objective, tol=1e-8, max_iter=200)
    monkeypatch.setattr("hushgrad.estimators.solver._NEWTON_PARAMETERS", 0)
    lbfgs = minimum(objective, tol=1e-5, max_iter=2000)
    assert newton.gradient_norm <= 1e-8
    assert np.linalg.norm(newton.theta - lbfgs.theta) <= (1e-8 + 1e-5) / 0.5


# Randomness --------------------------------------------------------------------------------------------------------------------------


def test_unseeded_noise_is_never_the_same_and_has_the_right_distribution():
    """KS tests at a false-alarm rate of 1e-6; a scale wrong by 2 % is rejected."""
    random = randomness(7)
    z = random.normal(1_000_000)
    assert stats.kstest(z, "norm").pvalue > 1e-6
    assert stats.kstest(1.02 * z, "norm").pvalue < 1e-6
    assert stats.kstest(random.exponential(200_000), "expon").pvalue > 1e-6
    assert stats.kstest(random.gumbel(200_000), "gumbel_r").pvalue > 1e-6
    lengths = np.array([np.linalg.norm(random.spherical(5)) for _ in range(5000)])
    assert stats.kstest(lengths, "gamma", args=(5,)).pvalue > 1e-6
    draws = {randomness(None).bits(1)[0] for _ in range(300)}
    assert len(draws) == 300  # a byte of entropy would collide long before


def test_two_unseeded_fits_differ_and_two_seeded_ones_agree(cancer):
    fits = [DPLogisticRegression(1.0, data_norm=1.0, random_state=seed).fit(*cancer).coef_ for seed in (None, None, 5, 5)]
    assert not np.array_equal(fits[0], fits[1])
    assert np.array_equal(fits[2], fits[3])


# The exponential mechanism -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gumbel", "permute_and_flip"])
def test_selection_probabilities_respect_epsilon(method):
    """Two neighbouring score vectors: the log-odds of every candidate stay within epsilon (standard error 0.02)."""
    epsilon, runs = 1.0, 40_000
    frequencies = []
    for scores in ([0.0, 0.0, 1.0], [1.0, 1.0, 0.0]):
        counts = np.bincount(
            [select(scores, epsilon=epsilon, sensitivity=1.0, method=method, random_state=seed) for seed in range(runs // 10)],
            minlength=3,
        )
        frequencies.append(counts / counts.sum())
    assert np.abs(np.log(frequencies[0] / frequencies[1])).max() <= epsilon + 0.15
    if method == "gumbel":
        expected = np.exp([0, 0, 0.5])
        np.testing.assert_allclose(frequencies[0], expected / expected.sum(), atol=0.03)


def test_the_exponential_mechanism_refuses_what_it_cannot_sample():
    with pytest.raises(NoTheorem, match="finite list"):
        select(np.zeros((3, 3)), epsilon=1.0, sensitivity=1.0)
    with pytest.raises(ArgumentError, match="scores="):
        select([1.0, float("nan")], epsilon=1.0, sensitivity=1.0)


def test_private_quantiles_are_near_the_true_ones():
    values = np.random.default_rng(0).normal(size=20_001)
    for q in (0.1, 0.5, 0.9):
        estimates = [quantile(values, q=q, epsilon=1.0, bounds=(-10, 10), random_state=s) for s in range(5)]
        np.testing.assert_allclose(estimates, np.quantile(values, q), atol=0.03)


def test_quantile_density_ratio_is_within_epsilon_exactly():
    """Interval by interval, the density of neighbouring data sets differs by a factor of at most e^epsilon."""
    epsilon, x = 0.8, np.array([1.0, 2.0, 2.5, 7.0])

    def density(values, at):
        edges = np.concatenate([[0.0], np.sort(values), [10.0]])
        mass = np.diff(edges) * np.exp(-epsilon / (2 * 0.5) * np.abs(np.arange(values.size + 1) - 0.5 * values.size))
        return (mass / mass.sum() / np.diff(edges))[np.searchsorted(edges, at) - 1]

    points = np.linspace(0.05, 9.95, 67)
    for extra in (0.5, 2.2, 9.0):
        ratio = np.log(density(x, points) / density(np.append(x, extra), points))
        assert np.abs(ratio).max() <= epsilon + 1e-12


def test_a_quantile_whose_record_is_replaced_by_nothing_is_as_noisy_as_for_any_replacement():
    """The number of records is public then, so that only the rank moves, and by a whole one."""
    values, seeds = np.linspace(0, 1, 30), range(20)
    draw = {r: [quantile(values, epsilon=1.0, bounds=(0, 1), relation=r, random_state=s) for s in seeds] for r in Relation}
    assert draw[Relation.ZERO_OUT] == draw[Relation.REPLACE_ONE] != draw[Relation.ADD_REMOVE]


# Attributes ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["objective", "output", "gd"])
def test_what_a_fit_tells_of_its_iterations_is_public(method, cancer):
    """How many it takes to the minimum depends on the data, and no noise hides it."""
    X, y = cancer
    model = DPLogisticRegression(1.0, data_norm=1.0, method=method, max_iter=300, gd_steps=20, classes=[0, 1])
    few, many = clone(model).fit(X[:5], y[:5]), clone(model).fit(X, y)
    assert few.n_iter_ == many.n_iter_ == (20 if method == "gd" else 300)


def test_classes_may_be_any_collection(cancer):
    assert DPLogisticRegression(1.0, data_norm=1.0, classes={0, 1}).fit(*cancer).classes_.tolist() == [0, 1]


# Selection -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
def test_the_number_of_trials_has_the_mean_it_promises(shape):
    random = randomness(0)
    counts = np.array([trials(random, mean=8.0, shape=shape) for _ in range(4000)])
    assert counts.min() >= 1
    assert counts.mean() == pytest.approx(8.0, abs=5 * counts.std() / math.sqrt(len(counts)))


@pytest.mark.parametrize(("mean", "shape"), [(100.0, -0.5), (8.0, 0.0), (8.0, 2.0), (3000.0, 3000.0)])
def test_the_number_of_trials_is_drawn_from_the_whole_distribution(mean, shape):
    """Cut at 60 means, as it once was, the tail of shape -1/2 loses 0.3 %: more than any delta."""
    gamma = success_probability(mean, shape)
    k = np.arange(1, 2_000_000)
    log_mass = k * np.log1p(-gamma) + special.gammaln(k + shape) - special.gammaln(k + 1)  # up to a constant
    cumulative = np.cumsum(special.softmax(log_mass))
    for place in (1e-6, 0.5, 0.99, 0.999, 1 - 1e-5):
        found = trials(Fixed(place), mean=mean, shape=shape)
        assert cumulative[found - 1] == pytest.approx(place, abs=1e-7) or (
            (cumulative[found - 2] if found > 1 else 0.0) < place <= cumulative[found - 1]
        )


class Fixed(Randomness):
    """A uniform number that was chosen beforehand."""

    def __init__(self, place):
        self.place = place

    def bits(self, count):
        return np.full(count, self.place * 2.0**64, np.uint64)


def test_selection_costs_what_the_theorem_says():
    pure = Budget(3.0, 0.0, Relation.ADD_REMOVE)
    assert base_epsilon(pure, mean=10, shape=1.0) == pytest.approx(1.0)
    relaxed = base_epsilon(Budget(3.0, 1e-6, Relation.ADD_REMOVE), mean=10, shape=1.0)
    assert 1.0 <= relaxed < 3.0


def test_grid_search_finds_a_good_candidate():
    X, y = make_classification(n_samples=4000, n_features=8, random_state=2)
    base = DPLogisticRegression(data_norm=4.0, out_of_bounds="clip")
    search = DPGridSearch(base, {"l2": [30.0, 1e7]}, epsilon=6.0, delta=1e-6, mean_trials=12.0, random_state=1).fit(X, y)
    assert search.best_params_ == {"l2": 30.0}
    assert search.score(X, y) > 0.75
    assert search.guarantee_.epsilon == 6.0
    assert search.predict_proba(X[:3]).shape == (3, 2)


def test_a_search_answers_for_its_winner_and_knows_every_label():
    X, y = make_classification(n_samples=500, n_features=4, random_state=0)
    words = np.where(y == 1, "yes", "no").astype(object)
    words[7] = "rare"  # in one of the two parts only
    base = DPLogisticRegression(data_norm=4.0, out_of_bounds="clip")
    search = DPGridSearch(base, {"l2": [1e3]}, epsilon=6.0, delta=1e-6, mean_trials=3.0, random_state=1).fit(X.tolist(), words)
    assert search.best_estimator_.guarantee_ == search.guarantee_
    assert any("labels" in note for note in search.guarantee_.notes)
    assert search.classes_.tolist() == ["no", "rare", "yes"]
    assert search.decision_function(X).shape == (500, 3)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        search.fit(X, words[1:])


# The lectures' bounds --------------------------------------------------------------------------------------------------------------------


def risk(theta, X, y):
    return np.logaddexp(0, -y * (X @ theta)).mean()


def test_measured_excess_risk_stays_below_the_bounds_and_has_their_slope():
    """Logistic loss on unit rows (L = 1): output perturbation with the lectures' noise over n; slope -1 in n at fixed μ."""
    rng, l2, epsilon, delta, d = np.random.default_rng(0), 0.1, 0.5, 1e-5, 5
    measured = []
    sizes = [1000, 2000, 4000, 8000]
    for n in sizes:
        X = normalize(rng.normal(size=(n, d)))
        y = np.where(X @ np.ones(d) + 0.3 * rng.normal(size=n) > 0, 1.0, -1.0)
        best = minimum(Objective(Logistic(), X, y, l2 * n, np.zeros(d)), tol=1e-9, max_iter=200).theta
        sigma = classical_gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=2 / (l2 * n))
        noisy = [risk(best + sigma * rng.normal(size=d), X, y) - risk(best, X, y) for _ in range(300)]
        bound = bounds.output_perturbation_regularised(n=n, d=d, epsilon=epsilon, delta=delta, lipschitz=1.0, l2=l2)
        assert np.mean(noisy) < bound
        measured.append(np.mean(np.abs(noisy)))
    slope = np.polyfit(np.log(sizes), np.log(measured), 1)[0]
    assert -1.25 < slope < -0.75


@pytest.mark.parametrize(
    ("vary", "values", "power"), [("n", [500, 2000, 8000], -1.0), ("d", [4, 16, 64], 0.5), ("epsilon", [0.1, 0.3, 0.9], -1.0)]
)
def test_output_perturbation_attains_the_predicted_slopes_on_its_worst_case(vary, values, power):
    """Loss |w - x| with all data at 0: the excess risk is E|Z|, below the bound and with its slope in n, d and epsilon."""
    rng, setting, measured = np.random.default_rng(1), {"n": 2000, "d": 16, "epsilon": 0.5}, []
    for value in values:
        setting[vary] = value
        sigma = classical_gaussian_sigma(epsilon=setting["epsilon"], delta=1e-5, sensitivity=2 / (0.1 * setting["n"]))
        excess = np.linalg.norm(sigma * rng.normal(size=(2000, setting["d"])), axis=1).mean()
        assert excess < bounds.output_perturbation_regularised(**setting, delta=1e-5, lipschitz=1.0, l2=0.1)
        measured.append(excess)
    assert np.polyfit(np.log(values), np.log(measured), 1)[0] == pytest.approx(power, abs=0.05)


def test_objective_perturbation_and_gradient_descent_stay_below_their_bounds():
    """Logistic loss on unit rows: the excess over the best point of the unit ball, averaged over seeds, and falling with n."""
    rng, d, epsilon, delta = np.random.default_rng(2), 5, 0.5, 1e-5
    excess = {"objective": [], "gd": []}
    for n in (1000, 16_000):
        X = normalize(rng.normal(size=(n, d)))
        y = np.where(X @ np.ones(d) + 0.5 * rng.normal(size=n) > 0, 1.0, -1.0)
        ball = minimum(Objective(Logistic(), X, y, 0.35 * n / 3, np.zeros(d)), tol=1e-8, max_iter=300).theta
        ball /= max(1.0, np.linalg.norm(ball))
        for method in excess:
            fits = [
                DPLogisticRegression(
                    epsilon,
                    delta=delta,
                    data_norm=1.0,
                    method=method,
                    relation="replace_one",
                    fit_intercept=False,
                    random_state=s,
                ).fit(X, y)
                for s in range(10)
            ]
            excess[method].append(np.mean([risk(fit.coef_[0], X, y) for fit in fits]) - risk(ball, X, y))
        common = {"n": n, "d": d, "epsilon": epsilon, "delta": delta, "lipschitz": 1.0, "diameter": 2.0}
        assert excess["objective"][-1] < bounds.objective_perturbation(**common, smoothness=0.25)
        assert excess["gd"][-1] < bounds.gradient_descent(**common)
    assert excess["objective"][1] < excess["objective"][0]
    assert excess["gd"][1] < excess["gd"][0]


def test_bounds_have_the_lectures_rates():
    common = {"epsilon": 0.5, "delta": 1e-6, "lipschitz": 1.0, "diameter": 1.0}
    for function, extra, power in [
        (bounds.output_perturbation, {}, 0.5),
        (bounds.objective_perturbation, {"smoothness": 0.25}, 1.0),
    ]:
        at = [function(n=n, d=16, **common, **extra) for n in (10**6, 4 * 10**6)]
        assert math.log(at[0] / at[1]) / math.log(4) == pytest.approx(power, abs=0.02)
        wide = function(n=10**6, d=64, **common, **extra)
        assert math.log(wide / at[0]) / math.log(4) == pytest.approx(power / 2, abs=0.02)
        assert function(n=1, d=16, **common, **extra) == 1.0
    descent = [bounds.gradient_descent(n=n, d=16, **common) for n in (10**6, 10**8)]
    assert descent[1] < descent[0] / 30  # 1/n up to logarithms
    with pytest.raises(ArgumentError, match="epsilon"):
        bounds.output_perturbation(n=10, d=1, epsilon=2.0, delta=1e-5, lipschitz=1.0, diameter=1.0)


@pytest.mark.parametrize("width", [3, 400, 16_000])
@pytest.mark.parametrize("bound", [1.0, 3.7])
def test_rows_normalised_in_single_precision_are_accepted_and_kept_within_the_bound(width, bound):
    rows = np.random.default_rng(width).normal(size=(50, width)).astype(np.float32)
    rows *= np.float32(bound) / np.linalg.norm(rows, axis=1, keepdims=True)
    kept = bounded_rows(rows.astype(np.float64), bound, out_of_bounds="raise")
    assert (np.linalg.norm(kept, axis=1) <= bound * (1 + 1e-14)).all()
    with pytest.raises(ArgumentError, match="bound the L2 norm of every row; it does not"):
        bounded_rows(rows * 1.001, bound, out_of_bounds="raise")
