"""Clipping: per-example gradient clipping at almost the price of ordinary training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._lazy_import import later
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.clipping.automatic import Automatic
from hushgrad.clipping.clipper import Clipped, Clipper
from hushgrad.clipping.flat import Flat
from hushgrad.clipping.per_layer import PerLayer

if TYPE_CHECKING:
    from hushgrad.clipping import rules
    from hushgrad.clipping.base import ClippedSum, Factors, Record, Rule, rule
    from hushgrad.clipping.batchnorm import replace_batchnorm
    from hushgrad.clipping.capture import Capture
    from hushgrad.clipping.functional import clipped_sum
    from hushgrad.clipping.isolation_check import isolation, isolation_at_first_call
    from hushgrad.clipping.rules.parameter import Shared
    from hushgrad.clipping.rules.standardised import WSConv2d
    from hushgrad.clipping.selfcheck import self_check

__all__ = [
    "Adaptive",
    "Automatic",
    "Capture",
    "Clipped",
    "ClippedSum",
    "Clipper",
    "Factors",
    "Flat",
    "PerLayer",
    "Record",
    "Rule",
    "Shared",
    "WSConv2d",
    "clipped_sum",
    "isolation",
    "isolation_at_first_call",
    "replace_batchnorm",
    "rule",
    "rules",
    "self_check",
]

# These need torch.
__getattr__, __dir__ = later(__name__)
