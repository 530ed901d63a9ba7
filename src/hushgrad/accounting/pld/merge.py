r"""Many slightly different steps: near-equal ones are rounded to one, on the safe side.

Lemma. For Poisson samples of Gaussian noise the profile grows with the rate q and with the distance mu, at every epsilon. Proof:
given an output of the pair at (q', mu), q <= q', replace it with probability 1 - q/q' by a fresh draw of the common distribution:
that is the pair at (q, mu). Given one at mu' >= mu, scale it by mu/mu' and add the missing noise. Both are post-processing. ∎

So rates and distances rounded up on a geometric grid bound epsilon from above, rounded down from below.
"""

from __future__ import annotations

import math

from hushgrad.accounting.pld.curve import Curve, GaussianCurve, Mirror
from hushgrad.accounting.pld.poisson import PoissonRemove

__all__ = ["rounded"]

_FEW = 300  # so many different curves are composed as they are
_MANY = 2500  # so many at most: a composition then takes some ten seconds
_HAIR = 1e-13  # of relative rounding in powers and logarithms


def rounded(counts: dict[Curve, int], width: float, *, upper: bool) -> dict[Curve, int]:
    """``counts`` with sampled Gaussians merged where that costs about ``width`` of epsilon, or where there are too many.

    Epsilon grows at most about like q mu^2 here, so a ratio of 1 + g between grid points costs about 1.5 g on average.
    """
    if len(counts) <= _FEW:
        return counts
    ratio = width / 1.5
    merged = _on_grid(counts, ratio, upper=upper)
    if len(merged) > 0.7 * len(counts) and len(counts) <= _MANY:
        return counts
    while len(merged) > _MANY and ratio < 0.5:
        ratio *= 1.5
        merged = _on_grid(counts, ratio, upper=upper)
    return merged


def _on_grid(counts: dict[Curve, int], ratio: float, *, upper: bool) -> dict[Curve, int]:
    log_ratio = math.log1p(ratio)
    places: dict[tuple[bool, int, int], int] = {}
    merged: dict[Curve, int] = {}
    for curve, n in counts.items():
        sampled = curve.of if isinstance(curve, Mirror) else curve
        if isinstance(sampled, PoissonRemove) and isinstance(sampled.base, GaussianCurve):
            rate, mu = (_index(x, log_ratio, upper=upper) for x in (sampled.rate, sampled.base.mu))
            place = (curve is not sampled, rate, mu)
            places[place] = places.get(place, 0) + n
        else:
            merged[curve] = n
    for (mirrored, rate, mu), n in places.items():
        sampled = PoissonRemove(GaussianCurve(_value(mu, log_ratio, upper=upper)), min(1.0, _value(rate, log_ratio, upper=upper)))
        merged[Mirror(sampled) if mirrored else sampled] = n
    return merged


def _index(x: float, log_ratio: float, *, upper: bool) -> int:
    place = math.log(x) / log_ratio
    return math.ceil(place) if upper else math.floor(place)


def _value(index: int, log_ratio: float, *, upper: bool) -> float:
    value = math.exp(index * log_ratio)
    return value * (1 + _HAIR * (1 + abs(index * log_ratio))) if upper else value * (1 - _HAIR * (1 + abs(index * log_ratio)))
