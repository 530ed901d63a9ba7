"""A private search: the distribution of its trials, its random choices, and its naive and its true epsilon."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad._value import Value
from hushgrad.errors import ArgumentError
from hushgrad.events import Compose, Event, OneOf, Relation, RepeatAndSelect

_BYTES = 32  # of a key
ACCOUNTANT = "rdp"  # the theorem is about Rényi divergences


class _Tuning(Value, family="tuning"):
    """The family of this package's values."""


@dataclass(frozen=True, kw_only=True)
class Stopping(_Tuning):
    r"""The distribution of the secret number K of trials.

    Truncated negative binomial, P(K = k) ∝ (1 - γ)^k Π_{l<k} (l + ``shape``)/(l + 1) for k >= 1, with γ such that the mean is
    ``mean``; ``shape`` 1 is geometric, 0 logarithmic; infinity stands for Poisson, where K may be 0 and nothing is released.
    A smaller shape costs less and varies more.

    **Formal guarantee.** Let A be a mechanism whose whole output (a model *and* its score) has Rényi divergences D(λ). Run A K
    times and release the best output only. For all λ > 1 and λ' >= 1 the result has divergence at most
    D(λ) + (1 + η)(1 - 1/λ') D(λ') + (1 + η) ln(1/γ)/λ' + ln(E K)/(λ - 1), with η the shape.

        >>> print(Stopping(mean=10.0))
        K trials, logarithmic with mean 10 (at most 41 in 95 of 100 searches)

    Reference: Papernot and Steinke 2022, theorem 2 (negative binomial) and theorem 6 (Poisson).
    """

    mean: float = 10.0
    shape: float = 0.0

    def __post_init__(self) -> None:
        mean = _check.between(0, 1e6, mean=self.mean)
        object.__setattr__(self, "mean", mean)
        if self.shape != math.inf:
            _check.between(-1, 1e6, shape=self.shape)
            if mean < 1:
                _check.fail("mean", mean, "to be at least 1", "Only a Poisson number of trials can be 0.")
        object.__setattr__(self, "shape", float(self.shape))

    @property
    def name(self) -> str:
        """Poisson, geometric, logarithmic, or negative binomial with its shape."""
        known = {math.inf: "Poisson", 1.0: "geometric", 0.0: "logarithmic"}
        return known.get(self.shape, f"negative binomial of shape {self.shape:g}")

    def event(self, trial: Event) -> Event:
        """A search whose trials cost ``trial`` each."""
        return RepeatAndSelect(of=trial, mean=self.mean, shape=self.shape)

    def __str__(self) -> str:
        most = number_of_trials(0.95, self)
        return f"K trials, {self.name} with mean {self.mean:g} (at most {most} in 95 of 100 searches)"


@dataclass(frozen=True, kw_only=True)
class TuningCost(_Tuning):
    """Two epsilons at one delta: ``naive`` counts the winner's training only, ``epsilon`` the whole search. Claim the second.

    >>> from hushgrad.events import Gaussian
    >>> from hushgrad.tuning import Stopping, tuning_cost
    >>> cost = tuning_cost(Gaussian(5.0), delta=1e-5, stopping=Stopping(mean=10.0))
    >>> cost.naive < cost.epsilon
    True
    """

    naive: float
    epsilon: float
    delta: float
    stopping: Stopping
    event: Event

    def __str__(self) -> str:
        return (
            f"naive epsilon {at_most(self.naive)} (one run, as if it had not been chosen), true epsilon {at_most(self.epsilon)} "
            f"at delta {at_most(self.delta, 6)}: {self.stopping}"
        )


def tuning_cost(
    trial: Event, *, delta: float, stopping: Stopping, relation: Relation | str = Relation.ADD_REMOVE, before: Event | None = None
) -> TuningCost:
    """The cost of a search whose trials cost ``trial`` each: training, and scoring if that uses private data.

    Args:
        trial: what one trial costs.
        delta: of the whole search.
        stopping: the distribution of the number of trials.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".
        before: what was released once from the same records before the first trial, if anything was.

    >>> from hushgrad.events import Gaussian
    >>> cost = tuning_cost(Gaussian(10.0), delta=1e-6, stopping=Stopping(mean=10.0))
    >>> round(cost.naive, 2), round(cost.epsilon, 2)
    (0.4, 0.74)
    """
    from hushgrad import accounting

    event = _after(before, stopping.event(trial))
    return TuningCost(
        naive=max(accounting.epsilon(_after(before, one), delta=delta, relation=relation) for one in _alternatives(trial)),
        epsilon=accounting.epsilon(event, delta=delta, relation=relation, accountant=ACCOUNTANT),
        delta=delta,
        stopping=stopping,
        event=event,
    )


def _after(before: Event | None, event: Event) -> Event:
    return event if before is None else before + event


