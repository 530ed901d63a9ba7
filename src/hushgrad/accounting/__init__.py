"""Accounting: from an event to an epsilon. numpy and scipy only; importing it never imports torch.

    >>> from hushgrad.accounting import epsilon
    >>> from hushgrad.events import Gaussian
    >>> round(epsilon(Gaussian(1.0) * 100, delta=1e-5, accountant="gdp"), 3)
    91.817

| file | what is in it |
|---|---|
| ``base`` | the recursion over compositions; ``Accountant``, ``Loss`` |
| ``basic``, ``advanced``, ``optimal``, ``zcdp``, ``gdp``, ``rdp``, ``pld/`` | one accountant each |
| ``gaussian``, ``renyi``, ``renyi_sampled``, ``dp_statements``, ``renyi_conversion`` | the analyses that they share |
| ``api``, ``tradeoff``, ``group`` | epsilon, delta and what follows from them, as functions of an event |
| ``calibration``, ``calibration_target``, ``bracketing`` | which noise, rate or number of steps meets a budget |
| ``filters``, ``filter_rules``, ``reference_pool`` | budgets spent adaptively: does the next step still fit? |
| ``participation`` | which theorem covers a way of sampling; every accountant asks here |
| ``heuristics`` | every heuristic number, with its reason |
| ``contour_estimate`` | a fast estimate, never used for a claim |
| ``classical`` | printed theorems with their conditions |
"""

from __future__ import annotations

from hushgrad.accounting import classical
from hushgrad.accounting.advanced import Advanced
from hushgrad.accounting.api import delta, delta_curve, epsilon, epsilon_interval
from hushgrad.accounting.base import Accountant, Loss
from hushgrad.accounting.basic import Basic
from hushgrad.accounting.calibration import (
    Calibration,
    calibrate,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_rate,
    calibrate_steps,
    certified_calibration,
)
from hushgrad.accounting.contour_estimate import Estimate, estimate
from hushgrad.accounting.filters import Filter, Odometer
from hushgrad.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from hushgrad.accounting.gdp import GDP
from hushgrad.accounting.group import epsilon_for_group, for_group
from hushgrad.accounting.optimal import Optimal
from hushgrad.accounting.pld import PLD
from hushgrad.accounting.rdp import RDP
from hushgrad.accounting.tradeoff import Attack, advantage, attack, trade_off
from hushgrad.accounting.zcdp import ZCDP

__all__ = [
    "GDP",
    "PLD",
    "RDP",
    "ZCDP",
    "Accountant",
    "Advanced",
    "Attack",
    "Basic",
    "Calibration",
    "Estimate",
    "Filter",
    "Loss",
    "Odometer",
    "Optimal",
    "advantage",
    "attack",
    "calibrate",
    "calibrate_batch_size",
    "calibrate_noise",
    "calibrate_rate",
    "calibrate_steps",
    "certified_calibration",
    "classical",
    "delta",
    "delta_curve",
    "epsilon",
    "epsilon_for_group",
    "epsilon_interval",
    "estimate",
    "for_group",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "trade_off",
]
