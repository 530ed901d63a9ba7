"""Shares: every client adds its part of the noise, so the sum is private before the server touches it.

They are integers, so that a sum modulo 2^64 is exact and a secure summation can be put between clients and server. With
``least`` = m and noise multiplier s, a clipped update is written in units of g = s C / (256 sqrt(m)), and each client adds a
discrete Gaussian of standard deviation 256 to every number: m of them have the standard deviation s C together.

**Theorem.** With at least m shares in it, the sum is, up to a factor 1 + t on every probability, a function of the sum with
continuous Gaussian noise of standard deviation s C sqrt(1 - 1 / (1024 m)); t < 10^-540 d for d numbers.

*Proof.* Write W(c, u) = sum_j exp(-(j - u)² / (2 c²)). By Poisson's formula W(c, u) = c sqrt(2 pi) (1 + 2 sum_n exp(-2 pi² c²
n²) cos(2 pi n u)), which is c sqrt(2 pi) (1 ± e(c)) with e(c) < 3 exp(-2 pi² c²), for every u. (1) The sum of discrete
Gaussians of parameters a and b has at k the probability exp(-k² / (2 (a² + b²))) W(c, u) / (W(a, 0) W(b, 0)) with c = a b /
sqrt(a² + b²): up to factors 1 ± e(c), that of one of parameter sqrt(a² + b²). So m shares are one of parameter 256 sqrt(m),
since c >= 256 / sqrt(2). (2) Take a Gaussian of mean x and variance 256² m - 8², and round its value w at random: to k with
probability exp(-(k - w)² / 128) / W(8, w). Integrated over w, k has, up to 1 ± e(8), the density at k of a Gaussian of mean x
and variance 256² m; and that is, up to 1 ± e(256), the discrete one around a whole x. e(8) < 10^-547. ∎

(Kairouz, Liu and Steinke 2021, arXiv:2102.06387, proposition 14, say the same in terms of zCDP.) In units of the grid one user
moves the sum by at most C / g = 256 sqrt(m) / s. So a round costs what a Gaussian of multiplier s sqrt(1 - 1 / (1024 m)) costs;
it is counted as 1e-9 less, which is far more than t is worth for any delta above 10^-300. More shares than m only add
independent noise. Where fewer arrive, the server adds the missing ones itself: the accounting holds for the least number,
whoever drops out, as long as dropping out does not depend on data.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from hushgrad import _check
from hushgrad.clipping import Flat
from hushgrad.clipping.clipper import Clipper
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Gaussian, Participation, Relation
from hushgrad.federated.discrete_gaussian import discrete_gaussian
from hushgrad.federated.layout import Layout
from hushgrad.federated.mods import CLIP_NORM, SHARE, answered, own_limit, told, without_arrays
from hushgrad.noise.independent import Independent
from hushgrad.noise.participation import pattern_of
from hushgrad.release.keys import RunKey
from hushgrad.train.plan import Plan

GRID = "hushgrad-grid-step"
"""The key in the round's ConfigRecord under which the server sends the unit of the whole numbers."""
_STD = 256  # of a share, in units of the grid
# clip norms: a plan's share is s / sqrt(m), never as fine as this; beyond 2^52 numbers are not whole any more
_FINEST = _STD * 2.0**-40
_SLACK = 1e-9
_ROUNDING = 1 + 4e-9  # a float64 sum of 10⁷ squares is off by less


@dataclass(frozen=True)
class Shares(Independent):
    """Independent noise of which each client adds its part: ``Plan.dpsgd(..., noise=Shares(least=80))`` for :class:`DPFedAvg`.

    **Formal guarantee.** For a user who takes part at most k times, the run is a Gaussian mechanism of noise multiplier
    s sqrt(1 - 1 / (1024 ``least``)) / sqrt(k), under zero-out and replace-one, by the theorem above. Cohorts drawn at random
    amplify nothing here: a user who is not drawn sends no share either. Clients are trusted to clip and to add their own share; nobody
    else can see whether they did.

    Args:
        least: how many shares make up the planned noise; the server adds what is missing.

        >>> from hushgrad.events import MinSep
        >>> print(Shares(least=80).event(2.0, MinSep(gap=10, times=4), 40))
        Gaussian(0.999994)
    """

    least: int = 2
    expected = _check.each(least=_check.positive_int)

    def event(self, noise_multiplier: float, participation: Participation, steps: int) -> Event:
        """The theorem above, for as many rounds as a user takes part in."""
        sigma = _check.non_negative(noise_multiplier=noise_multiplier)
        times = pattern_of(participation, _check.positive_int(steps=steps)).times
        return Gaussian(sigma * math.sqrt((1 - 1 / (1024 * self.least)) / times) * (1 - _SLACK))

    def grid(self, clip_norm: float, noise_multiplier: float) -> float:
        """The unit of the integers."""
        return noise_multiplier * clip_norm / (_STD * math.sqrt(self.least))


def _require_shares(plan: Plan) -> Shares:
    """Refuse what the theorem does not cover.

    Raises:
        NoTheorem: for add/remove.
        ArgumentError: for a clip norm that moves, or a sum that is to be rounded again.
    """
    shares = _check.instance(Shares, noise=plan.noise)
    if plan.relation is Relation.ADD_REMOVE:
        raise NoTheorem(
            "Who is not there sends no share of the noise either, and no theorem covers that: "
            'use relation="zero_out" or "replace_one".'
        )
    if not isinstance(plan.clip, Flat) or plan.secure:
        _check.fail(
            "plan", plan.digest[:12], "to have a Flat clip and secure=False", "The unit of the whole numbers must not move."
        )
    return shares


