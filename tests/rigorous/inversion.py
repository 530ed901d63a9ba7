"""Truth for many steps: delta by inversion of the characteristic function, on two contours that must agree. No code of the accountants.

delta(eps) = 1/(2 pi i) * integral over Re s = c of e^{K(s) - s eps} / (s (s + 1)) ds, K(s) = sum of ln E_Q[w^{1+s}], w = dP/dQ. The moments
are taken by Gauss-Legendre panels of w^{1+s} - 1 - (1+s)(w - 1), which has the same mean less one, so that tiny rates keep their digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.polynomial.legendre import leggauss

__all__ = ["Undecided", "log_delta"]

Pair = tuple[str, float, float]  # ("remove" | "add" | "replace", rate, mu)


class Undecided(Exception):
    """The two contours do not agree, or the integral converges too slowly."""


@dataclass
class _Moments:
    log_w: np.ndarray
    excess: np.ndarray  # w - 1
    log_q: np.ndarray  # of the density times the quadrature's weight

    @classmethod
    def of(cls, pair: Pair, c: float, nodes: int) -> _Moments:
        kind, rate, mu = pair
        far = 14.0 + mu * (min(c, 400.0) + 2.0)
        if mu * c > 60.0 * 400.0:
            raise Undecided("the tilt is too large")
        panels = int(min(max(60, 2 * far / min(0.5, 0.5 / mu)), 3000))
        edges = np.linspace(-far, far, panels + 1)
        x, weights = leggauss(nodes)
        half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
        z, v = (middle[:, None] + half[:, None] * x).ravel(), (half[:, None] * weights).ravel()
        up, down = (rate * np.expm1(s * mu * z - mu * mu / 2) for s in (1, -1))
        log_normal = np.log(v) - z * z / 2 - 0.5 * math.log(2 * math.pi)
        if kind == "remove":
            return cls(np.log1p(up), up, log_normal)
        if kind == "add":
            return cls(-np.log1p(up), -up / (1 + up), log_normal + np.log1p(up))
        return cls(np.log1p(up) - np.log1p(down), (up - down) / (1 + down), log_normal + np.log1p(down))

    def __call__(self, s: np.ndarray) -> np.ndarray:
        found = np.empty(len(s), complex)
        for i, order in enumerate(1 + s):
            exponent = order * self.log_w
            top = float(np.max(exponent.real + self.log_q))
            if top < 0.0 and float(np.max(exponent.real)) < 600.0:
                small = np.abs(order * self.excess) < 1e-4
                e = self.excess
                series = order * (order - 1) / 2 * e**2 * (1 + (order - 2) / 3 * e * (1 + (order - 3) / 4 * e))
                found[i] = np.log1p(np.sum(np.where(small, series, np.expm1(exponent) - order * e) * np.exp(self.log_q)))
            else:
                found[i] = np.log(np.sum(np.exp(exponent + self.log_q - top))) + top
        return found


def log_delta(parts: list[tuple[Pair, int]], epsilon: float) -> float:
    """The logarithm of the delta of ``times`` steps of each pair in one direction, to about nine digits.

    Raises:
        Undecided: where that cannot be had.
    """
    c = _saddle(parts, epsilon)
    with np.errstate(all="ignore"):
        first, second = _on(parts, epsilon, c, 24, 1.0), _on(parts, epsilon, 0.8 * c, 30, 0.7)
    if not abs(first - second) < 1e-9:
        raise Undecided(f"two contours give {first} and {second}")
    return first


def _exponent(parts: list[tuple[Pair, int]], c: float, s: np.ndarray, nodes: int) -> np.ndarray:
    return np.sum([n * _Moments.of(pair, c, nodes)(s) for pair, n in parts], axis=0)


def _saddle(parts: list[tuple[Pair, int]], epsilon: float) -> float:
    """The c at which the integrand is smallest on the real line, to a few per cent."""

    def phi(log_c: float) -> float:
        c = math.exp(log_c)
        return float(_exponent(parts, c, np.array([c + 0j]), 24)[0].real) - c * epsilon - math.log(c * (c + 1))

    low, high = -5.0, 9.0
    for _ in range(24):
        a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
        try:
            right = phi(b)
        except Undecided:
            right = math.inf
        low, high = (low, b) if not phi(a) > right else (a, high)
    return math.exp((low + high) / 2)


def _on(parts: list[tuple[Pair, int]], epsilon: float, c: float, nodes: int, finer: float) -> float:
    moments = [(_Moments.of(pair, c, nodes), n) for pair, n in parts]

    def k(s: np.ndarray) -> np.ndarray:
        return np.sum([n * of(s) for of, n in moments], axis=0)

    h = 1e-3 * c
    around = k(np.array([c - h, c, c + h], complex)).real
    curvature = max((around[0] - 2 * around[1] + around[2]) / h**2, 1e-300)
    spacing = finer * 2 * math.pi / max(60.0 / c, 24.0 * math.sqrt(curvature), 3 * abs(epsilon))
    total, at, size = 0.0, 0, 128
    while at < 12_000:
        y = (at + np.arange(size)) * spacing
        s = c + 1j * y
        value = np.exp(k(s) - around[1] - 1j * y * epsilon) / (s * (s + 1)) * (spacing / math.pi)
        if at == 0:
            value[0] /= 2
        total += float(np.sum(value.real))
        at += size
        if float(np.max(np.abs(value[-size // 4 :]))) * size < 1e-13 * abs(total):
            return math.log(total) + float(around[1]) - c * epsilon if total > 0 else math.nan
    raise Undecided("the integral converges too slowly")
