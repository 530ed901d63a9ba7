"""What a fitted estimator holds is what a theorem lets out: every attribute, repr, warning, log and pickle of it."""

from __future__ import annotations

import logging
import pickle
import re
import warnings

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone

from hushgrad import estimators
from hushgrad.errors import ArgumentError
from hushgrad.estimators import DPEstimator, DPGridSearch, DPLogisticRegression
from hushgrad.testing import members

KINDS = list(members(estimators, DPEstimator).values())


def made(kind, epsilon=1.0):
    return clone(kind.examples()[0]).set_params(epsilon=epsilon, random_state=None)


def rows(n=200):
    X = np.random.default_rng(0).normal(size=(n, 3))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    return X, (X[:, 0] > 0).astype(int)


def test_every_estimator_is_one_of_the_room():
    public = [getattr(estimators, name) for name in estimators.__all__]
    assert {kind for kind in public if isinstance(kind, type) and issubclass(kind, BaseEstimator)} == {*KINDS, DPEstimator}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fitted_estimator_holds_what_is_released_and_nothing_else(kind):
    for example in kind.examples():
        model = clone(example).fit(*rows())
        assert vars(model).keys() - model.get_params(deep=False).keys() == model.released.keys()
        best = getattr(model, "best_estimator_", model)
        assert vars(best).keys() - best.get_params().keys() <= best.released.keys()
        assert all(model.released.values()) and model.guarantee_.epsilon == model.epsilon


class Once(ClassifierMixin, BaseEstimator):
    """The first one that is fitted is right about everything, all others are wrong, so the first of K trials wins."""

    fits = 0

    def __init__(self, epsilon=1.0, delta=0.0, relation="add_remove", classes=None, random_state=None, l2=1.0):
        self.epsilon, self.delta, self.relation = epsilon, delta, relation
        self.classes, self.random_state, self.l2 = classes, random_state, l2

    def fit(self, X, y):
        if self.l2 < 0:
            raise ArgumentError("Expected l2 to be positive.")
        warnings.warn("a trial is trained", stacklevel=1)
        self.classes_, self.right_ = np.array([0, 1]), type(self).fits == 0
        type(self).fits += 1
        return self

    def predict(self, X):
        return np.full(len(X), int(self.right_))


def searched(monkeypatch, caplog, capfd, trials, random_state):
    monkeypatch.setattr(Once, "fits", 0)
    monkeypatch.setattr("hushgrad.estimators.search.trials", lambda random, **_: trials)
    caplog.clear()
    search = DPGridSearch(Once(), {"l2": [1.0]}, epsilon=3.0, delta=1e-6, random_state=random_state)
    with warnings.catch_warnings(record=True) as told, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        search.fit(np.zeros((600, 1)), np.ones(600, int) - (np.arange(600) < 2))
    assert Once.fits == trials
    return (
        pickle.dumps(search),
        re.sub(r" at 0x\w+", "", repr(search)),  # of a generator, where it lies
        [str(one.message) for one in told],
        caplog.text,
        capfd.readouterr(),
        search.best_params_,
    )


@pytest.mark.parametrize("state", [int, np.random.default_rng, np.random.RandomState])
def test_two_searches_that_differ_in_the_number_of_trials_only_cannot_be_told_apart(monkeypatch, caplog, capfd, state):
    """Nor by how far the generator has moved that they were given."""
    first, *others = (searched(monkeypatch, caplog, capfd, trials, state(0)) for trials in (1, 2, 7))
    assert all(other == first for other in others)
    assert first[2] == []


def test_a_candidate_that_cannot_be_trained_is_a_lost_trial():
    X, y = rows()
    base = DPLogisticRegression(data_norm=1.0)
    grid = {"l2": [1e-40, 10.0]}
    with pytest.raises(ArgumentError):
        DPLogisticRegression(0.5, delta=0.0, data_norm=1.0, l2=1e-40).fit(X, y)
    won = set()
    for seed in range(20):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            search = DPGridSearch(base, grid, epsilon=1.0, mean_trials=2.0, random_state=seed).fit(X, y)
        assert search.predict(X).shape == (200,) and 0 <= search.score(X, y) <= 1 and search.guarantee_.epsilon == 1.0
        assert (search.best_params_ is None) == bool(told)
        won.add(None if search.best_params_ is None else search.best_params_["l2"])
    assert won == {None, 10.0}


def test_a_search_that_nobody_could_win_says_why():
    X, y = rows()
    with pytest.raises(ArgumentError, match="curvature's price"):
        DPGridSearch(DPLogisticRegression(data_norm=1.0), {"l2": [1e-40, 1e-41]}, random_state=0).fit(X, y)
    with pytest.raises(ArgumentError, match="to be a parameter of the estimator"):
        DPGridSearch(DPLogisticRegression(data_norm=1.0), {"epsilon": [1.0]}, random_state=0).fit(X, y)
    with pytest.raises(ArgumentError, match="to be a parameter of the estimator"):
        DPGridSearch(DPLogisticRegression(data_norm=1.0), {"gamma": [1.0]}, random_state=0).fit(X, y)
    with pytest.raises(ValueError, match="NaN"):
        DPGridSearch(DPLogisticRegression(data_norm=1.0), {"l2": [1.0]}, random_state=0).fit(np.full((9, 2), np.nan), y[:9])
    with pytest.raises(ArgumentError, match="bound the L2 norm of every row; it does not"):
        DPGridSearch(DPLogisticRegression(data_norm=0.5), {"l2": [1.0]}, random_state=0).fit(X, y)
    with pytest.raises(ValueError, match="Unknown label type"):
        DPGridSearch(DPLogisticRegression(data_norm=1.0), {"l2": [1.0]}, random_state=0).fit(X, np.array([None] * len(X)))


