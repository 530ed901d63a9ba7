"""Damped anti-correlated noise: each step takes back a part of the last step's noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hushgrad import _check, _papers
from hushgrad.events import Participation
from hushgrad.noise.base import Mechanism, NoiseStream
from hushgrad.noise.lower_toeplitz import LowerToeplitz, filter_stream, tuned


@dataclass(frozen=True, kw_only=True)
class AntiPGD(LowerToeplitz):
    """Row t is z_t - damping z_{t-1}; z_{t-1} is regenerated, so nothing is stored.

    N(x) = 1 - damping x and C(x) = 1 / (1 - damping x). For mean estimation with learning rate eta, a = 1 - eta, the best
    damping is (1 - sqrt(1 - a²)) / a, and the noise variance falls from 1 / (1 - a²) to its square root. ``damping=None``
    is tuned for the prefix-sum rmse when the run is known.

    **Formal guarantee.** One Gaussian event with exact sensitivity: C's coefficients damping^t decrease.

    >>> from hushgrad.events import Once
    >>> round(AntiPGD().error(steps=1024, participation=Once()).rmse, 3)
    4.809

    Reference: Kalinin, McKenna, Pagh, Lampert 2026 (arXiv:2601.22334); Orvieto et al. 2022 (arXiv:2202.02831) for damping 1.
    """

    papers = (
        _papers.Paper(
            "kalinin2026lambda",
            "Kalinin, Nikita P. and McKenna, Ryan and Pagh, Rasmus and Lampert, Christoph H.",
            "{DP-$\\lambda$CGD}: Efficient Noise Correlation for Differentially Private Model Training",
            "ICML",
            arxiv="2601.22334",
        ),
        _papers.Paper(
            "orvieto2022anticorrelated",
            "Orvieto, Antonio and Kersting, Hans and Proske, Frank and Bach, Francis and Lucchi, Aurelien",
            "Anticorrelated Noise Injection for Improved Generalization",
            "ICML",
            arxiv="2202.02831",
        ),
    )

    _open = "damping"

    damping: float | None = None
    expected = _check.each(damping=_check.optional(_check.probability))

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        return (cls(), cls(damping=0.8))

    def strategy_coefficients(self, steps: int) -> np.ndarray:
        return self._value() ** np.arange(steps, dtype=float)

    def noising_coefficients(self, steps: int) -> np.ndarray:
        beta = np.zeros(steps)
        beta[:2] = (1.0, -self._value())[:steps]
        return beta

    def resolved(self, *, steps: int, participation: Participation) -> AntiPGD:
        if self.damping is not None:
            return self
        best = tuned(lambda x: AntiPGD(damping=1 - x), steps, participation, low=1e-2 / steps, high=1.0)
        return replace(self, damping=1 - best)

    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        """Two draws per row, no state."""
        return filter_stream(self, source, steps, memory=0, taps=2)

    def state_size(self, *, steps: int) -> int:
        """0: the last z is regenerated."""
        return 0
