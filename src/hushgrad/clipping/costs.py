"""Every threshold of the capture, and why it has its value."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = [
    "AGAIN",
    "BEYOND",
    "CLOCKS",
    "COMPARED",
    "FAR",
    "FEW",
    "KEPT",
    "LARGE",
    "LENGTHS",
    "LOUD",
    "MANY",
    "MUCH",
    "MULTIPLE",
    "READINGS",
    "ROUNDING",
    "SCHEDULE",
    "SEAL",
    "TAME",
    "TRIES",
    "WILD",
    "crowd",
    "seal_of",
]

# Tags: what is left of terms that cancel is rounding, which is no multiple of anything. A cotangent that is relatively so far from three
# times itself, when the outputs' is three times as large, has not two bits that are right. One below sqrt(eps) of the largest may be of
# that kind and is asked; above it thousands of roundings would have to agree.
MULTIPLE = 0.25
# Others' losses are so many powers of two larger, where a faint way from one example to another is looked for: one of 1e-20 shows, and
# gradients below 1e24 do not overflow.
FAR = 48
# The seal: relative to the gradient over all parameters. Rounding was at most 5e-7 (float32) and 8e-16; mixing at least 0.5.
SEAL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 5e-2}
# Of numbers that overflow nothing is proved: a second try is made with none above so many times the usual one.
TAME = 30.0
# Of sums over many terms that cancel: times the precision and what was added up; a norm of a few alike numbers makes rounding 316 times as
# large (eps = 1e-5). Below the seal's own tolerance in single precision. Only a remark hangs on it: no such gradient is released.
ROUNDING = 512
# Examples among which some are made extreme in the seal: a threshold over the batch is reached by one of a few as by one of many.
FEW = 10
# Of these, so many stay as they are.
KEPT = 3
# Others' losses are so much larger than an example's own.
WILD = 1e10
# And its own so much larger than it is: without rounding, its gradient is as many times as large.
LOUD = 2.0**30
# A model that counts its passes is tried as it will be so many passes later.
CLOCKS = (100, 100_000)
# Of the numbers that a forward compares its tensors with, so many are tried in the place of others' data.
COMPARED = 8
# Weights are tried up to such a size; and at what the forward takes from them or compares them with, up to the other: beyond it no training
# leads.
LARGE, BEYOND = 2.5, 1e6
# A number that somebody sets before each pass (a temperature) is compared until so many of its values were proved.
SCHEDULE = 8
# At one step in so many, chosen by a generator of its own, the others are replaced and made extreme once more; at one in four of these the
# whole proof is repeated.
AGAIN = 1000
# Proofs that are repeated, in all, because a layer had no gradient in an earlier one.
TRIES = 8
# After so many proved lengths with the same layouts, another length between them is not proved before it is used.
LENGTHS = 3
# Ways to read which inputs hold the examples that are tried at most.
READINGS = 16
# The graph of a batch is kept beside that of a few of its examples if it is so many times as large.
MUCH = 16
# Numbers of outputs (4 MB in single precision) beyond which a crowd is as small as it may be.
MANY = 1 << 20


def crowd(examples: int, numbers: int = 0) -> int:
    """How many examples run together in the seal, so that a capacity which the batch does not reach becomes binding.

    ``numbers``: in all outputs. If there are many, a crowd would take several times the memory of a step, so it is smaller, as for large
    batches. Larger batches are proved anew: whatever is released has met a crowd of twice its size.
    """
    return 2 * examples if numbers >= MANY else max(2 * examples, min(4 * examples, 64))


def seal_of(dtypes: Iterable[torch.dtype]) -> float:
    """The seal's tolerance if something is computed in each of these precisions: that of the lowest."""
    return max(SEAL.get(dtype, SEAL[torch.float16]) for dtype in dtypes)
