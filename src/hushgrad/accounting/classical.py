r"""Classical theorems as functions, each with its conditions checked.

They are what lectures and papers print. A library user rarely needs them: the accountants are tighter. They are here to
reproduce published figures, and to refuse where a theorem does not apply. Noise is given by its *standard deviation*; several
texts print "variance" beside the same formulas.
"""

from __future__ import annotations

import math

from hushgrad import _check
from hushgrad.accounting.advanced import advanced_forms
from hushgrad.accounting.dp_statements import amplified
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.errors import NoTheorem
from hushgrad.events import Relation


def classical_gaussian_sigma(*, epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    r"""Sigma = sensitivity sqrt(2 ln(1.25/delta)) / epsilon, a standard deviation, for epsilon < 1 only.

    **Formal guarantee.** N(0, sigma²) noise gives (epsilon, delta)-DP. The proof needs epsilon < 1; the formula is really
    false from epsilon = 8.43 on (delta = 1e-5), so larger ones are refused.

        >>> round(classical_gaussian_sigma(epsilon=0.5, delta=1e-5), 4)
        9.6896

    Reference: Dwork and Roth 2014, theorem A.1.
    """
    epsilon, delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
    sensitivity = _check.positive(sensitivity=sensitivity)
    if epsilon >= 1.0:
        needed = analytic_gaussian_sigma(epsilon=epsilon, delta=delta, sensitivity=sensitivity)
        raise NoTheorem(
            f"Expected epsilon={epsilon} to be below 1: the classical Gaussian theorem is proved there only. "
            f"The analytic one needs sigma={needed:.6g}; call analytic_gaussian_sigma."
        )
    return sensitivity * math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


def analytic_gaussian_sigma(*, epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest sigma for which Gaussian noise is (epsilon, delta)-DP: exact, for every epsilon, rounded up.

    >>> round(analytic_gaussian_sigma(epsilon=1.0, delta=1e-5), 4)
    3.7306

    Reference: Balle and Wang 2018, theorem 8.
    """
    return _check.positive(sensitivity=sensitivity) / gaussian_mu(epsilon, delta)


def subsampled(*, epsilon: float, delta: float, rate: float, relation: Relation | str, sampling: str) -> tuple[float, float]:
    r"""(ln(1 + q (e^epsilon - 1)), q delta): an (epsilon, delta)-DP mechanism on a random sample.

    ``sampling="poisson"`` goes with add/remove (or zero-out), ``"without_replacement"`` with replace-one; the two are not
    mixed, and the relation of the result is that of the mechanism's own guarantee.

        >>> e, d = subsampled(epsilon=1.0, delta=1e-5, rate=0.01, relation="add_remove", sampling="poisson")
        >>> round(e, 6), d
        (0.017037, 1.0000000000000001e-07)

    Reference: Balle, Barthe and Gaboardi 2018, theorems 8 (Poisson) and 9 (without replacement).
    """
    relation = Relation.of(relation)
    _check.one_of(("poisson", "without_replacement"), sampling=sampling)
    fits = (relation is Relation.REPLACE_ONE) == (sampling == "without_replacement")
    if not fits:
        raise NoTheorem(
            f"The subsampling lemma for sampling={sampling!r} is not proved under relation={relation.value!r}. "
            "Poisson samples go with add/remove, samples without replacement with replace-one."
        )
    q = _check.rate(rate=rate)
    return amplified(_check.non_negative(epsilon=epsilon), q), q * _check.probability(delta=delta)


def advanced_composition(*, epsilon: float, delta: float, steps: int, slack: float) -> tuple[float, float]:
    """(epsilon', steps delta + slack) for ``steps`` adaptive mechanisms: the least of both printed forms and basic composition.

    >>> e, d = advanced_composition(epsilon=1.0, delta=0.0, steps=50, slack=1e-6)
    >>> e, d  # the first form gives 123, the second 60.3: both above basic composition here
    (50.0, 1e-06)

    Reference: Dwork, Rothblum and Vadhan 2010, theorem III.3; Kairouz, Oh and Viswanath 2015, theorem 3.5.
    """
    e, t = _check.non_negative(epsilon=epsilon), _check.positive_int(steps=steps)
    slack = _check.delta(slack=slack)
    total = min(1.0, t * _check.probability(delta=delta) + slack)
    return min(*advanced_forms([(e, t)], slack), e * t), total


def advanced_composition_step(*, epsilon: float, slack: float, steps: int) -> float:
    r"""The epsilon that each of ``steps`` mechanisms may have: epsilon / sqrt(8 T ln(1/slack)).

    **Formal guarantee.** With it, (step epsilon, delta')-DP steps compose to (epsilon, T delta' + slack). Two conditions are
    needed and checked: epsilon < 1 (printed), and epsilon <= 2 ln(1/slack) (rarely printed; fails for slack near 1).

        >>> round(advanced_composition_step(epsilon=0.5, slack=1e-6, steps=100), 6)
        0.004756

    Reference: Dwork and Roth 2014, corollary 3.21.
    """
    epsilon, slack = _check.positive(epsilon=epsilon), _check.delta(slack=slack)
    steps = _check.positive_int(steps=steps)
    if epsilon >= 1.0:
        raise NoTheorem(f"Expected epsilon={epsilon} to be below 1 for the corollary. Ask the advanced accountant.")
    if epsilon > 2.0 * math.log(1.0 / slack):
        raise NoTheorem(f"Expected epsilon={epsilon} to be at most 2 ln(1/slack). Use a smaller slack={slack}.")
    return epsilon / math.sqrt(8.0 * steps * math.log(1.0 / slack))


def dp_gd_sigma(*, epsilon: float, delta: float, lipschitz: float, dataset_size: int, steps: int) -> float:
    r"""The lectures' noise for full-batch DP gradient descent on a mean loss, a standard deviation:

        sigma = 8 L sqrt(T) / (epsilon n) (ln(1.25/delta) + ln(T + 1)).

    **Formal guarantee.** ``steps`` noisy gradients of an average of n L-Lipschitz losses are (epsilon, delta)-DP under
    replace-one (the average moves by 2L/n), for epsilon < 1 and epsilon <= 2 ln((T+1)/delta). Proof: with
    delta_0 = delta/(T + 1), each step is (epsilon_0, delta_0)-DP for epsilon_0 = epsilon/sqrt(8 T ln(1/delta_0)) when
    sigma >= (2L/n) sqrt(2 ln(1.25/delta_0))/epsilon_0 (so epsilon_0 < 1 as needed), and the advanced composition corollary
    gives (epsilon, (T + 1) delta_0). The product sqrt(16 ln(1/delta_0) ln(1.25/delta_0)) is at most
    4 ln(1.25/delta_0) = 4 (ln(1.25/delta) + ln(T+1)), which is the printed sigma. (The lectures print ln(1/delta) in
    epsilon_0, which would spend more than delta; their final sigma is large enough for the right reading.)

        >>> round(dp_gd_sigma(epsilon=0.5, delta=1e-5, lipschitz=1.0, dataset_size=10_000, steps=100), 4)
        0.2616

    It is far above what is needed: the pld accountant with ``calibrate`` gives the same guarantee with less noise.
    """
    epsilon, delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
    lipschitz, n = _check.positive(lipschitz=lipschitz), _check.positive_int(dataset_size=dataset_size)
    steps = _check.positive_int(steps=steps)
    advanced_composition_step(epsilon=epsilon, slack=delta / (steps + 1), steps=steps)  # checks both conditions
    return 8.0 * lipschitz * math.sqrt(steps) / (epsilon * n) * (math.log(1.25 / delta) + math.log(steps + 1.0))


def dp_lssgd_sigma(
    *, epsilon: float, delta: float, lipschitz: float, dataset_size: int, batch_size: int, steps: int, mu: float | None = None
) -> float:
    r"""The noise of DP-LSSGD's theorem 2 (Laplacian-smoothed DP-SGD), a standard deviation per coordinate of the batch mean:

        nu² = 20 T alpha G² / (mu n² epsilon),   alpha = ln(1/delta)/((1 - mu) epsilon) + 1,

    if some mu in (0, 1) has  alpha <= ln(mu n³ epsilon / (5 b³ T alpha + mu b n² epsilon))  and
    5 b² T alpha / (mu n² epsilon) >= 1.5. ``mu=None`` searches for the one with the least noise.

    **Formal guarantee.** (epsilon, delta)-DP for uniform batches without replacement under replace-one. The conditions are
    essential: outside of them the underlying lemma's bound is exceeded (by a factor of 270 at rate 0.01, order 20). They fail
    for the paper's own logistic regression (n = 50000, b = 128, 50 epochs, delta = 1e-5, epsilon 0.1 to 0.3): the order must
    be 39.8 or more there, and the logarithm is below 6. Then this raises; ask the accountants instead.

        >>> round(dp_lssgd_sigma(epsilon=5.0, delta=1e-5, lipschitz=1.0, dataset_size=50_000, batch_size=128, steps=19_531), 4)
        0.0191

    Reference: Wang et al. 2020, "DP-LSSGD", theorem 2 and lemma 11 (read with ln(1/(tau (1 + s²)))).
    """
    epsilon, delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
    lipschitz, n = _check.positive(lipschitz=lipschitz), _check.positive_int(dataset_size=dataset_size)
    b, steps = _check.positive_int(batch_size=batch_size), _check.positive_int(steps=steps)
    candidates = [k / 1000.0 for k in range(1, 1000)] if mu is None else [_check.between(0, 1, mu=mu)]
    sigmas = [s for m in candidates if (s := _lssgd(epsilon, delta, lipschitz, n, b, steps, m)) is not None]
    if not sigmas:
        alpha = math.log(1.0 / delta) / epsilon + 1.0
        raise NoTheorem(
            f"DP-LSSGD theorem 2 does not apply: no mu meets both conditions (the order must be above {alpha:.3g}, "
            f"and ln(n/b) is {math.log(n / b):.3g}). Calibrate with accounting.calibrate and FixedSize or Poisson sampling."
        )
    return min(sigmas)


def _lssgd(epsilon: float, delta: float, g: float, n: int, b: int, steps: int, mu: float) -> float | None:
    alpha = math.log(1.0 / delta) / ((1.0 - mu) * epsilon) + 1.0
    noise_ratio = 5.0 * b * b * steps * alpha / (mu * n * n * epsilon)  # nu² / (2G/b)²
    limit = math.log(n / (b * (1.0 + noise_ratio)))
    if alpha > limit or noise_ratio < 1.5:
        return None
    return math.sqrt(20.0 * steps * alpha / (mu * epsilon)) * g / n
