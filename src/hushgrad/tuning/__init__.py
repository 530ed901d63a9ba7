"""Tuning: private hyper-parameter search by random stopping, and what it really costs.

    >>> from hushgrad.events import Gaussian
    >>> from hushgrad.tuning import Stopping, tuning_cost
    >>> cost = tuning_cost(Gaussian(2.0).sampled(rate=0.02) * 500, delta=1e-5, stopping=Stopping(mean=10.0))
    >>> cost.epsilon > 1.5 * cost.naive  # what trying ten candidates or so costs, however many there are
    True

| file | what is in it |
|---|---|
| ``cost`` | the distribution of the number of trials, the theorem, calibration; all random choices as functions of one key |
| ``space`` | the candidates |
| ``price`` | a search before it begins: the noise of each candidate, and what it costs |
| ``score`` | scores that are covered by the guarantee, or public |
| ``search`` | the search itself: resumable, and only the best is released |
| ``winner`` | what leaves it, and the files of its folder |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._lazy_import import later
from hushgrad.tuning.cost import Draws, Stopping, TuningCost, calibrated_noise, number_of_trials, tuning_cost

if TYPE_CHECKING:
    from hushgrad.tuning.price import Priced, priced
    from hushgrad.tuning.search import tune
    from hushgrad.tuning.space import Settings, settings_of
    from hushgrad.tuning.winner import Tuned

__all__ = [
    "Draws",
    "Priced",
    "Settings",
    "Stopping",
    "Tuned",
    "TuningCost",
    "calibrated_noise",
    "number_of_trials",
    "priced",
    "settings_of",
    "tune",
    "tuning_cost",
]

# torch is imported only by who trains: the cost of a search is arithmetic.
__getattr__, __dir__ = later(__name__)
