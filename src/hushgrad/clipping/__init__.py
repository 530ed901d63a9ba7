"""Clipping: per-example gradient clipping at almost the price of ordinary training."""

from hushgrad.clipping import rules
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.clipping.automatic import Automatic
from hushgrad.clipping.base import Clipped, ClippedSum, Clipper, Factors, Record, Rule, rule
from hushgrad.clipping.batchnorm import replace_batchnorm
from hushgrad.clipping.capture import Capture
from hushgrad.clipping.flat import Flat
from hushgrad.clipping.functional import clipped_sum
from hushgrad.clipping.isolated import isolation, isolation_at_first_call
from hushgrad.clipping.per_layer import PerLayer
from hushgrad.clipping.rules.parameter import Shared
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
    "clipped_sum",
    "isolation",
    "isolation_at_first_call",
    "replace_batchnorm",
    "rule",
    "rules",
    "self_check",
]
