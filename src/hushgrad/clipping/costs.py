"""Every threshold of the capture, and why it has its value."""

from __future__ import annotations

import torch

__all__ = [
    "AGAIN",
    "CLOCKS",
    "CROWD",
    "FEW",
    "FLOOR",
    "LENGTHS",
    "READINGS",
    "ROUNDING",
    "SCHEDULE",
    "SEAL",
    "TAME",
    "TRIES",
    "WILD",
]

# Tags: a cotangent that is nowhere above this part of the output's is rounding. In 3,818 random programs rounding was at most 2e-8.
FLOOR = {torch.float64: 1e-12, torch.float32: 1e-7, torch.bfloat16: 1e-4, torch.float16: 1e-4}
# The seal: relative to the gradient over all parameters. Rounding was at most 5e-7 (float32) and 8e-16; mixing at least 0.5.
SEAL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 5e-2}
# Of numbers that overflow nothing is proved: a second try is made with none above so many times the usual one.
TAME = 30.0
# Of sums over many terms that cancel: times the precision and what was added up. Only a remark hangs on it: no such gradient is released.
ROUNDING = 64
# Copies of one example run together, as a multiple of the batch: a capacity that this batch does not reach binds for them.
CROWD = 4
# Examples that are made extreme, and stay, in the seal: a threshold over the batch is reached by one of a few as by one of many.
FEW = 6
# Others' losses are so much larger than an example's own.
WILD = 1e10
# A model that counts its passes is tried as it will be so many passes later.
CLOCKS = (100, 100_000)
# A number that somebody sets before each pass (a temperature) is compared until so many of its values were proved.
SCHEDULE = 8
# The proof is repeated at one step in so many, chosen by a generator of its own.
AGAIN = 400
# Proofs that are repeated, in all, because a layer had no gradient in an earlier one.
TRIES = 8
# After so many proved lengths with the same layouts, another length between them is not proved before it is used.
LENGTHS = 3
# Ways to read which inputs hold the examples that are tried at most.
READINGS = 16
