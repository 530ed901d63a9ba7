"""Denoise: post-processing of privatised gradients; it costs no budget.

To add a denoiser, write its module and list it here; the conformance tests cover everything in this list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._lazy_import import later
from hushgrad.denoise.base import Denoiser, NoiseInfo, Probe
from hushgrad.denoise.smoothing_factors import beta, gamma

if TYPE_CHECKING:
    from hushgrad.denoise.chain import Chain
    from hushgrad.denoise.delayed_preconditioner import DelayedPreconditioner
    from hushgrad.denoise.kalman import ExponentialAverage, Kalman
    from hushgrad.denoise.laplacian import Laplacian
    from hushgrad.denoise.lowpass import LowPass
    from hushgrad.denoise.scale_first import ScaleThenPrivatise
    from hushgrad.denoise.second_moment import DebiasedSecondMoment
    from hushgrad.denoise.shrinkage import JamesStein, SoftThreshold
    from hushgrad.denoise.svrg import SVRG

__all__ = [
    "SVRG",
    "Chain",
    "DebiasedSecondMoment",
    "DelayedPreconditioner",
    "Denoiser",
    "ExponentialAverage",
    "JamesStein",
    "Kalman",
    "Laplacian",
    "LowPass",
    "NoiseInfo",
    "Probe",
    "ScaleThenPrivatise",
    "SoftThreshold",
    "beta",
    "gamma",
]

# These need torch.
__getattr__, __dir__ = later(__name__)
