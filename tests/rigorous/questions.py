"""The adversary's questions: an event, drawn at random, and where its truth comes from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import ball_arithmetic as balls
import bins
import cut_samples
import enumeration
import inversion
import simulation
from flint import arb

from hushgrad.events import (
    ApproxDP,
    BallsInBins,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    FixedSize,
    Gaussian,
    Laplace,
    PureDP,
    RandomizedResponse,
    Sampled,
    TruncatedPoisson,
)

__all__ = ["KINDS", "Question", "few_steps"]

Truth = Callable[[float], tuple[float, float]]  # ln of bounds on delta at an epsilon


@dataclass(frozen=True)
class Question:
    """An event, what is asked, and a truth for each direction; ``exact``: the lower end can be refuted too."""

    event: Event
    delta: float
    relation: str
    truths: tuple[Truth, ...]
    exact: bool = True
    attained: tuple[Truth, ...] = ()  # of single data sets: from below only

    def __str__(self) -> str:
        return f"epsilon_interval({self.event!r}, delta={self.delta!r}, relation={self.relation!r})"


def _logs(low: arb, high: arb) -> tuple[float, float]:
    """Logarithms of the ends of an enclosure, the balls' own radii included."""
    ends = low.lower(), high.upper()
    return (
        tuple(float(end.log().mid()) if end > 0 else -math.inf for end in ends)
        if all(map(_is_number, ends))
        else (-math.inf, 0.0)
    )  # type: ignore[return-value]


def _log(least: arb) -> float:
    return float(least.lower().log().mid()) if least > 0 else -math.inf


def _is_number(x: arb) -> bool:
    return bool(x.is_finite())


def _balls(steps: list[balls.Pair], width: float) -> Truth:
    most = 1000 if len(steps) < 3 else 40  # three steps take the square of the work: wider enclosures, still proved

    def truth(epsilon: float) -> tuple[float, float]:
        low, high = balls.profile(steps, arb(epsilon).exp(), width, most)
        return _logs(low, high)

    return truth


def _scale(rng: random.Random) -> float:
    return 10 ** (rng.uniform(-2, 14) if rng.random() < 0.4 else rng.uniform(-1, 1))


def _delta(rng: random.Random) -> float:
    return 10 ** (rng.uniform(-290, -2) if rng.random() < 0.5 else rng.uniform(-20, -2))


def _rate(rng: random.Random) -> float:
    return 1.0 if rng.random() < 0.1 else 10 ** rng.uniform(-8, -0.02)


def _directions(pair: balls.Pair, rate: float | arb) -> list[list[balls.Pair]]:
    """Remove and add."""
    sampled = pair if rate == 1 else balls.Sampled(pair, arb(rate))
    return [[sampled], [balls.Mirror(sampled)]]


def _step(rng: random.Random, relation: str) -> tuple[Event, list[list[balls.Pair]]]:
    """One step with noise, and its pairs: one for each direction."""
    scale, rate = _scale(rng), _rate(rng)
    if relation == "replace_one":
        pair = balls.Gaussian(2 / arb(scale)) if rate == 1 else balls.Replace(1 / arb(scale), arb(rate))
        return Gaussian(scale).sampled(rate=rate), [[pair]]
    if rng.random() < 0.3:
        scale = min(max(scale, 1.5e-3), 1e8)
        return Laplace(scale).sampled(rate=rate), _directions(balls.Laplace(1 / arb(scale)), rate)
    return Gaussian(scale).sampled(rate=rate), _directions(balls.Gaussian(1 / arb(scale)), rate)


def few_steps(rng: random.Random, count: int) -> Question:
    """One to three different steps, in ball arithmetic."""
    delta, relation = _delta(rng), rng.choice(["add_remove", "zero_out", "replace_one"])
    balls.precision(delta, 1e14)
    steps = [_step(rng, relation) for _ in range(count)]
    event = sum((event for event, _ in steps[1:]), steps[0][0])
    width = {1: 0.0, 2: 1e-5, 3: 1e-2}[count]
    ways = range(len(steps[0][1]))
    return Question(event, delta, relation, tuple(_balls([pair for _, pairs in steps for pair in pairs[k]], width) for k in ways))


