"""Poisson sampling, plain and with a bounded batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from hushgrad import _check, _papers, events
from hushgrad.sampling.base import Deal, Sampler
from hushgrad.sampling.draws import Draws, uniform_subset


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampler):
    """In each step every record takes part independently with probability ``rate``.

    **Formal guarantee.** The indicators {record i takes part in step t} are independent Bernoulli(``rate``) over all i and t.
    Batch sizes vary (Binomial), empty batches included; the divisor of a step must be the public expected size.

        >>> sampler = Poisson(rate=0.5, steps=3)
        >>> [batch.tolist() for batch in sampler.batches(6, np.random.default_rng(1))]
        [[0, 1], [1, 2, 4], [0, 1, 3, 5]]

    Reference: Abadi et al. 2016, "Deep learning with differential privacy", section 3.1.
    """

    papers = (_papers.ABADI_2016_DEEP,)

    rate: float
    steps: int
    expected = _check.each(rate=_check.rate, steps=_check.positive_int)

    @classmethod
    def examples(cls) -> tuple[Sampler, ...]:
        return (cls(rate=0.2, steps=12), cls(rate=0.9, steps=12))

    def participation(self) -> events.Poisson:
        return events.Poisson(self.rate)

    def meant_for(self, batch_size: float) -> float:
        return batch_size / self.rate

    def dealer(self, n: int, draws: Draws) -> Deal:
        return partial(draws.poisson_subset_at, n, self.rate)


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Sampler):
    """As :class:`Poisson`, but a batch of more than ``size`` records is cut, uniformly at random, to ``size`` of them.

    The physical batch then never exceeds ``size``. Records compete for places, so another record's presence matters, and the
    accountant has to pay for it: ``dataset_size`` is public here, and another number of records is refused.

        >>> sampler = TruncatedPoisson(rate=0.5, size=2, dataset_size=6, steps=3)
        >>> [batch.tolist() for batch in sampler.batches(6, np.random.default_rng(1))]
        [[0, 1], [1, 5], [1, 2]]
    """

    papers = (
        _papers.Paper(
            "chua2024scalable",
            "Chua, Lynn and Ghazi, Badih and Kamath, Pritish and Kumar, Ravi and Manurangsi, Pasin and Sinha, Amer and Zhang, Chiyuan",
            "Scalable {DP-SGD}: Shuffling vs. {Poisson} Subsampling",
            "NeurIPS",
            arxiv="2411.04205",
        ),
    )

    rate: float
    size: int
    dataset_size: int
    steps: int
    expected = _check.each(
        rate=_check.rate, size=_check.positive_int, dataset_size=_check.positive_int, steps=_check.positive_int
    )

    @classmethod
    def examples(cls) -> tuple[Sampler, ...]:
        return (cls(rate=0.25, size=9, dataset_size=30, steps=12),)

    @property
    def most(self) -> int:
        return self.size

    def participation(self) -> events.TruncatedPoisson:
        return events.TruncatedPoisson(rate=self.rate, dataset_size=self.dataset_size, size=self.size)

    def meant_for(self, batch_size: float) -> float:
        return float(self.dataset_size)

    def dealer(self, n: int, draws: Draws) -> Deal:
        """Step t draws min(Binomial(n, rate), size) records: a cut uniform subset is a smaller uniform subset."""
        _check_size(n, self.dataset_size)

        def deal(step: int) -> np.ndarray:
            rng = draws.at(step)
            return uniform_subset(n, min(int(rng.binomial(n, self.rate)), self.size), rng)

        return deal


def _check_size(n: int, dataset_size: int) -> None:
    if n != dataset_size:
        _check.fail(
            "n", n, f"to be the public dataset_size={dataset_size}", "Describe the data that you train on, or use Poisson."
        )
