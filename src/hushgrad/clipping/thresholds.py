"""Every threshold of the capture, and why it has its value."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Tags: where terms cancel, only rounding is left, which triples with nothing. If a cotangent differs by more than this, relatively, from
# three times itself when the outputs' cotangents are tripled, it has not two correct bits. Only cotangents below sqrt(eps) of the largest
# are tested: above, thousands of roundings would have to agree.
TRIPLE_TOLERANCE = 0.25
# To find weak paths between examples, others' losses are multiplied by two to this power: an influence of 1e-20 shows, and gradients below
# 1e24 do not overflow.
HUGE_LOSS_EXPONENT = 48
# The seal's tolerance, relative to the gradient over all parameters. Rounding was at most 5e-7 (float32) and 8e-16; mixing at least 0.5.
SEAL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 5e-2}
# Nothing can be proved with numbers that overflow: a second attempt clamps those that are more than this many times the median.
OUTLIER = 30.0
# The rounding of sums whose terms cancel: this factor times the precision times the size of the terms. A norm of a few equal numbers
# enlarges rounding 316-fold (eps = 1e-5). Below the seal's tolerance in single precision. It only decides whether to refuse: such a
# gradient is not released anyway.
CANCELLATION = 512
# How many examples the seal uses when it makes some extreme: one of a few reaches a threshold over the batch as one of many does.
SEAL_EXAMPLES = 10
# How many of these stay as they are.
SEAL_UNCHANGED = 3
# The factor of other examples' losses in the seal.
HUGE_LOSS = 1e10
# The factor of the example's own loss there: a power of two, so that its gradient is multiplied by exactly that.
OWN_HUGE_LOSS = 2.0**30
# A model that counts its passes is also tried with its counters this many passes ahead.
LATER_PASSES = (100, 100_000)
# And as it will be in each of the next ones: what it does in every second to tenth pass shows there.
NEXT_PASSES = range(1, 10)
# How often a proof climbs from gradients that are sums over the examples, though each number has one owner by chance: each climb passes the
# next operation on every path, and a path has few between a table and the examples.
MOST_CLIMBS = 8
# How many of the constants that a forward compares its tensors with are tried in place of others' data.
MOST_CONSTANTS = 8
# Weights are tried up to the first size, and at constants that the forward subtracts or compares with up to the second; training does not
# lead beyond.
LARGE_WEIGHT, HUGE_WEIGHT = 2.5, 1e6
# A number that the user sets before each pass (a temperature) is compared until this many of its values were proved.
SCHEDULE_VALUES = 8
# At one step in this many, chosen at random, other examples are replaced and made extreme again; at one in four of those the whole proof
# is repeated.
REPEAT_ONE_IN = 1000
# How many proofs are repeated in all because a layer had no gradient in an earlier one.
MOST_REPEATS = 8
# A model is looked at as a whole after this many traced passes, to tell whether it is a chain of torch's own layers, which needs no trace:
# as long as nothing else has changed it in between, at the first of them. A look costs as much as a few dozen traces.
LOOK_AGAIN = 64
# How many examples are added to the few that a proof runs alone, if others have a gradient where these have none.
MOST_SHOWN = 4
# After this many proved lengths with the same layouts, a length between them needs no proof of its own.
PROVED_LENGTHS = 3
# How many readings of the inputs are tried at most.
MOST_READINGS = 16
# A batch's graph and that of a few of its examples are kept together if the first is this many times as large.
MUCH_LARGER = 16
# Numbers in the outputs (4 MB in single precision) beyond which a crowd is as small as allowed.
MANY_NUMBERS = 1 << 20


def crowd(examples: int, numbers: int = 0) -> int:
    """How many examples run together in the seal, so that a capacity which the batch does not reach becomes binding.

    ``numbers``: in all outputs. If there are many, a crowd would take several times the memory of a step, so it is smaller, as for large
    batches. Larger batches are proved anew: whatever is released has met a crowd of twice its size.
    """
    return 2 * examples if numbers >= MANY_NUMBERS else max(2 * examples, min(4 * examples, 64))


def seal_of(dtypes: Iterable[torch.dtype]) -> float:
    """The seal's tolerance if something is computed in each of these precisions: that of the lowest."""
    return max(SEAL.get(dtype, SEAL[torch.float16]) for dtype in dtypes)
