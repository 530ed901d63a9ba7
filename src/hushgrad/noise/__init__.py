"""Noise: a keyed random-access source of Gaussians, and the (correlated) noise mechanisms, each with its privacy theorem."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._lazy_import import later
from hushgrad.noise.anti_pgd import AntiPGD
from hushgrad.noise.banded import Banded
from hushgrad.noise.banded_inverse import BandedInverse
from hushgrad.noise.base import Mechanism, NoiseStream
from hushgrad.noise.blt import BLT
from hushgrad.noise.dense import Dense
from hushgrad.noise.independent import Independent
from hushgrad.noise.nu import Nu
from hushgrad.noise.spectral import Spectral
from hushgrad.noise.toeplitz import Toeplitz
from hushgrad.noise.tree import Tree
from hushgrad.noise.workload import PrefixSums, SGDWorkload, Workload

if TYPE_CHECKING:
    from hushgrad.noise.source import Source

__all__ = [
    "BLT",
    "AntiPGD",
    "Banded",
    "BandedInverse",
    "Dense",
    "Independent",
    "Mechanism",
    "NoiseStream",
    "Nu",
    "PrefixSums",
    "SGDWorkload",
    "Source",
    "Spectral",
    "Toeplitz",
    "Tree",
    "Workload",
]

# These need torch.
__getattr__, __dir__ = later(__name__)
