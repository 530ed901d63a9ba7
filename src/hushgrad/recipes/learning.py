r"""Encoders that privately learn something from the records before the run: a mean, or cut points of columns.

All of them need one sum over the units (records or users) of vectors of length at most 1. It is released once, with
Gaussian noise,

    s = sum_u v_u + noise_multiplier z,   |v_u| <= 1,   z standard normal,

and everything else follows from s. The event is ``Gaussian(noise_multiplier)``, which is in the plan as ``before``. If users are
protected, v_u is the mean over the user's records.

**Formal guarantee.** A unit that is added, removed or zeroed moves the sum by at most 1, one that is replaced by at most 2, in real
numbers; sums and noise are double precision, where rounding moves it by less than 1e-9 more for up to a million records. Where the plan
is certified, the noise is larger by kappa = 1e-4 of itself, which covers that; where it is secure, sum plus noise is correctly rounded.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hushgrad import _check
from hushgrad.clipping.certificate import KAPPA
from hushgrad.noise import Source
from hushgrad.recipes.encoders import Encoder


class LearningEncoder(Encoder):
    """An encoder in two stages: ``prepared`` needs nothing learned, ``finished`` may."""

    @property
    @abstractmethod
    def learns(self) -> float | None:
        """The noise multiplier of the sum that must be released first; None if nothing is left to learn."""

    @abstractmethod
    def prepared(self, rows: Sequence[Any]) -> Any:
        """The rows, as far as they can be encoded with nothing learned."""

    @abstractmethod
    def statistic(self, prepared: Any, chosen: np.ndarray, shares: np.ndarray) -> Tensor:
        """The sum of the vectors of the ``chosen`` rows, each times its share, in double precision."""

    @abstractmethod
    def learned(self, noisy: Tensor, records: float) -> LearningEncoder:
        """This encoder with what was learned from the noisy sum; ``records`` is the public number of units."""

    @abstractmethod
    def finished(self, prepared: Any) -> Tensor:
        """The inputs of a model."""

    def __call__(self, rows: Sequence[Any]) -> Tensor:
        """The inputs of a model for ``rows``, one by one."""
        if self.learns is not None:
            _check.fail("encoder", type(self).__name__, "to have learned first", "A training session does it; see its folder.")
        return self.finished(self.prepared(rows))


def learn(
    encoder: LearningEncoder,
    prepared: Any,
    chosen: np.ndarray,
    *,
    records: float,
    secret: bytes,
    owners: Sequence[str] | None = None,
    certified: bool = False,
    secure: bool = False,
) -> LearningEncoder:
    """Release the encoder's sum over the ``chosen`` rows with noise from its own ``secret``, and return the encoder that learned from it.

    Args:
        encoder: one that has something to learn.
        prepared: all rows.
        chosen: the numbers of the private ones among them.
        records: their public number; that of their owners, where these are given.
        secret: at least 16 bytes that the run's own noise does not come from.
        owners: of the chosen rows, where whole users are protected.
        certified: whether the noise covers rounding in the sum, too.
        secure: whether sum plus noise is correctly rounded to a public grid.
    """
    if encoder.learns is None:
        return encoder
    total = encoder.statistic(prepared, chosen, _shares(len(chosen), owners))
    key = hashlib.sha256(b"hushgrad: before the run" + secret).digest()
    scale = encoder.learns * (1 + KAPPA * _check.instance(bool, certified=certified))
    return encoder.learned(Source(key=key, secure=secure).z(0, 0, total, out=total, scale=scale), records)


def _shares(count: int, owners: Sequence[str] | None) -> np.ndarray:
    """The weight of each row: 1, or its part of its owner's 1."""
    if owners is None:
        return np.ones(count)
    _, place, records = np.unique(np.array(owners, dtype=object), return_inverse=True, return_counts=True)
    return 1.0 / records[place]
