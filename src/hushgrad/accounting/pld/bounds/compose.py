r"""Composition of grid measures by one tilted FFT, with every error bounded.

Let p_i be measures on a grid of step h, n_i their multiplicities, K(s) = sum_i n_i ln sum_j p_i(j) e^{s l_j}, S the total loss.
The *tilted* measures p_i(j) e^{t l_j} / M_i are probability vectors; their convolution c is computed with a cyclic FFT, and

    delta(eps) = sum_k e^{K(t) - t l_k} c_k (1 - e^{eps - l_k})_+ .

With t near the saddle point the sum is dominated by large c_k, so delta = 1e-15 costs no accuracy. The errors, each proved in
docs/explanation/pld.md and kept in a field of :class:`Composed`: mass outside the window re-enters it (``raised``, ``folded``) or
is lost above it (``beyond``); rounding in the FFT and the power (``noise``); rounding of tilted masses (``relative``).

A sum S outside a window of width W re-enters at S - mW, where it counts e^{t m W} times. From below (m < 0) that is nearly nothing,
from above only sums beyond eps + W can reach a place above eps. So the window must hold little more than what lies above eps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import next_fast_len

from hushgrad.accounting._numeric import reached
from hushgrad.accounting.pld.bounds.blend_steps import BlendedMasses
from hushgrad.accounting.pld.bounds.fft_powers import Spectrum
from hushgrad.accounting.pld.bounds.grid import Masses
from hushgrad.accounting.pld.profiles.curve import Array

Part = tuple[Masses, int]
_U = 2.0**-53


@dataclass(frozen=True)
class Window:
    """Where to compute: losses from ``low`` to ``high``, tilted by ``tilt``; exponents for Chernoff's bound on what is outside."""

    tilt: float
    low: float
    high: float
    down: float  # s for the mass below low: e^{K(-s) + s low}
    up: float  # s for the mass above high: e^{K(t+s) - (t+s) high}
    far: float  # s for the mass above epsilon and one window: e^{K(t+s) - (t+s) (epsilon + W)}


