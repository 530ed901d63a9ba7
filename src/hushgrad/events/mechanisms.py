"""Events of single mechanisms: noise on a sum, answers at random, stated guarantees."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hushgrad import _check
from hushgrad._value import LATER
from hushgrad.events._fields import noise, positive_noise, word
from hushgrad.events.composed import Event
from hushgrad.events.neighbours import Absent, Answers


@dataclass(frozen=True)
class Gaussian(Event):
    """N(0, ``noise_multiplier``² I) added to a sum of contributions of L2 norm at most 1. Multiplier 0 is no privacy.

    >>> from hushgrad import epsilon
    >>> print(f"{epsilon(Gaussian(4.0), delta=1e-5):.3f}")
    0.926
    >>> print(100 * Gaussian(4.0).sampled(rate=0.01))
    100 x Poisson(0.01) Gaussian(4)
    """

    noise_multiplier: float
    absent = Absent.NOTHING
    expected = _check.each(noise_multiplier=noise)


@dataclass(frozen=True)
class Laplace(Event):
    """Laplace noise of ``scale`` b (density exp(-|x|/b)/2b) added to a number to which each record contributes at most 1.

    Under add/remove it is (1/b)-DP. For a vector with a total L1 contribution of 1 this event is an upper bound, unless it says
    that the answer is a single number (``scalar``), which costs less on Poisson samples under replace-one.

        >>> from hushgrad import epsilon
        >>> print(f"{epsilon(Laplace(2.0), delta=0.0):.3f}")
        0.500
    """

    scale: float
    scalar: bool = field(default=False, metadata=LATER)
    absent = Absent.NOTHING
    expected = _check.each(scale=positive_noise, scalar=_check.flag)


@dataclass(frozen=True)
class DiscreteGaussian(Event):
    """Integer noise with P(k) proportional to exp(-k²/2 ``sigma``²) on an integer sum, contributions at most ``sensitivity``.

    >>> from hushgrad import epsilon
    >>> print(f"{epsilon(DiscreteGaussian(40.0, sensitivity=10), delta=1e-5):.3f}")
    0.926
    """

    sigma: float
    sensitivity: int = 1
    absent = Absent.NOTHING
    expected = _check.each(sigma=positive_noise, sensitivity=_check.positive_int)


@dataclass(frozen=True)
class DiscreteLaplace(Event):
    """Integer noise with P(k) proportional to exp(-|k|/``scale``) on an integer sum, contributions at most ``sensitivity``.

    With ``vector``: on each entry of a vector of sums, to which a record contributes at most ``sensitivity`` in total.

        >>> from hushgrad import epsilon
        >>> print(f"{epsilon(DiscreteLaplace(20.0, sensitivity=10), delta=0.0):.3f}")
        0.500
    """

    scale: float
    sensitivity: int = 1
    vector: bool = field(default=False, metadata=LATER)
    absent = Absent.NOTHING
    expected = _check.each(scale=positive_noise, sensitivity=_check.positive_int, vector=_check.flag)


@dataclass(frozen=True)
class RandomizedResponse(Event):
    """Each record answers truthfully, except that with ``noise_probability`` the answer is uniform over ``categories``.

    ``answers`` says whether the answers are published with names or only counted; a null record answers, too.

        >>> from hushgrad import epsilon
        >>> print(f"{epsilon(RandomizedResponse(0.5), delta=0.0, relation='replace_one'):.3f}")
        1.099
    """

    noise_probability: float
    categories: int = 2
    answers: Answers = field(default=Answers.UNKNOWN, metadata=LATER)
    single_answers = True
    expected = _check.each(
        noise_probability=_check.probability, categories=partial(_check.integer, 2), answers=partial(word, Answers)
    )


@dataclass(frozen=True)
class Exponential(Event):
    """The exponential mechanism with P(y) proportional to exp(``epsilon`` u(y) / 2), u of sensitivity 1: epsilon-DP.

    Its log-odds have a range of at most epsilon between neighbours, so it composes better than epsilon-DP alone tells.
    ``absent="nothing"`` says that a null record's utility is 0 everywhere.

        >>> from hushgrad import epsilon
        >>> epsilon(10 * Exponential(0.1), delta=1e-5) < epsilon(10 * PureDP(0.1), delta=1e-5)
        True
    """

    epsilon: float
    absent: Absent = field(default=Absent.UNKNOWN, metadata=LATER)
    stated = True
    expected = _check.each(epsilon=_check.non_negative, absent=partial(word, Absent))


@dataclass(frozen=True)
class PureDP(Event):
    """Any mechanism that is ``epsilon``-DP under the relation that the question is asked for.

    ``absent="nothing"`` says that a null record is to the mechanism as if it were not there; see :class:`Absent`.

        >>> from hushgrad import epsilon
        >>> [f"{epsilon(100 * PureDP(0.01), delta=delta):.3f}" for delta in (0.0, 1e-5)]
        ['1.000', '0.337']
    """

    epsilon: float
    absent: Absent = field(default=Absent.UNKNOWN, metadata=LATER)
    stated = True
    expected = _check.each(epsilon=_check.non_negative, absent=partial(word, Absent))


@dataclass(frozen=True)
class ApproxDP(Event):
    """Any mechanism that is (``epsilon``, ``delta``)-DP under the relation that the question is asked for.

    ``absent="nothing"`` says that a null record is to the mechanism as if it were not there; see :class:`Absent`.

        >>> from hushgrad import epsilon
        >>> [f"{epsilon(ApproxDP(1.0, 1e-6), delta=delta):.3f}" for delta in (1e-5, 1e-7)]
        ['1.000', 'inf']
    """

    epsilon: float
    delta: float
    absent: Absent = field(default=Absent.UNKNOWN, metadata=LATER)
    stated = True
    expected = _check.each(epsilon=_check.non_negative, delta=partial(_check.delta, zero=True), absent=partial(word, Absent))


@dataclass(frozen=True)
class ZCDP(Event):
    """Any mechanism that is ``rho``-zCDP (Bun and Steinke 2016) under the relation that the question is asked for.

    ``absent="nothing"`` says that a null record is to the mechanism as if it were not there; see :class:`Absent`.

        >>> from hushgrad import epsilon
        >>> print(f"{epsilon(ZCDP(0.1), delta=1e-5, accountant='zcdp'):.3f}")
        1.914
    """

    rho: float
    absent: Absent = field(default=Absent.UNKNOWN, metadata=LATER)
    stated = True
    expected = _check.each(rho=_check.non_negative, absent=partial(word, Absent))


@dataclass(frozen=True, kw_only=True)
class GaussianMixture(Event):
    """N(0, ``noise_multiplier``²) added to a sum to which the record contributes a random amount, hidden from the observer.

    The contribution has norm ``sensitivities[i]`` with probability ``probabilities[i]``. Poisson sampling of a Gaussian is
    the case (0, 1) with (1 - q, q); a banded matrix mechanism under cyclic Poisson sampling is another.

        >>> from hushgrad import epsilon
        >>> mixture = GaussianMixture(noise_multiplier=1.0, sensitivities=(0.0, 1.0), probabilities=(0.9, 0.1))
        >>> epsilon(mixture, delta=1e-5) == epsilon(Gaussian(1.0).sampled(rate=0.1), delta=1e-5)
        True
    """

    noise_multiplier: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]
    absent = Absent.NOTHING

    def __post_init__(self) -> None:
        sensitivities = tuple(_check.non_negative(sensitivities=s) for s in self.sensitivities)
        probabilities = tuple(_check.probability(probabilities=p) for p in self.probabilities)
        if not sensitivities or len(sensitivities) != len(probabilities):
            _check.fail("probabilities", self.probabilities, "to be as many as the sensitivities, at least one")
        if abs(sum(probabilities) - 1) > 1e-9:
            _check.fail("probabilities", self.probabilities, "to sum to 1")
        multiplier = noise(noise_multiplier=self.noise_multiplier)
        self._keep(noise_multiplier=multiplier, sensitivities=sensitivities, probabilities=probabilities)
