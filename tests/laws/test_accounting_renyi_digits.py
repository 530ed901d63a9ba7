"""Rényi curves of pure mechanisms are never below the truth, in the last digits either: small epsilons, orders up to 1e11."""

from __future__ import annotations

import math
from random import Random

import mpmath as mp
import pytest

from hushgrad.accounting import epsilon_interval, renyi
from hushgrad.accounting.renyi_sampled import shown
from hushgrad.events import PureDP


def _response(alpha, epsilon, categories):
    p = mp.e**epsilon / (mp.e**epsilon + categories - 1)
    q = p / mp.e**epsilon
    return mp.log(p**alpha * q ** (1 - alpha) + q**alpha * p ** (1 - alpha) + (categories - 2) * q) / (alpha - 1)


def _laplace(alpha, epsilon):
    first = alpha / (2 * alpha - 1) * mp.e ** ((alpha - 1) * epsilon)
    return mp.log(first + (alpha - 1) / (2 * alpha - 1) * mp.e ** (-alpha * epsilon)) / (alpha - 1)


def _discrete_laplace(alpha, epsilon, distance):
    """Masses proportional to e^{-|k| / scale} with distance / scale = epsilon: the tails are geometric."""
    t = mp.mpf(epsilon) / distance
    norm = mp.tanh(t / 2)
    left = mp.e ** (-(alpha - 1) * -epsilon) / (1 - mp.e**-t)  # outputs k <= 0
    right = mp.e ** (-alpha * epsilon) / (1 - mp.e**-t)  # outputs k >= distance
    inside = mp.fsum(mp.e ** (-alpha * k * t + (alpha - 1) * (distance - k) * t) for k in range(1, distance))
    return mp.log(norm * (left + right + inside)) / (alpha - 1)


@pytest.mark.parametrize("seed", range(4))
def test_no_curve_is_below_the_truth(seed):
    lot = Random(seed)
    with mp.workdps(60):
        for _ in range(150):
            epsilon = 10 ** lot.uniform(-8, 1.3)
            alpha = 1 + 10 ** lot.uniform(-5, min(11, math.log10(3000 / epsilon)))
            k, d, rate, order = lot.randint(2, 6), lot.randint(1, 4), 10 ** lot.uniform(-8, -0.01), mp.mpf(alpha)
            lie = -float(mp.log(mp.e**epsilon + k - 1))
            pure = _response(order, mp.mpf(epsilon), 2)
            pairs = {
                "pure": (renyi.pure(epsilon)(alpha), pure),
                "response": (
                    renyi.response(lie + epsilon, lie, k - 2, largest=epsilon)(alpha),
                    _response(order, mp.mpf(epsilon), k),
                ),
                "laplace": (renyi.laplace(epsilon)(alpha), _laplace(order, mp.mpf(epsilon))),
                "discrete": (renyi.discrete_laplace(d / epsilon, d)(alpha), _discrete_laplace(order, d / mp.mpf(d / epsilon), d)),
                "shown": (shown(renyi.pure(epsilon), rate)(alpha), mp.log1p(rate * mp.expm1((order - 1) * pure)) / (order - 1)),
            }
            low = [name for name, (ours, truth) in pairs.items() if ours < truth * (1 - mp.mpf(10) ** -18)]
            assert not low, (low, epsilon, alpha)


def test_two_shown_steps_at_a_tiny_epsilon():
    """The composition is exact here; the Rényi net below it was 3e-11 short."""
    epsilon, rate, delta = 1.120450941563267e-06, 4.147095843267146e-05, 1.3186342509952627e-17
    low, high = epsilon_interval(PureDP(epsilon).sampled(rate=rate) * 2, delta=delta, relation="replace_one")
    with mp.workdps(50):
        both = (rate * mp.e**epsilon / (1 + mp.e ** mp.mpf(epsilon))) ** 2
        assert low <= 2 * mp.mpf(epsilon) + mp.log(1 - delta / both) <= high
