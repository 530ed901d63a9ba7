r"""An estimate of epsilon by a contour integral: fast, accurate, and never used for a claim.

With K(s) = ln E_P[e^{s L}] the cumulants of the privacy loss (they add up under composition) and any c > 0,

    delta(epsilon) = 1/(2 pi i) * integral over Re s = c of  e^{K(s) - s epsilon} / (s (s + 1)) ds.

The trapezoidal rule on the line through the saddle point converges geometrically, and everything is tilted by e^{c L}, so
that delta = 1e-50 is as easy as 1e-5. The rule's error is *not* bounded here, hence the label: an estimate checks bounds, and is
itself checked against a Rényi bound; the bounds come from the accountants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hushgrad import _check
from hushgrad.accounting._numeric import smallest_true
from hushgrad.accounting.base import count_leaves, trivial_loss
from hushgrad.accounting.gaussian import gaussian_epsilon
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.participation import poisson_rate
from hushgrad.accounting.rdp import RDP
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Gaussian, GaussianMixture, Relation, Sampled

Complex = npt.NDArray[np.complex128]
Cumulants = Callable[[Complex], Complex]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of epsilon, usually accurate to many digits but not certified. Use ``epsilon`` for a claim.

    >>> from hushgrad.accounting import estimate
    >>> from hushgrad.events import Gaussian
    >>> found = estimate(1000 * Gaussian(1.1).sampled(rate=0.01), delta=1e-5)
    >>> print(f"about {found.epsilon:.3f}", found.certified)
    about 1.515 False
    """

    epsilon: float
    delta: float
    certified: bool = False


def estimate(event: Event, *, delta: float, relation: Relation | str = Relation.ADD_REMOVE) -> Estimate:
    """An uncertified estimate of epsilon for compositions of (Poisson-sampled) Gaussians.

    Args:
        event: a composition of Gaussians, sampled or not.
        delta: at which epsilon is estimated.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> run = Gaussian(1.1).sampled(rate=256 / 60_000) * 14_040
    >>> round(estimate(run, delta=1e-5).epsilon, 6)
    2.379555

    Raises:
        NoTheorem: for other events, and where the integral converges too slowly to be trusted (few steps).
    """
    delta = _check.delta(delta=delta)
    counts: dict[Event, int] = {}
    count_leaves(event, 1, counts)
    pairs = [(leaf, n) for leaf, n in counts.items() if trivial_loss(leaf) is None]
    if len(pairs) < len(counts):
        raise NoTheorem("There is no estimate for events without privacy. Ask epsilon, which is infinite for them.")
    if not pairs:
        return Estimate(epsilon=0.0, delta=delta)
    both = [[(_directions(leaf, Relation.of(relation))[d], n) for leaf, n in pairs] for d in (0, 1)]
    found = max(_solve(parts, delta) for parts in both)
    if found > RDP().loss(event, Relation.of(relation)).epsilon(delta) * (1 + 1e-9):  # the contour missed what it integrates
        raise NoTheorem("The contour integral is above a Rényi bound here, so it cannot be trusted. Ask epsilon.")
    return Estimate(epsilon=found, delta=delta)


def _directions(event: Event, relation: Relation) -> tuple[Cumulants, Cumulants]:
    """The cumulant functions of the two ordered pairs (remove, add)."""
    if isinstance(event, Gaussian):
        if event.noise_multiplier == 0.0:
            raise NoTheorem("There is no estimate for events without privacy.")
        variance = (relation.contributions / event.noise_multiplier) ** 2
        return (lambda s: s * (s + 1.0) * (variance / 2.0),) * 2
    if relation is not Relation.REPLACE_ONE:
        q = poisson_rate(event)
        if q is not None and isinstance(event, Sampled) and isinstance(event.of, Gaussian):
            return _mixture_cumulants(event.of.noise_multiplier, np.array([0.0, 1.0]), np.array([1.0 - q, q]))
        if isinstance(event, GaussianMixture):
            return _mixture_cumulants(event.noise_multiplier, np.array(event.sensitivities), np.array(event.probabilities))
    raise NoTheorem(f"There is no contour estimate for {event} under {relation}. Ask epsilon.")