@dataclass(frozen=True)
class Composed:
    """The tilted distribution c of the total loss at ``low + k * step``, and bounds on what is wrong with it."""

    low: float
    step: float
    c: Array
    log_mass: float  # K(t)
    tilt: float
    noise: float  # on each c_k, absolute
    raised: float  # the most that mass from below the window adds to delta
    folded: tuple[float, float]  # (k, s): mass from above it adds e^{k - s epsilon} at the most
    beyond: float  # untilted mass above the window
    relative: float  # of all the masses
    infinite: float  # mass at an infinite loss
    under: float = 1.0  # untilted mass below the window

    @property
    def _blur(self) -> float:
        """A bound on the rounding error of the window's losses, which are sums of numbers as large as its ends."""
        return 16 * _U * (abs(self.low) + (len(self.c) + 1) * self.step)

    def delta(self, epsilon: float, *, upper: bool) -> float:
        """A bound on delta at ``epsilon``."""
        epsilon += -self._blur if upper else self._blur
        weights, first = self._weights(epsilon, upper=upper)
        if len(weights) == 0:
            return min(1.0, self.infinite + self.beyond) if upper else self.infinite
        losses = self.low + (first + np.arange(len(weights))) * self.step
        total = float(np.sum(weights * -np.expm1(epsilon - losses)))
        return self._finish(total, epsilon, upper=upper)

    def epsilon(self, delta: float, *, upper: bool, start: float = -math.inf) -> float | None:
        """A bound on the epsilon at which delta is reached; None if it is not between ``start`` and the window's end."""
        offset = math.log(delta)
        weights, first = self._weights(start, upper=upper, offset=offset)
        if len(weights) < 2:
            return None
        scaled = _discounted_tails(weights, self.step)
        losses: Array = self.low + (first + np.arange(len(weights), dtype=np.float64)) * self.step
        # delta at the grid points, by positive terms: from one point to the one before it grows by (1 - e^{-h}) scaled
        at = -math.expm1(-self.step) * np.append(np.cumsum(scaled[:0:-1])[::-1], 0.0)
        if upper:
            left = (1 - (self.infinite + self.beyond) / delta) / (1 + self.relative)
            subtracted = np.zeros_like(at)
        else:
            left = (1 - self.infinite / delta) / (1 - self.relative)
            subtracted = self._alias(losses, offset)
        inside = at - subtracted <= left
        if left <= 0 or not inside.any() or inside.all() or (upper and inside[0]):
            return None
        i = int(np.argmax(inside)) if upper else len(at) - int(np.argmax(~inside[::-1]))
        if i >= len(at):
            return None
        # between the points i-1 and i delta is at_i + (1 - e^{eps - l_i}) scaled_i: no difference of large numbers
        drop = (left + float(subtracted[i - 1]) - float(at[i])) / float(scaled[i])
        solved = losses[i] + math.log1p(-drop) if drop < 1 else -math.inf
        return float(min(max(solved, losses[i - 1]), losses[i])) + (self._blur if upper else -self._blur)

    def rounding(self, epsilon: float, delta: float) -> float:
        """About the share of ``delta`` at ``epsilon`` that the bound on rounding makes up."""
        exponent = self.log_mass - self.tilt * epsilon - math.log(delta)
        return self.noise * math.exp(min(exponent, 600.0)) / max(-math.expm1(-self.tilt * self.step), 1e-12)

    def _weights(self, epsilon: float, *, upper: bool, offset: float = 0.0) -> tuple[Array, int]:
        """Bounds on e^{K - t l_k - offset} c_k for the losses above ``epsilon``, and the index of the first of them."""
        first = 0 if epsilon == -math.inf else max(0, math.floor((epsilon - self.low) / self.step) + 1)
        first = min(first, len(self.c))  # beyond the window it may be more than a machine's whole number
        c = self.c[first:]
        exponent = self.log_mass - offset - self.tilt * (self.low + (first + np.arange(len(c))) * self.step)
        error = self.noise if upper else -self.noise
        weights: Array = np.exp(np.minimum(exponent, 600.0)) * np.maximum(c + error, 0.0)
        return weights, first

    def _alias(self, losses: Array | float, offset: float) -> Array:
        """The most that mass which re-entered the window contributes to delta e^{-offset}."""
        size, slope = self.folded
        # this is subtracted, so it may overflow to infinity but must not be cut off
        return np.asarray(self.raised * np.exp(-offset) + np.exp(size - offset - slope * np.asarray(losses)))

    def _finish(self, total: float, epsilon: float, *, upper: bool) -> float:
        if upper:
            outside = self.beyond + (self.under if epsilon < self.low else 0.0)  # what re-entered counts e^{-tW} times only
            return min(1.0, total * (1 + self.relative) + outside + self.infinite)
        return max(0.0, (total - float(self._alias(epsilon, 0.0))) * (1 - self.relative) + self.infinite)


def _discounted_tails(weights: Array, step: float) -> Array:
    """sum_{k >= i} w_k e^{l_i - l_k}, by sums of positive terms.

    It needs e^{l_i - l_k} over the whole range, so it goes in blocks of 300 from the top, each passing its sum on. Where a block
    would hold few points, sums over 2, 4, 8, ... neighbours, until what is farther away is nothing.
    """
    if step > 4.0:
        tails: Array = weights.copy()
        reach = 1
        while reach < len(tails) and step * reach < 745.0:
            tails[:-reach] += math.exp(-step * reach) * tails[reach:]
            reach *= 2
        return tails
    scaled = np.empty_like(weights)
    block, passed = max(1, int(300 / step)), 0.0
    for stop in range(len(weights), 0, -block):
        start = max(0, stop - block)
        distance = step * np.arange(stop - start)
        sums = np.cumsum((weights[start:stop] * np.exp(-distance))[::-1])[::-1]
        scaled[start:stop] = np.exp(distance) * (sums + passed * math.exp(-step * (stop - start)))
        passed = float(scaled[start])
    return scaled


def log_moment(parts: Sequence[Part], s: float) -> float:
    """K(s) = ln E e^{s S}, the masses taken as they are."""
    total = 0.0
    for masses, times in parts:
        exponent = s * masses.losses
        top = float(np.max(np.where(masses.p > 0, exponent, -math.inf)))
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.where(masses.p > 0, masses.p * np.exp(np.minimum(exponent - top, 0.0)), 0.0)
        reached("the moments of the loss", top)
        total += times * (top + math.log(float(np.sum(weights))))
    return total