def _alternatives(trial: Event) -> list[Event]:
    """The events that a trial may have, one after the other."""
    first, *rest = trial.events if isinstance(trial, Compose) and trial.events else (trial,)
    return [Compose((one, *rest)) for one in (first.events if isinstance(first, OneOf) else (first,))]


def calibrated_noise(
    trial: Callable[[float], Event],
    *,
    epsilon: float,
    delta: float,
    stopping: Stopping,
    relation: Relation | str = Relation.ADD_REMOVE,
    before: Event | None = None,
) -> float:
    """The smallest noise multiplier with which the *whole search* is (``epsilon``, ``delta``)-DP.

    Args:
        trial: the event of one trial for a noise multiplier.
        epsilon: of the whole search.
        delta: of the whole search.
        stopping: the distribution of the number of trials.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".
        before: what was released once from the same records before the first trial, if anything was.

    >>> from hushgrad.events import Gaussian
    >>> noise = calibrated_noise(Gaussian, epsilon=1.0, delta=1e-6, stopping=Stopping(mean=10.0))
    >>> tuning_cost(Gaussian(noise), delta=1e-6, stopping=Stopping(mean=10.0)).epsilon <= 1.0
    True
    """
    from hushgrad import accounting

    return accounting.calibrate(
        lambda noise: _after(before, stopping.event(trial(noise))),
        epsilon=_check.positive(epsilon=epsilon),
        delta=delta,
        relation=relation,
        accountant=ACCOUNTANT,
    )


class Draws:
    """All random choices of a search as functions of one secret key: how many trials, which candidates, which keys.

    They are fixed before the first trial, so a search that is killed and resumed is the same search: nobody can restart it until
    they like K or a candidate. **K is part of the secret.** The theorem hides among the possible numbers of trials; anyone who knows
    K, the losers or their scores can tell more than epsilon allows.

    >>> draws = Draws(bytes(32))
    >>> draws.trials(Stopping(mean=10.0)) == Draws(bytes(32)).trials(Stopping(mean=10.0))
    True
    """

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes) or len(key) != _BYTES:
            raise ArgumentError(f"Expected key to be {_BYTES} bytes.")  # not through _check.fail, which would show it
        self._key = key

    def trials(self, stopping: Stopping) -> int:
        """K, drawn once."""
        return number_of_trials(self._uniform("trials"), stopping)

    def candidate(self, trial: int, candidates: int) -> int:
        """Which candidate a trial takes: uniform over all, independent of the other trials."""
        return int.from_bytes(self._derive(f"candidate/{trial}"), "little") % candidates  # a bias of 2^-250 at the most

    def key(self, trial: int) -> bytes:
        """The key of a trial's training: its batches and its noise."""
        return self._derive(f"training/{trial}")

    def seed(self, trial: int) -> int:
        """A seed for what is not secret: initial weights."""
        return int.from_bytes(self._derive(f"weights/{trial}")[:7], "little")

    def tie(self, trial: int) -> str:
        """Orders trials of equal score, so that 'the best' is always one output, whatever the order of the trials."""
        return self._derive(f"tie/{trial}").hex()

    def scoring(self, trial: int) -> bytes:
        """The key of a trial's scoring: who is held out, and the noise on the score."""
        return self._derive(f"scoring/{trial}")

    def _uniform(self, label: str) -> float:
        return (int.from_bytes(self._derive(label)[:8], "little") >> 11) / (1 << 53)

    def _derive(self, label: str) -> bytes:
        return hashlib.blake2b(label.encode(), digest_size=_BYTES, key=self._key, person=b"hushgrad/tuning").digest()

    def __repr__(self) -> str:
        return "Draws(<secret>)"


def number_of_trials(uniform: float, stopping: Stopping) -> int:
    """The quantile function of K at ``uniform`` in [0, 1): a uniform number makes a draw.

    >>> [number_of_trials(u, Stopping(mean=2.0, shape=1.0)) for u in (0.0, 0.49, 0.51, 0.76)]  # geometric: halves
    [1, 1, 2, 3]
    """
    if math.isinf(stopping.shape):
        cumulative = _poisson(stopping.mean)
        return int(np.searchsorted(cumulative, uniform, side="right").clip(max=cumulative.size - 1))
    from hushgrad.accounting.trial_counts import number_at

    return number_at(uniform, mean=stopping.mean, shape=stopping.shape)


@lru_cache(maxsize=16)
def _poisson(mean: float) -> np.ndarray:
    """The cumulative probabilities of 0, 1, ..., as far as double precision can see."""
    k = np.arange(1, int(mean + 40 * math.sqrt(mean)) + 100)
    log_weight = np.concatenate([[0.0], np.cumsum(math.log(mean) - np.log(k))])
    weight = np.exp(log_weight - log_weight.max())
    return np.cumsum(weight / weight.sum())
