"""What proofs cost: CPU time in private steps, and as a share of a run of 1,000 of them.

    python benchmarks/proof.py [mlp:64 mlp:256 ...]

The first step of a model proves how its gradients are attributed. Later, at steps drawn at random, the whole proof is repeated (one step in
4,000) or a part of it (three times as often); what they cost in the mean is part of the total. The number of examples is announced, as in a
run. One thread; medians of 16 models.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
from models import CASES, Case
from step import build, loss_of

from hushgrad.clipping import Capture
from hushgrad.clipping.thresholds import REPEAT_ONE_IN

MODELS = 16
STEPS = 1000
WHOLE, PART = 0.5, 1.5  # what is drawn at a step that repeats the proof, or a part of it


def passes(case: Case) -> tuple[float, float, float]:
    """CPU time of a new model's first pass above that of its second, of a pass that repeats the proof, and of one that repeats a part."""
    model, batch = case.model(), case.batch(case.size)
    capture, times = Capture(model), []
    capture.attach()
    lot = capture._root._lot
    usual = lot.random
    for drawn in (None, None, WHOLE, PART):
        lot.random = usual if drawn is None else lambda drawn=drawn: drawn / (4 * REPEAT_ONE_IN)  # type: ignore[method-assign, misc]
        capture.examples(case.size)
        start = time.process_time()
        loss_of(model(batch[0]), batch[1]).backward()
        times.append(time.process_time() - start)
        capture.discard()
    first, second, whole, part = times
    return first - second, whole - second, part - second


def usual_step(case: Case) -> float:
    """CPU time of a private step."""
    step, times = build("hushgrad", case), []
    for _ in range(40):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return median(times)


def main() -> None:
    wanted = sys.argv[1:] or ["mlp:64", "mlp:256", "cnn:64"]
    torch.set_num_threads(1)
    for case in CASES:
        if f"{case.name}:{case.size}" in wanted:
            passes(case)  # what is loaded once
            usual = usual_step(case)
            first, whole, part = (median(times) / usual for times in zip(*(passes(case) for _ in range(MODELS)), strict=True))
            again = STEPS / (4 * REPEAT_ONE_IN) * (whole + 3 * part)
            print(
                f"{case.name} B={case.size}: a proof costs {first:.1f} steps ({whole:.1f} if repeated, {part:.1f} for a part of it), "
                f"{(first + again) / STEPS:.2%} of {STEPS:,}, of which {again / STEPS:.2%} are repeats"
            )


if __name__ == "__main__":
    main()
