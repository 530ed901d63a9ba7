"""Sampling: samplers decide which records take part in which step; the loader reads the batches that they draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._lazy_import import later
from hushgrad.sampling.balls_in_bins import BallsInBins
from hushgrad.sampling.base import Sampler
from hushgrad.sampling.cyclic_poisson import CyclicPoisson
from hushgrad.sampling.draws import Draws
from hushgrad.sampling.fixed_size import FixedSize
from hushgrad.sampling.full_batch import FullBatch
from hushgrad.sampling.poisson import Poisson, TruncatedPoisson
from hushgrad.sampling.round_robin import RoundRobin
from hushgrad.sampling.units import Units

if TYPE_CHECKING:
    from hushgrad.sampling.batch import Batch
    from hushgrad.sampling.batch_loader import BatchLoader
    from hushgrad.sampling.make_loader import loader

__all__ = [
    "BallsInBins",
    "Batch",
    "BatchLoader",
    "CyclicPoisson",
    "Draws",
    "FixedSize",
    "FullBatch",
    "Poisson",
    "RoundRobin",
    "Sampler",
    "TruncatedPoisson",
    "Units",
    "loader",
]

# These need torch.
__getattr__, __dir__ = later(__name__)
