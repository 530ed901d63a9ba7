"""Clipping: per-example gradient clipping at almost the price of ordinary training."""

from hushgrad.clipping import rules
from hushgrad.clipping.base import ClippedSum, Clipper, Factors, Record, Rule, rule
from hushgrad.clipping.capture import Capture
from hushgrad.clipping.flat import Flat
from hushgrad.clipping.functional import clipped_sum

__all__ = ["Capture", "ClippedSum", "Clipper", "Factors", "Flat", "Record", "Rule", "clipped_sum", "rule", "rules"]
