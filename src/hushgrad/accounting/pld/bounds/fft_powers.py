"""Products of powers of discrete Fourier transforms, with a bound on their rounding.

The transforms are numpy's: scipy's have the same bits, but keep tables as large as the transform for the life of the process.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hushgrad.accounting.pld.bounds.blend_steps import BlendedMasses
from hushgrad.accounting.pld.bounds.grid import Indices
from hushgrad.accounting.pld.profiles.curve import Array

_U = 2.0**-53
_SILENT = -80.0  # ln of a Fourier coefficient that is far below all bounds on rounding


class Spectrum:
    """The product of powers of discrete Fourier transforms, in logarithms, and a bound on its rounding error.

    Each transform has a relative error of at most 7 u log2(n) in the 2-norm (Higham 2002, theorem 24.2). Through a product of
    powers it grows by the number of factors, and by Cauchy-Schwarz the sum over frequencies needs 2-norms only.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.log_size = np.zeros(n // 2 + 1)
        self.log_bound = np.zeros(n // 2 + 1)  # of the same product with every factor enlarged by its error
        self.angle = np.zeros(n // 2 + 1)
        self.least = np.ones(n // 2 + 1)  # the smallest factor at each frequency: one of them is missing in a derivative
        self.unknown = np.zeros(n // 2 + 1)  # of the logarithm: what steps that vary are off at the most
        self.error = 0.0  # sum of times * ||error of the transform||_2
        self.times = 0

    def multiply(self, p: Array, index: Indices, times: int) -> NDArray[np.complex128]:
        """Multiply by the ``times``-th power of the transform of masses ``p`` at ``index``, taken modulo n; that transform."""
        n = self.n
        transform = np.fft.rfft(np.bincount(index % n, weights=p, minlength=n))
        size = np.abs(transform)
        error = 7 * _U * math.log2(n) * math.sqrt(n * float(np.sum(p * p)))
        np.minimum(self.least, size + error, out=self.least)
        with np.errstate(divide="ignore"):
            self.log_size += times * np.log(size)
        self.log_bound += times * np.log(size + error)
        heard = self.log_size > _SILENT
        self.angle[heard] += times * np.angle(transform[heard])
        self.error += times * error
        self.times += times
        return np.asarray(transform)

    def vary(self, mean: NDArray[np.complex128], masses: BlendedMasses, corners: Array, index: Indices, times: int) -> None:
        """Correct a power of the transform ``mean`` for steps that are different mixtures of ``corners`` (see ``blend_steps``).

        Where the mean is too small for the series, no step's transform is larger than the largest corner's: nothing is added, and
        all of that is unknown.
        """
        n = self.n
        error = 7 * _U * math.log2(n) * math.sqrt(n * float(np.max(np.sum(corners * corners, axis=1))))
        transforms = np.stack([np.fft.rfft(np.bincount(index % n, weights=p, minlength=n)) for p in corners])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            off = error / np.abs(mean)
            away = transforms / mean - 1
            size = np.max(np.abs(away), axis=0) + 4 * off
            radius = masses.deviation * size
            usable = radius < 0.5
            away = np.where(usable, away, 0.0)
            change = -0.5 * np.einsum("cf,cd,df->f", away, masses.covariance, away)
            series = radius**3 / (3 * (1 - np.minimum(radius, 0.5)))
            rounding = masses.deviation**2 * size * (2 * (2 + size) * off + 64 * _U * size) + 64 * _U * size
            rest = np.where(usable, times * (series + rounding), 0.0)
            largest = times * (np.log(np.max(np.abs(transforms), axis=0) + error) - np.log(np.abs(mean) + error))
        self.log_size += change.real
        self.angle += change.imag
        self.log_bound += np.where(usable, np.maximum(change.real, 0.0) + rest, largest)
        self.unknown += np.where(usable, rest, math.inf)

    def inverse(self) -> Array:
        """The cyclic convolution."""
        heard = self.log_size > _SILENT
        spectrum = np.zeros(self.n // 2 + 1, dtype=complex)
        spectrum[heard] = np.exp(self.log_size[heard] + 1j * self.angle[heard])
        result: Array = np.fft.irfft(spectrum, self.n)
        return result

    def noise(self) -> float:
        """A bound on the error of every entry of ``inverse``."""
        product = np.exp(self.log_bound)
        power = math.sqrt(2 * float(np.sum(product**2)) / self.n)
        partial = product / self.least
        derivative = math.sqrt(2 * float(np.sum(partial**2)) / self.n)
        transforms = self.error / math.sqrt(self.n) * derivative
        rounding = (16 * self.times + 7 * math.log2(self.n)) * _U * power
        # a factor e^r with |r| <= unknown is off by at most e^unknown - 1; where the series is vain, by the product and its bound
        varied = (
            2 * float(np.sum(product * np.where(np.isinf(self.unknown), 2.0, np.expm1(np.minimum(self.unknown, 600.0))))) / self.n
        )
        return 2 * (transforms + rounding) + varied + 1e-30
