"""Conformance of noise mechanisms: the theorem covers the noise, and the live noise is the noise of the theorem."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from scipy.stats import norm

from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import CyclicPoisson, Event, Everyone, Gaussian, MinSep, Once, Participation, Poisson, Repeat, Sampled
from hushgrad.noise.base import Mechanism
from hushgrad.noise.participation import pattern_of
from hushgrad.noise.source import Source
from hushgrad.noise.workload import SGDWorkload

FALSE_ALARM = 1e-6
"""How often the covariance test would reject right noise, over the choice of the seed."""

_PARTICIPATIONS = (Once(), MinSep(gap=3, times=3), MinSep(gap=1, times=2), Everyone())


def check_mechanism(mechanism: Mechanism, *, steps: int = 12, participation: Participation | None = None) -> None:
    """Raise AssertionError with one sentence if the mechanism breaks a promise of :class:`~hushgrad.noise.Mechanism`.

    For every participation (or the given one) the parameters are resolved and these are checked: N C = I and N is causal; the
    sensitivity is not below brute force over all patterns, signs and directions, for the first steps alone too; the event
    promises no more than that allows and improves with the noise; the live rows are N Z, resume bit for bit and end with the
    last row; their covariance is right, by a test that rejects a copy with one row 5 % too large; ``row_std``, ``unit_error``
    and ``state_size`` are true; the JSON form gives the mechanism back.

    Args:
        mechanism: the one to check.
        steps: number of rows; brute force over all patterns grows with it.
        participation: the only one to check; all that matter by default.

    >>> from hushgrad.events import Once
    >>> from hushgrad.noise import Tree
    >>> check_mechanism(Tree(), steps=4, participation=Once())
    """
    for who in _PARTICIPATIONS if participation is None else (participation,):
        fixed = mechanism.resolved(steps=steps, participation=who)
        _check_matrices(fixed, steps)
        _check_sensitivity(fixed, steps, who)
        _check_first_steps(fixed, steps, who)
        _check_event(fixed, steps, who)
        _check_json(fixed)
    _check_amplification(mechanism, steps)
    _check_error(fixed, steps, who)
    _check_stream(fixed, steps)
    _check_resume(fixed, steps)
    _check_end(fixed, steps)
    _check_covariance(fixed, steps)


def _name(mechanism: Mechanism) -> str:
    shown = str(mechanism)
    return shown if len(shown) < 100 else shown[:97] + "..."


# The theorem ---------------------------------------------------------------------------------------------------------------


def brute_force_sensitivity(C: np.ndarray, participation: Participation) -> float:
    """The largest ||C X||_F over all patterns of ``participation``, all signs, and directions by local ascent (small C only)."""
    steps = C.shape[1]
    X = C.T @ C
    worst = max(_worst_contribution(X[np.ix_(p, p)]) for p in _patterns(steps, participation))
    return float(np.sqrt(worst))


def _patterns(steps: int, participation: Participation) -> Iterator[list[int]]:
    limit = pattern_of(participation, steps)
    if limit.fixed_order:
        yield from (list(range(first, steps, limit.gap))[: limit.times] for first in range(limit.gap))
        return
    sizes = [steps] if limit.gap == 1 and limit.times == steps else range(1, limit.times + 1)
    for size in sizes:
        for p in itertools.combinations(range(steps), size):
            if all(b - a >= limit.gap for a, b in itertools.pairwise(p)):
                yield list(p)


def _worst_contribution(X: np.ndarray) -> float:
    """Max over unit vectors x_i of sum X_ij <x_i, x_j>: all signs, then ascent one vector at a time from random directions."""
    k = len(X)
    signs = np.array([(1, *rest) for rest in itertools.product((1, -1), repeat=k - 1)])
    best = float(np.max(np.einsum("si,ij,sj->s", signs, X, signs)))
    if (X >= 0).all():
        return best
    vectors = np.random.default_rng(0).normal(size=(k, k))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for _, i in itertools.product(range(20), range(k)):
        direction = X[i] @ vectors - X[i, i] * vectors[i]
        length = np.linalg.norm(direction)
        vectors[i] = direction / length if length > 0 else vectors[i]
    return max(best, float(np.sum(X * (vectors @ vectors.T))))


def _check_matrices(mechanism: Mechanism, steps: int) -> None:
    C, N = mechanism.strategy(steps), mechanism.noising(steps)
    assert N.shape == C.shape[::-1] == (steps, C.shape[0]), f"{_name(mechanism)}: N {N.shape} does not fit C {C.shape}"
    off = np.abs(N @ C - np.eye(steps)).max()
    assert off < 1e-8, f"{_name(mechanism)}: N C differs from the identity by {off:.2g}, so the noise is not that of C"
    last = np.array([np.flatnonzero(row)[-1] for row in C])
    early = (np.abs(N) > 1e-12) & (last[None, :] > np.arange(steps)[:, None])
    assert not early.any(), (
        f"{_name(mechanism)}: a row of noise needs a row of C that ends later, so adaptive steps are not covered"
    )


def _check_sensitivity(mechanism: Mechanism, steps: int, who: Participation) -> None:
    claimed = mechanism.sensitivity(steps=steps, participation=who)
    true = brute_force_sensitivity(mechanism.strategy(steps), who)
    assert claimed >= true * (1 - 1e-9), f"{_name(mechanism)}: sensitivity {claimed:.6g} under {who}, but {true:.6g} happens"


def _check_first_steps(mechanism: Mechanism, steps: int, who: Participation) -> None:
    """The sensitivity for t steps covers the first t rows of a longer run, which a ledger relies on."""
    C, N = mechanism.strategy(steps), mechanism.noising(steps)
    for t in (1, steps // 2, steps - 1):
        used = np.any(np.abs(N[:t]) > 1e-12, axis=0)
        true = brute_force_sensitivity(C[used][:, :t], who)
        claimed = mechanism.sensitivity(steps=t, participation=who)
        assert claimed >= true * (1 - 1e-9), (
            f"{_name(mechanism)}: sensitivity {claimed:.6g} for {t} steps, but {true:.6g} happens"
        )


def _check_event(mechanism: Mechanism, steps: int, who: Participation) -> None:
    weak, strong = (mechanism.event(s, who, steps) for s in (1.0, 3.0))
    true = brute_force_sensitivity(mechanism.strategy(steps), who)
    for sigma, event in ((1.0, weak), (3.0, strong)):
        effective = _effective_noise(event)
        assert effective <= sigma / true * (1 + 1e-9), (
            f"{_name(mechanism)}: {event} under {who} promises more than {sigma / true:.6g}"
        )
    assert _effective_noise(strong) > _effective_noise(weak), f"{_name(mechanism)}: more noise gives no better event than {weak}"


def _effective_noise(event: Event) -> float:
    """The noise multiplier of the one Gaussian that the event amounts to."""
    if isinstance(event, Repeat):
        return _effective_noise(event.of) / float(np.sqrt(event.times))
    assert isinstance(event, Gaussian), f"{event} is neither a Gaussian nor a repeated one"
    return event.noise_multiplier


def _check_amplification(mechanism: Mechanism, steps: int) -> None:
    """Sampled events are claimed only where a record's possible steps have disjoint columns of C."""
    who = CyclicPoisson(period=3, rate=0.1)
    fixed = mechanism.resolved(steps=steps, participation=who)
    C = fixed.strategy(steps)
    event = fixed.event(1.0, who, steps)
    if isinstance(event, Gaussian):
        assert event.noise_multiplier <= 1 / brute_force_sensitivity(C, who) * (1 + 1e-9), (
            f"{_name(mechanism)}: {event} under {who}"
        )
    else:
        X, lag = C.T @ C, np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
        assert not np.abs(X[lag >= who.period]).any(), (
            f"{_name(mechanism)}: claims {event}, but its columns overlap over a period"
        )
        assert isinstance(event, Repeat) and event.times >= -(-steps // who.period), f"{_name(mechanism)}: {event} misses a cycle"
        assert isinstance(event.of, Sampled) and event.of.how == Poisson(who.rate), (
            f"{_name(mechanism)}: {event} samples otherwise"
        )
        column = np.sqrt(X.diagonal().max())
        assert _effective_noise(event.of.of) <= 1 / column * (1 + 1e-9), f"{_name(mechanism)}: {event} ignores the columns' norm"
    try:
        sampled = fixed.event(1.0, Poisson(0.1), steps)
    except NoTheorem:
        return
    assert not np.any(C - np.diag(C.diagonal())), f"{_name(mechanism)}: claims {sampled} for correlated noise"


def _check_json(mechanism: Mechanism) -> None:
    again = Mechanism.from_json(mechanism.to_json())
    assert again == mechanism and hash(again) == hash(mechanism), f"{_name(mechanism)} does not survive its JSON form"


def _check_error(mechanism: Mechanism, steps: int, who: Participation) -> None:
    N = mechanism.noising(steps)
    for workload in (None, SGDWorkload(momentum=0.5, weight_decay=0.1), SGDWorkload(learning_rate=(1.0,) + (0.5,) * (steps - 1))):
        A = np.tri(steps) if workload is None else workload.matrix(steps)
        norms = np.linalg.norm(A @ N, axis=1)
        expected = float(np.sqrt(np.mean(norms**2))), float(norms.max())
        claimed = mechanism.unit_error(steps=steps, workload=workload)
        assert np.allclose(claimed, expected, rtol=1e-8), f"{_name(mechanism)}: unit error {claimed}, but it is {expected}"
        error = mechanism.error(steps=steps, participation=who, workload=workload)
        assert error.lower_bound <= error.rmse * (1 + 1e-9), (
            f"{_name(mechanism)}: rmse {error.rmse} below the bound {error.lower_bound}"
        )
    stds = [mechanism.row_std(t, steps=steps) for t in range(steps)]
    assert np.allclose(stds, np.linalg.norm(N, axis=1), rtol=1e-8), (
        f"{_name(mechanism)}: row_std is not the norm of the rows of N"
    )


# The live noise -------------------------------------------------------------------------------------------------------------


def _rows(mechanism: Mechanism, steps: int, like: torch.Tensor, seed: int = 0) -> np.ndarray:
    stream = mechanism.stream(Source(seed=seed), steps=steps)
    return np.stack([stream.row(t, 0, like).numpy() for t in range(steps)])


def _check_stream(mechanism: Mechanism, steps: int) -> None:
    like = torch.zeros(7, dtype=torch.float64)
    source = Source(seed=0)
    Z = np.stack([source.z(number, 0, like).numpy() for number in mechanism.draws(steps)])
    off = np.abs(_rows(mechanism, steps, like) - mechanism.noising(steps) @ Z).max()
    assert off < 1e-9, f"{_name(mechanism)}: the live rows differ from N Z by {off:.2g}"


def _check_resume(mechanism: Mechanism, steps: int) -> None:
    like = torch.zeros(5)
    whole = _rows(mechanism, steps, like)
    for stop in {1, steps // 2, steps - 1}:
        stream = mechanism.stream(Source(seed=0), steps=steps)
        for t in range(stop):
            stream.row(t, 0, like)
        state = copy.deepcopy(stream.state_dict())
        kept = sum(x.numel() for x in _tensors(state)) / like.numel()
        promised = mechanism.state_size(steps=steps)
        assert kept <= promised, f"{_name(mechanism)}: keeps {kept:g} numbers per parameter, state_size says {promised}"
        resumed = mechanism.stream(Source(seed=0), steps=steps)
        resumed.load_state_dict(state)
        rest = np.stack([resumed.row(t, 0, like).numpy() for t in range(stop, steps)])
        assert np.array_equal(rest, whole[stop:]), f"{_name(mechanism)}: rows after a resume at step {stop} are not the same bits"


def _tensors(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for item in state.values():
            yield from _tensors(item)
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from _tensors(item)


def _check_end(mechanism: Mechanism, steps: int) -> None:
    like = torch.zeros(2)
    stream = mechanism.stream(Source(seed=0), steps=steps)
    for t in range(steps):
        stream.row(t, 0, like)
    for step, what in ((steps, "runs past its last row"), (0, "repeats a row")):
        try:
            stream.row(step, 0, like)
        except ArgumentError:
            continue
        raise AssertionError(f"{_name(mechanism)}: the stream {what}")


def covariance_is_right(rows: np.ndarray, N: np.ndarray) -> bool:
    """Whether columns of ``rows`` may be draws from N(0, N Nᵀ), at a false-alarm rate of ``FALSE_ALARM``.

    Whitened by the Cholesky factor, the entries are independent standard normal, so each entry of their empirical covariance
    times sqrt(d) is nearly normal with variance 1 (2 on the diagonal); the largest is compared with Bonferroni's threshold.
    """
    white = np.linalg.solve(np.linalg.cholesky(N @ N.T), rows.astype(np.float64))
    count, d = white.shape
    deviation = np.abs(white @ white.T / d - np.eye(count)) * np.sqrt(d)
    deviation[np.diag_indices(count)] /= np.sqrt(2)
    return bool(deviation.max() < norm.isf(FALSE_ALARM / (count * (count + 1))))


def _check_covariance(mechanism: Mechanism, steps: int) -> None:
    rows = _rows(mechanism, steps, torch.zeros(30_000), seed=1)
    N = mechanism.noising(steps)
    assert covariance_is_right(rows, N), f"{_name(mechanism)}: the rows' covariance is not that of N Z"
    mutated = rows.copy()
    mutated[steps // 2] *= 1.05
    assert not covariance_is_right(mutated, N), f"{_name(mechanism)}: the covariance test has no power"