def hostile(rng, how):
    """Rows, finite all of them, that only a validation or an underflow could speak of."""
    X, y = rows(60)
    if how == "huge":
        X[:6] = rng.choice([1e308, -1e308, 1e200, 1e155], size=(6, 3))
    elif how == "tiny":
        X *= 10.0 ** -rng.uniform(0, 320, size=(60, 1))
    elif how == "alike":
        X[:] = X[0]
    return X, y


@pytest.mark.parametrize("state", ["warn", "raise"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_warning_and_no_error_tells_of_a_record_that_is_clipped(kind, state, capfd):
    """A huge record is scaled to the bound, a tiny one counts as nothing: neither is spoken of, whatever numpy was told to do."""
    rng = np.random.default_rng(7)
    for how in ("huge", "tiny", "alike"):
        for y in (slice(None), 1e308):  # labels, and targets out of bounds, which are clipped as well
            model = made(kind)
            inner = model.estimator if kind is DPGridSearch else model
            known = {"out_of_bounds": "clip", "classes": [0, 1]}
            inner.set_params(**{name: value for name, value in known.items() if name in inner.get_params()})
            X, labels = hostile(rng, how)
            targets = labels if isinstance(y, slice) or not isinstance(model, RegressorMixin) else np.where(labels, y, -y)
            with warnings.catch_warnings(), np.errstate(all=state):
                warnings.simplefilter("error")
                warnings.filterwarnings("default", message="Every trial of this search was lost")  # a release of its own
                model.fit(X, targets)
    assert capfd.readouterr() == ("", "")


def test_a_minimum_out_of_reach_does_not_tell_how_far():
    said = set()
    for seed in range(5):
        X, y = rows(100 + seed)
        with pytest.raises(ArgumentError) as refused:
            DPLogisticRegression(epsilon=1.0, data_norm=1.0, method="objective", max_iter=1).fit(X, y)
        said.add(str(refused.value))
    assert len(said) == 1


@pytest.mark.parametrize("classes", [(0, 1), (0, 1, 2)])
@pytest.mark.parametrize("share", [1e-12, 1 - 1e-12], ids=["nobody scores", "nobody trains"])
def test_an_empty_part_is_a_trial_like_any_other(share, classes):
    """Else the search is lost with probability 0.2^n, which one record more or less changes fivefold, whatever epsilon is."""
    base = DPLogisticRegression(data_norm=1.0, classes=classes)
    for records in (1, 2, 9):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            search = DPGridSearch(base, {"l2": [9.0]}, epsilon=0.5, scoring_share=share, random_state=records)
            search.fit(np.zeros((records, 2)), np.zeros(records, int))
        assert search.best_params_ == {"l2": 9.0}


def test_a_search_trains_on_the_records_and_on_nobody_of_each_class():
    seen = []

    class Seen(Once):
        def fit(self, X, y):
            seen.append((X, y))
            return super().fit(X, y)

    X, y = np.ones((50, 3)), np.arange(50) % 2
    DPGridSearch(Seen(), {"l2": [1.0]}, random_state=3).fit(X, y)
    for trained, labels in seen:
        assert not trained[:2].any() and labels[:2].tolist() == [0, 1] and (trained[2:] == 1).all() and len(trained) < 52


def test_a_label_that_is_no_class_is_told_and_no_lost_trial():
    """As a fit without a search tells it; a search that loses all its trials would tell of the record by what it releases."""
    X, y = np.zeros((20, 2)), np.append(np.arange(19) % 2, 2)
    for seed in range(20):
        with pytest.raises(ArgumentError, match="to contain every label in y"):
            DPGridSearch(DPLogisticRegression(data_norm=1.0, classes=(0, 1)), {"l2": [5.0]}, random_state=seed).fit(X, y)


def test_names_of_columns_reach_the_winner_of_a_search():
    pandas = pytest.importorskip("pandas")
    X, y = rows()
    frame = pandas.DataFrame(X, columns=[f"column {i}" for i in range(X.shape[1])])
    search = DPGridSearch(DPLogisticRegression(data_norm=1.0), {"l2": [10.0]}, random_state=0).fit(frame, y)
    assert search.best_estimator_.feature_names_in_.tolist() == list(frame.columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (search.predict(frame) == search.predict(frame.copy())).all()


@pytest.mark.parametrize("column", [False, True])
def test_one_record_moves_the_score_of_a_trial_by_one(monkeypatch, column):
    """Labels in a column beside predictions in a row would be compared each with all, and one record count as often as there are."""
    counts = []
    monkeypatch.setattr(
        DPGridSearch, "_noisy_score", lambda self, model, X, y, *_: counts.append(int((model.predict(X) == y).sum())) or 0.0
    )
    X, y = rows(61)
    for records in (60, 61):
        labels = y[:records, None] if column else y[:records]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            search = DPGridSearch(Once(), {"l2": [1.0]}, scoring_share=1 - 1e-12, mean_trials=1.5, random_state=0)
            monkeypatch.setattr(Once, "fits", 0)
            search.fit(X[:records], labels)
    trials = len(counts) // 2
    assert trials and all(abs(a - b) <= 1 for a, b in zip(counts[:trials], counts[trials:], strict=True))
    assert max(counts) <= 61


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_about_rows_that_are_no_numbers_quotes_none_of_them(kind):
    X, y = rows()
    words = X.astype(object)
    words[7, 1] = "Erika Mustermann, 1957"
    for bad in (words, words.tolist(), X + 0.7123j):
        with pytest.raises(ValueError) as refused:
            made(kind).fit(bad, y)
        assert not re.search("Mustermann|1957|7123", f"{refused.value}{refused.value.__cause__}"), refused.value
        assert refused.value.__suppress_context__
