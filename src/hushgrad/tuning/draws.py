"""All random choices of a search as functions of one secret key: how many trials, which candidates, which keys.

They are fixed before the first trial, so a search that is killed and resumed is the same search: nobody can restart it until
they like K or a candidate. **K is part of the secret.** The theorem hides among the possible numbers of trials; anyone who knows K, the
losers or their scores can tell more than epsilon allows.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

from hushgrad.errors import ArgumentError
from hushgrad.tuning.cost import Stopping

_BYTES = 32


class Draws:
    """The choices that follow from a key.

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
