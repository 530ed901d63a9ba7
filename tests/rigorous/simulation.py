r"""Truth by simulation, for compositions that nothing else reaches: losses ln dP/dQ are drawn under P and added up.

delta(eps) = E[(1 - e^{eps - S})_+] is the mean of numbers in [0, 1], enclosed by the empirical Bernstein inequality (Maurer and
Pontil 2009) with an error probability of 1e-8 for each end. Neither tails below 1e-5 nor the last digits are seen, but every mistake
of a relation, a direction, a count of epochs or a sampler is. No code of the accountants.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

__all__ = ["Losses", "allocated", "bounds", "laplace", "poisson", "repeated"]

Losses = Callable[[np.random.Generator, int, bool], np.ndarray]  # so many losses of one part; with the record under P, or without

_WRONG = 1e-8
_BLOCK = 2_000_000


def bounds(parts: list[Losses], seed: int, *, remove: bool, count: int = 300_000) -> Callable[[float], tuple[float, float]]:
    """Ln of bounds on delta at an epsilon, for the composition of all parts."""
    rng = np.random.default_rng(seed)
    total = sum(part(rng, count, remove) for part in parts)

    def truth(epsilon: float) -> tuple[float, float]:
        values = -np.expm1(np.minimum(epsilon - total, 0.0))
        mean, spread, log = float(np.mean(values)), float(np.std(values, ddof=1)), math.log(2 / _WRONG)
        error = spread * math.sqrt(2 * log / count) + 7 * log / (3 * (count - 1))
        return math.log(mean - error) if mean > error else -math.inf, math.log(min(1.0, mean + error))

    return truth


def repeated(part: Losses, times: int) -> Losses:
    """The same part again and again, drawn anew."""
    return lambda rng, count, remove: np.sum([part(rng, count, remove) for _ in range(times)], axis=0)


def allocated(mu: float, bins: int, relation: str) -> Losses:
    """A record in one of ``bins`` bins, each seen with Gaussian noise at distance ``mu``; replaced by its opposite, or absent."""

    def losses(rng: np.random.Generator, count: int, remove: bool) -> np.ndarray:
        sign = 1.0 if remove else -1.0
        found = []
        for size in _blocks(count, bins):
            z = rng.standard_normal((size, bins))
            if relation == "replace_one" or remove:
                z[np.arange(size), rng.integers(0, bins, size)] += sign * mu
            up, down = np.logaddexp.reduce(mu * z, axis=1), np.logaddexp.reduce(-mu * z, axis=1)
            found.append(sign * (up - (down if relation == "replace_one" else mu * mu / 2 + math.log(bins))))
        return np.concatenate(found)

    return losses


def _blocks(count: int, width: int) -> list[int]:
    size = max(1, _BLOCK // width)
    return [size] * (count // size) + ([count % size] if count % size else [])


def poisson(mu: float, rate: float, relation: str) -> Losses:
    """Gaussian noise on a Poisson sample."""
    return _mixed(lambda z, at: -((z - at * mu) ** 2) / 2, lambda rng, n: rng.standard_normal(n), mu, rate, relation)


def laplace(distance: float, rate: float, relation: str) -> Losses:
    """Laplace noise on a number, on a Poisson sample."""
    return _mixed(lambda z, at: -np.abs(z - at * distance), lambda rng, n: rng.laplace(size=n), distance, rate, relation)


def _mixed(
    log_density: Callable[[np.ndarray, int], np.ndarray],
    noise: Callable[[np.random.Generator, int], np.ndarray],
    distance: float,
    rate: float,
    relation: str,
) -> Losses:
    """(1 - rate) f_0 + rate f_1 against (1 - rate) f_0 + rate f_{-1}, or f_0."""
    absent, present = math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate)

    def losses(rng: np.random.Generator, count: int, remove: bool) -> np.ndarray:
        sign, moved = (1.0 if remove else -1.0), rng.random(count) < rate
        z = noise(rng, count) + (sign * distance * moved if relation == "replace_one" or remove else 0.0)
        mine = np.logaddexp(absent + log_density(z, 0), present + log_density(z, 1))
        other = log_density(z, 0)
        if relation == "replace_one":
            other = np.logaddexp(absent + other, present + log_density(z, -1))
        return sign * (mine - other)

    return losses