def enumerated(rng: random.Random) -> Question:
    """Discrete mechanisms, sampled or not, some tens of times."""
    delta, rate, relation = _delta(rng), _rate(rng), rng.choice(["add_remove", "zero_out", "replace_one"])
    balls.precision(delta, 1e8)
    kind = rng.choice(["response", "pure", "approximate", "laplace", "gaussian"])
    contributions = 2 if relation == "replace_one" else 1
    if kind == "response":
        relation = rng.choice(["zero_out", "replace_one"])
        p, k = rng.uniform(0.01, 0.99), rng.randint(2, 5)
        of: Event = RandomizedResponse(p, k)
        masses, times = enumeration.response(arb(p), k), rng.choice([1, 2, 10, 30])
    elif kind in ("pure", "approximate"):
        size, lost = 10 ** rng.uniform(-6, 1), 0.0 if kind == "pure" else delta * 10 ** rng.uniform(-6, -2)
        of = PureDP(size) if kind == "pure" else ApproxDP(size, lost)
        masses, times = enumeration.approximate(arb(size), arb(lost)), rng.choice([1, 2, 8])
        masses = masses if lost else masses[:2]
    elif kind == "laplace":
        scale, sensitivity = 10 ** rng.uniform(-1.5, 2), rng.randint(1, 3)
        of = DiscreteLaplace(scale, sensitivity)
        masses, times = enumeration.discrete_laplace(arb(scale), contributions * sensitivity), rng.choice([1, 2, 4])
    else:
        sigma = 10 ** rng.uniform(-0.5, 0.5)
        of = DiscreteGaussian(sigma)
        masses, times = enumeration.discrete_gaussian(arb(sigma), contributions), 1
        delta = max(delta, 1e-250)
    noise = isinstance(of, (DiscreteLaplace, DiscreteGaussian))
    if relation == "replace_one" and noise:
        rate = 1.0
    amplified = relation == "add_remove" or (relation == "zero_out" and noise)
    if rate < 1:
        masses = enumeration.sampled(masses, arb(rate)) if amplified else enumeration.shown(masses, arb(rate))
    ways = (masses, enumeration.mirrored(masses))
    return Question(
        of.sampled(rate=rate) * times, delta, relation, tuple(_balls([enumeration.composed(m, times)], 0.0) for m in ways)
    )