def compose(parts: Sequence[Part], window: Window) -> Composed:
    """Compose the parts on a window; all must share one grid step."""
    step, t = parts[0][0].step, window.tilt
    reached("the window", window.low, window.high, t, 1 / step)
    n = next_fast_len(max(16, math.ceil((window.high - window.low) / step) + 1), real=True)
    spectrum = Spectrum(n)
    base = log_mass = spread = 0.0
    for masses, times in parts:
        p, log_m, centre, reach = _tilted(masses, t)
        transform = spectrum.multiply(p, masses.index - centre, times)
        if isinstance(masses, BlendedMasses):
            corners = masses.corners * (p / np.where(masses.p > 0, masses.p, 1.0))
            spectrum.vary(transform, masses, corners, masses.index - centre, times)
        base += times * (centre * step + masses.shift)
        log_mass += times * log_m
        spread += times * (16.0 + reach) * 8 * _U
    start = math.ceil((window.low - base) / step)
    low, high = base + start * step, base + (start + n) * step
    least, most = range_of(parts)
    begins = least >= low + step  # the window holds all smaller losses
    under = 0.0 if begins else math.exp(min(0.0, _at_most(parts, low, -window.down)))
    inside = most <= high - 2 * step
    beyond = 0.0 if inside else math.exp(min(0.0, _at_most(parts, high, t + window.up)))
    c = np.roll(spectrum.inverse(), -(start % n))
    rounding = spread + 64 * _U * (1 + abs(t * base) + abs(log_mass))
    reached("this composition", float(np.sum(c)), log_mass, spectrum.noise(), rounding if rounding < 600 else math.inf)
    return Composed(
        low=low,
        step=step,
        c=c,
        log_mass=log_mass,
        tilt=t,
        noise=spectrum.noise(),
        # the mass under the window re-enters at least one window higher, where it counts e^{-t W} times
        raised=0.0 if begins else under * math.exp(-t * (high - low)) if t * (high - low) >= 0 else math.inf,
        folded=(-math.inf if inside else _folded(parts, t, window.far, high - low), t + window.far),
        beyond=beyond,
        relative=math.expm1(rounding),
        infinite=-math.expm1(sum(times * math.log1p(-min(m.infinite, 1 - 1e-16)) for m, times in parts)),
        under=under,
    )


def _folded(parts: Sequence[Part], t: float, far: float, width: float) -> float:
    """The logarithm of what mass from above the window adds, times e^{(t + far) epsilon}: a sum of powers of one more window."""
    shrinks = -far * width  # ln of the factor per further window
    return log_moment(parts, t + far) + shrinks - math.log(-math.expm1(shrinks)) if shrinks < 0 else math.inf


def _at_most(parts: Sequence[Part], end: float, s: float) -> float:
    """The logarithm of a bound on the mass above ``end`` (s > 0) or below it (s < 0), by Markov's inequality."""
    return log_moment(parts, s) - s * end


def range_of(parts: Sequence[Part]) -> tuple[float, float]:
    """The smallest and the largest total loss that has mass."""
    inside = [(masses.losses[masses.p > 0], times) for masses, times in parts]
    return sum(times * float(x[0]) for x, times in inside), sum(times * float(x[-1]) for x, times in inside)


def _tilted(masses: Masses, t: float) -> tuple[Array, float, int, float]:
    """Tilted and normalised masses, ln of their sum before, the index nearest to their mean, and the largest exponent."""
    losses = masses.losses
    heavy = float(losses[int(np.argmax(np.log(np.maximum(masses.p, 1e-320)) + t * losses))])
    exponent = t * (losses - heavy)
    p = masses.p * np.exp(np.minimum(exponent, 700.0))
    total = float(np.sum(p))
    reached("the tilted masses", total, 1 / max(total, 1e-320))
    p /= total
    mean = float(np.sum(p * losses))
    centre = round((mean - masses.shift) / masses.step)
    return p, math.log(total) + t * heavy, centre, float(np.max(np.abs(exponent)))