class ShareSum:
    """The sum of a round whose noise the clients have added, in the place of :class:`Aggregator`.

    **Formal guarantee.** The released sum holds at least ``least`` shares of noise: those that arrived and, for the missing ones, the
    server's own, drawn by the run's key. What is no array of 64-bit whole numbers counts as zero, and its share as missing.
    """

    def __init__(self, plan: Plan, key: RunKey) -> None:
        self._plan, self._shares, self._key = plan, _require_shares(plan), key.shares
        self._sum, self._answered = np.empty(0, np.int64), 0

    @property
    def clip(self) -> Clipper:
        """The plan's; it never moves."""
        return self._plan.clip

    @property
    def clip_norm(self) -> float:
        """What a client clips its update to."""
        return self._plan.max_grad_norm

    def tell(self, config: ConfigRecord) -> None:
        """What a client has to know."""
        config[CLIP_NORM], config[GRID] = self.clip_norm, self._grid

    @property
    def _grid(self) -> float:
        return self._shares.grid(self.clip_norm, self._plan.noise_multiplier or 0.0)

    def begin(self, step: int, layout: Layout, current: np.ndarray) -> None:
        """Round ``step``: nothing summed yet."""
        self._layout, self._sum, self._answered = layout, np.zeros(layout.size, np.int64), 0

    def add(self, content: RecordDict) -> bool:
        """Add one client's numbers, modulo 2^64; nobody can see whether they had to be clipped.

        Raises:
            Unusable: for a reply that is none.
        """
        numbers = np.zeros(self._layout.size, np.int64)
        self._layout.read_whole(content, numbers)
        self._sum += numbers  # wraps around: of a sum modulo 2^64 only the last value matters
        self._answered += 1
        return False

    def release(self, step: int) -> torch.Tensor:
        """The mean update of round ``step``: the shares that are missing are added first."""
        draw = _Keyed(self._key, step)
        for _ in range(self._shares.least - self._answered):
            self._sum += discrete_gaussian(_STD, self._layout.size, draw)
        return torch.from_numpy(self._sum.astype(np.float64)).mul_(self._grid / self._plan.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: every round's noise is its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue."""


class _Keyed:
    """Bytes derived from a key and a round: SHAKE-256 of both and of a counter of the calls."""

    def __init__(self, key: bytes, step: int) -> None:
        self._place, self._calls = key + step.to_bytes(8, "little"), 0

    def __call__(self, size: int) -> bytes:
        self._calls += 1
        return hashlib.shake_256(self._place + self._calls.to_bytes(8, "little")).digest(size)


def add_share(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Clip the update, convert it to integers and add this client's share of the noise: ``ClientApp(mods=[add_share])``.

    **Formal guarantee.** The arrays that leave the device are q + X: q whole numbers with |q| at most the clip norm in units of the
    grid, X a discrete Gaussian from the operating system's entropy. See :class:`Shares` for the sum. Put it first in the
    list: the first mod is the outermost, and what one before it adds is not covered.
    Where the server sends no grid (evaluation, another strategy), a finer one than whole numbers resolve or than the node's own
    limits allow (:mod:`hushgrad.federated.mods`), or the update cannot be read, no arrays leave. Metrics of a reply pass as they are.

    Args:
        message: from the server; it holds the clip norm and the unit of the grid.
        context: of the client, as Flower hands it over.
        call_next: the rest of the client.
    """
    numbers = told(message, CLIP_NORM, GRID)
    if numbers is None or not _allowed(context, *numbers):
        return without_arrays(call_next(message, context))
    clip_norm, grid = numbers
    reply, layout, _, update = answered(message, context, call_next)
    if update is None:
        return without_arrays(reply)
    noised = whole(update / grid, clip_norm / grid) + discrete_gaussian(_STD, layout.size, os.urandom)
    (name,) = reply.content.array_records
    parts = zip(layout.slices().items(), layout.shapes, strict=True)
    reply.content[name] = ArrayRecord({each: Array(noised[where].reshape(shape)) for (each, where), shape in parts})
    return reply


def _allowed(context: Context, clip_norm: float, grid: float) -> bool:
    """Whether what the server asks for is exact in whole numbers, and within this client's own limits."""
    share = _STD * (grid / clip_norm)  # of the noise, in clip norms
    return clip_norm <= own_limit(context, CLIP_NORM, math.inf) and share >= max(_FINEST, own_limit(context, SHARE, _FINEST))


def whole(update: np.ndarray, bound: float) -> np.ndarray:
    """The nearest integers to ``update``, or to a shorter one, so that their norm is at most ``bound``; zero for NaN.

    The norm is that of the whole numbers themselves: rounding to the nearest could lengthen a vector by sqrt(d) / 2.
    """
    norm = float(np.linalg.norm(update))
    if not (np.isfinite(norm) and np.isfinite(bound) and bound > 0):
        return np.zeros(update.shape, np.int64)
    scale = min(1.0, bound / norm) if norm else 1.0
    while True:
        numbers = np.rint(update * scale)
        if float(numbers @ numbers) * _ROUNDING <= bound * bound:
            return numbers.astype(np.int64)
        scale *= 1 - 1 / 256