def _mixture_cumulants(
    sigma: float, shifts: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> tuple[Cumulants, Cumulants]:
    if sigma == 0.0:
        raise NoTheorem("There is no estimate for events without privacy.")
    largest = float(shifts.max())

    def moments(power: Complex) -> Complex:
        """Ln E_Q[(P/Q)^power], Q = N(0, sigma²), by the trapezoidal rule in x."""
        reach = max(2.0, float(power.real.max())) * largest
        strip = math.pi * sigma**2 / (2.0 * max(largest, 1e-300))
        turning = sigma**2 / (largest * (1.0 + float(np.abs(power.imag).max())))  # the integrand oscillates with Im power
        step = min(0.4 * sigma, strip / 4.0, turning)
        points = (reach + 24.0 * sigma) / step
        if points * power.size > HEURISTICS.contour_block:
            raise NoTheorem("The contour estimate would need too many points here. Ask epsilon.")
        x = np.arange(-12.0 * sigma, reach + 12.0 * sigma, step)
        with np.errstate(divide="ignore"):
            log_ratio = np.logaddexp.reduce(
                [math.log(w) + (s * x - 0.5 * s * s) / sigma**2 for s, w in zip(shifts, weights, strict=True) if w > 0.0], axis=0
            )
        log_density = -0.5 * (x / sigma) ** 2 + math.log(step / (sigma * math.sqrt(2.0 * math.pi)))
        real = np.outer(power.real, log_ratio) + log_density
        top = real.max(axis=1, keepdims=True)
        terms = np.exp(real - top + 1j * np.outer(power.imag, log_ratio))
        # E_Q[u] = 0 is used to keep the digits of ln(1 + small): the rule is exact for it to rounding anyway.
        return np.asarray(np.log(terms.sum(axis=1)) + top[:, 0], dtype=np.complex128)

    return (lambda s: moments(s + 1.0)), (lambda s: moments(-s))


def _solve(parts: list[tuple[Cumulants, int]], delta: float) -> float:
    def cumulants(s: Complex) -> Complex:
        return np.asarray(sum(n * k(s) for k, n in parts), dtype=np.complex128)

    tilt, guess = _saddle(cumulants, math.log(delta))
    return _on_contour(cumulants, tilt, delta, guess)


def _saddle(cumulants: Cumulants, log_delta: float) -> tuple[float, float]:
    """(c, epsilon): the tilt at which the saddle-point approximation of delta(epsilon) is delta, to a few per cent.

    At the saddle epsilon = K'(c) - 1/c - 1/(c + 1), and delta is e^{K(c) - c epsilon} / (c (c + 1) sqrt(2 pi curvature)).
    """

    def at(log_c: float) -> tuple[float, float]:
        c = math.exp(log_c)
        h = 1e-3 * c
        k = cumulants(np.array([c - h, c, c + h], dtype=np.complex128)).real
        epsilon = float((k[2] - k[0]) / (2.0 * h)) - 1.0 / c - 1.0 / (c + 1.0)
        curvature = max(float(k[0] - 2.0 * k[1] + k[2]) / h**2, 0.0) + c**-2 + (c + 1.0) ** -2
        return float(k[1]) - c * epsilon - math.log(c * (c + 1.0)) - 0.5 * math.log(2.0 * math.pi * curvature), epsilon

    variance = max(float(cumulants(np.array([1.0 + 0.0j]))[0].real), 1e-300)  # K(1) is mu² for a Gaussian
    guess = gaussian_epsilon(math.sqrt(min(variance, 1e12)), math.exp(max(log_delta, -700.0)))
    low = high = math.log(min(max(guess / variance - 0.5, 1e-3), 1e6))
    while at(low)[0] < log_delta and low > -16.0:  # a larger tilt belongs to a larger epsilon and a smaller delta
        low -= 0.5
    while at(high)[0] > log_delta and high < 16.0:
        high += 0.5
    for _ in range(6):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if at(middle)[0] > log_delta else (low, middle)
    return math.exp(high), max(0.0, at(high)[1])


def _on_contour(cumulants: Cumulants, c: float, delta: float, guess: float) -> float:
    """The root of delta(epsilon) = ``delta`` on the line Re s = ``c``."""
    step = 1e-3 * c
    k = cumulants(np.array([c - step, c, c + step], dtype=np.complex128)).real
    curvature = max((k[0] - 2.0 * k[1] + k[2]) / step**2, 1e-300)
    period = max((30.0 + math.log(1.0 / delta)) / c, 18.0 * math.sqrt(curvature))
    spacing = 2.0 * math.pi / period
    nodes, values = _nodes(cumulants, c, spacing)
    weights = np.full(len(nodes), spacing / math.pi)
    weights[0] /= 2.0
    s = c + 1j * nodes
    shape = np.exp(values - k[1]) / (s * (s + 1.0)) * weights
    log_target = math.log(delta)

    def small_enough(epsilon: float) -> bool:
        total = float(np.sum(shape * np.exp(-1j * nodes * epsilon)).real)
        return total <= 0.0 or math.log(total) + float(k[1]) - c * epsilon <= log_target

    low, high = guess, guess + 1.0 / c
    for _ in range(200):
        if low == 0.0 or not small_enough(low):
            break
        low = max(0.0, low - 4.0 / c)
    for _ in range(200):
        if small_enough(high):
            break
        high += 1.0 / c
    else:
        raise NoTheorem("The contour integral does not reach this delta here, so it cannot be trusted. Ask epsilon.")
    return smallest_true(small_enough, low, high, tolerance=1e-10)


def _nodes(cumulants: Cumulants, c: float, spacing: float) -> tuple[npt.NDArray[np.float64], Complex]:
    """Points on the upper half of the contour and K there, until the integrand has died out."""
    top = float(cumulants(np.array([c + 0.0j]))[0].real)
    tau, values, size = np.zeros(0), np.zeros(0, dtype=np.complex128), 64
    while len(tau) < HEURISTICS.contour_nodes:
        block = (len(tau) + np.arange(size)) * spacing
        k = cumulants(np.asarray(c + 1j * block, dtype=np.complex128))
        tau, values = np.concatenate((tau, block)), np.concatenate((values, k))
        if float(np.exp(k[-size // 4 :].real - top).max()) < 1e-13:
            return tau, values
        size = min(512, 2 * size)
    raise NoTheorem("The contour integral converges too slowly here to be trusted (few steps). Ask epsilon.")
