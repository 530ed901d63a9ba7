"""Advice: from public facts alone to a recipe that needs no tuning, with what to expect of it and why."""

from __future__ import annotations

from hushgrad.advice.advise import Advice, advise
from hushgrad.advice.codebook import Codebook, read_codebook

__all__ = ["Advice", "Codebook", "advise", "read_codebook"]
