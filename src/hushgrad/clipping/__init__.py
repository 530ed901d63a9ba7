"""Clipping: per-example gradient clipping at almost the price of ordinary training."""

from hushgrad.clipping import rules
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.clipping.automatic import Automatic
from hushgrad.clipping.base import ClippedSum, Clipper, Factors, Record, Rule, rule
from hushgrad.clipping.capture import Capture
from hushgrad.clipping.flat import Flat
from hushgrad.clipping.functional import clipped_sum
from hushgrad.clipping.per_layer import PerLayer
from hushgrad.clipping.rules.parameter import Shared

__all__ = [
    "Adaptive",
    "Automatic",
    "Capture",
    "ClippedSum",
    "Clipper",
    "Factors",
    "Flat",
    "PerLayer",
    "Record",
    "Rule",
    "Shared",
    "clipped_sum",
    "rule",
    "rules",
]
