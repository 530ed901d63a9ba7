"""The certified accountant: privacy-loss distributions with bounds from both sides.

Three layers, arrows down only (import-linter): ``search`` -> ``bounds`` -> ``profiles``; above them the analysis of each event.

| file | what is in it |
|---|---|
| ``profiles/``: ``curve``, ``poisson``, ``continuous``, ``discrete`` | privacy profiles of single steps, to full relative accuracy |
| ``bounds/``: ``grid``, ``from_above``, ``from_below`` | discretisations that dominate a profile, or are dominated by it |
| ``bounds/``: ``compose`` | the tilted FFT and its error bounds |
| ``bounds/``: ``blend_steps``, ``merge_steps`` | near-equal steps rounded to one, on the safe side |
| ``bounds/``: ``convex_order``, ``allocation``, ``replace_one_allocation`` | the profile of a whole run over balls in bins |
| ``search/``: ``saddle_point``, ``error_allowance``, ``epsilon_bounds``, ``delta_bounds`` | tilt, window and step for a question |
| ``loss``, ``leaves``, ``accountant`` | the loss object, the analysis of each event, ``PLD`` |
"""

from __future__ import annotations

from hushgrad.accounting.pld import leaves as _leaves  # registers the analyses
from hushgrad.accounting.pld.accountant import PLD
from hushgrad.accounting.pld.loss import PrivacyLoss

__all__ = ["PLD", "PrivacyLoss"]
del _leaves
