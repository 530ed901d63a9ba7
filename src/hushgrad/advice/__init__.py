"""Advice: a recipe that needs no tuning, from public facts alone, with the expected accuracy and the reasons."""

from __future__ import annotations

from hushgrad.advice.advise import Advice, advise
from hushgrad.advice.codebook import Codebook, read_codebook

__all__ = ["Advice", "Codebook", "advise", "read_codebook"]
