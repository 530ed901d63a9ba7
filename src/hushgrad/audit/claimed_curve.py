"""The claimed trade-off curve, analysed once and evaluated often."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from hushgrad.accounting import delta_curve, epsilon
from hushgrad.events import Event, Relation

_SMALLEST_DELTA = 1e-7  # an audit of thousands of canaries cannot see error rates below this
_LARGEST_EPSILON = 40.0  # nor rates below e^-40


class ClaimedCurve:
    r"""The least miss rate at a false-alarm rate that ``event`` allows: a lower bound on its trade-off curve f.

        f(a) >= max over epsilon of max(0, 1 - delta(epsilon) - e^epsilon a, e^-epsilon (1 - delta(epsilon) - a))

    over a fixed set of epsilons. Fewer of them make the curve lower, never higher, so rounding cannot refute a true claim.

        >>> from hushgrad.events import Gaussian
        >>> curve = ClaimedCurve(Gaussian(1.0))
        >>> round(float(curve(0.05)), 2)  # Phi(Phi^-1(0.95) - 1) = 0.74
        0.74

    Reference: Dong, Roth and Su 2022, propositions 2.4 and 2.5.
    """

    def __init__(self, event: Event, *, relation: Relation | str = Relation.ADD_REMOVE, points: int = 80) -> None:
        top = min(epsilon(event, delta=_SMALLEST_DELTA, relation=relation), _LARGEST_EPSILON)
        self._epsilons = np.concatenate([[0.0], top * (np.arange(1, points + 1) / points) ** 1.5])
        self._deltas = np.asarray(delta_curve(event, self._epsilons.tolist(), relation=relation))

    def __call__(self, alphas: ArrayLike) -> np.ndarray:
        """The least miss rate at each false-alarm rate."""
        a = np.asarray(alphas, dtype=np.float64)[..., None]
        steep = 1.0 - self._deltas - np.exp(np.minimum(self._epsilons, 700.0)) * a
        flat = np.exp(-self._epsilons) * (1.0 - self._deltas - a)
        return np.asarray(np.maximum(0.0, np.maximum(steep, flat)).max(axis=-1))


@lru_cache(maxsize=32)
def claimed_curve(event: Event, relation: Relation) -> ClaimedCurve:
    """The curve of an event, cached: repeated audits of one plan analyse its claim once."""
    return ClaimedCurve(event, relation=relation)