def fixed_size(rng: random.Random) -> Question:
    """Samples of a fixed size, one step and two: what two data sets attain."""
    delta, scale, n = _delta(rng), min(_scale(rng), 1e6), rng.choice([2, 10, 1000, 10**6])
    balls.precision(delta, 1e8)
    how = FixedSize(dataset_size=n, size=rng.randint(1, max(1, n // 2)))
    if rng.random() < 0.4:
        scale = 10 ** rng.uniform(-1.39, 1.5)
        found = tuple(
            lambda e, way=way: (_log(way.at_least(e)), 0.0) for way in cut_samples.opposite_to_all(arb(how.rate), scale)
        )
        return Question(Sampled(how, Gaussian(scale)), delta, "zero_out", found, exact=False)
    pairs = _directions(balls.Gaussian(2 / arb(scale)), how.rate)
    times = rng.choice([1, 2])
    truths = tuple(_balls(pair * times, 1e-6) for pair in pairs)
    return Question(Sampled(how, Gaussian(scale)) * times, delta, "replace_one", truths, exact=times == 1)


def two_bins(rng: random.Random) -> Question:
    """A pass over two bins, both ends."""
    delta, mu = 10 ** rng.uniform(-14, -2), 10 ** rng.uniform(-1.5, 0.8)
    balls.precision(delta, 1e3)
    relation = rng.choice(["add_remove", "zero_out"])

    def side(remove: bool) -> Truth:
        def truth(epsilon: float) -> tuple[float, float]:
            low, high = balls.two_bins(arb(mu), arb(epsilon).exp(), 1e-6, remove=remove)
            return _logs(low, high)

        return truth

    return Question(Sampled(BallsInBins(bins=2), Gaussian(1 / mu)), delta, relation, (side(True), side(False)))


def two_bins_replace(rng: random.Random) -> Question:
    """The same, one record replaced."""
    delta, mu = 10 ** rng.uniform(-12, -2), 10 ** rng.uniform(-1, 0.5)
    balls.precision(delta, 1e3)

    def truth(epsilon: float) -> tuple[float, float]:
        return _logs(*bins.two_bins_replace(arb(mu), arb(epsilon).exp(), 1e-4))

    return Question(Sampled(BallsInBins(bins=2), Gaussian(1 / mu)), delta, "replace_one", (truth,))


def many_bins(rng: random.Random) -> Question:
    """A pass over many bins, both ends."""
    delta, mu, count = 10 ** rng.uniform(-7, -2), 10 ** rng.uniform(-1.2, 0.2), int(10 ** rng.uniform(0.5, 4))

    def side(remove: bool) -> Truth:
        return lambda epsilon: bins.many_bins(mu, count, epsilon, remove=remove, floor=delta / 1000)

    event = Sampled(BallsInBins(bins=count), Gaussian(1 / mu))
    return Question(event, delta, rng.choice(["add_remove", "zero_out"]), (side(True), side(False)))


def truncated(rng: random.Random) -> Question:
    """Truncated Poisson samples: the lower end where all others are silent, the upper one also by a few records of any size."""
    delta, scale, relation = _delta(rng), 10 ** rng.uniform(-0.7, 1.5), rng.choice(["add_remove", "zero_out", "replace_one"])
    n = rng.choice([2, 3, 4, 5, 30, 1000])
    how = TruncatedPoisson(rate=10 ** rng.uniform(-3, -0.05), dataset_size=n, size=rng.randint(1, n))
    balls.precision(delta, 1e6)
    kept = cut_samples.kept(arb(how.rate), n, how.size)
    if relation == "replace_one":
        ways = [balls.Replace(1 / arb(scale), kept)]
    else:
        ways = [direction[0] for direction in _directions(balls.Gaussian(1 / arb(scale)), kept)]
    times = rng.choice([1, 1, 2])
    attained: tuple[Truth, ...] = ()
    if n <= 5 and times == 1:
        # the neighbour of a public number of records may have one more
        others = [rng.choice([-1.0, 1.0, rng.uniform(-1, 1)]) for _ in range(n if relation == "add_remove" else n - 1)]
        pair = cut_samples.Mixtures.of(arb(how.rate), how.size, others, scale, relation)
        attained = tuple(lambda e, way=way: (_log(way.at_least(e)), 0.0) for way in (pair, pair.mirrored()))
    truths = tuple(_balls([pair] * times, 1e-6) for pair in ways)
    return Question(Sampled(how, Gaussian(scale)) * times, delta, relation, truths, attained=attained)


def inverted(rng: random.Random) -> Question:
    """Very many steps of one or two kinds, by contour inversion."""
    delta, relation = 10 ** rng.uniform(-60, -2), rng.choice(["add_remove", "zero_out", "replace_one"])
    names = ("replace",) if relation == "replace_one" else ("remove", "add")
    drawn = [
        (10 ** rng.uniform(-5, -0.1), 10 ** rng.uniform(-0.5, 2), int(10 ** rng.uniform(0.7, 7)))
        for _ in range(rng.choice([1, 1, 2]))
    ]
    event: Event = sum(
        (Gaussian(s).sampled(rate=q) * n for q, s, n in drawn[1:]), Gaussian(drawn[0][1]).sampled(rate=drawn[0][0]) * drawn[0][2]
    )

    def side(name: str) -> Truth:
        def truth(epsilon: float) -> tuple[float, float]:
            value = inversion.log_delta([((name, q, 1 / s), n) for q, s, n in drawn], epsilon)
            return value - 1e-8, value + 1e-8

        return truth

    return Question(event, delta, relation, tuple(side(name) for name in names))


def simulated(rng: random.Random) -> Question:
    """Passes over bins, the same or fresh ones, under every relation, and what is composed with them: by simulation."""
    delta, relation, parts = 10 ** rng.uniform(-3.5, -1), rng.choice(["add_remove", "zero_out", "replace_one"]), []
    count, epochs, fresh = rng.choice([2, 3, 5, 10, 40]), rng.choice([1, 2, 5]), rng.random() < 0.5
    sigma = 10 ** rng.uniform(-0.3, 0.8)
    event: Event = Sampled(BallsInBins(bins=count, epochs=epochs, fresh=fresh), Gaussian(sigma))
    once = simulation.allocated((1 if fresh else math.sqrt(epochs)) / sigma, count, relation)
    parts.append(simulation.repeated(once, epochs if fresh else 1))
    if rng.random() < 0.6:
        scale, rate, times = 10 ** rng.uniform(-0.3, 0.8), 10 ** rng.uniform(-2, 0), rng.choice([1, 5])
        of, drawn = rng.choice([(Gaussian(scale), simulation.poisson), (Laplace(scale, scalar=True), simulation.laplace)])
        event = event + of.sampled(rate=rate) * times
        parts.append(simulation.repeated(drawn(1 / scale, rate, relation), times))
    seed = rng.getrandbits(32)
    truths = tuple(simulation.bounds(parts, seed + k, remove=k == 0) for k in (0, 1))
    return Question(event, delta, relation, truths)


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "one step (ball arithmetic)": lambda rng: few_steps(rng, 1),
    "two steps (ball arithmetic)": lambda rng: few_steps(rng, 2),
    "three steps (ball arithmetic)": lambda rng: few_steps(rng, 3),
    "discrete mechanisms (enumeration)": enumerated,
    "fixed size (ball arithmetic)": fixed_size,
    "two bins (ball arithmetic)": two_bins,
    "two bins, replaced (ball arithmetic)": two_bins_replace,
    "many bins (inversion)": many_bins,
    "truncated samples (ball arithmetic)": truncated,
    "many steps (contour inversion)": inverted,
    "passes over bins, composed (simulation)": simulated,
}
