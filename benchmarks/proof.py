"""What a proof costs: CPU time of the first one, in private steps, and as a share of a run of 1,000 of them.

    python benchmarks/proof.py [mlp:64 mlp:256 ...]

The first step of a model proves how its gradients are attributed. Later the whole proof is repeated at one step in 4,000, and a part of it
(about an eighth of the cost) three times as often. The number of examples is announced, as in a run. One thread; the median of 8 models.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
from models import CASES, Case
from step import build, loss_of

from hushgrad.clipping import Capture

MODELS = 8


def first_pass(case: Case) -> float:
    """CPU time of a new model's first pass above that of its second."""
    model, batch = case.model(), case.batch(case.size)
    capture, times = Capture(model), []
    capture.attach()
    for _ in range(2):
        capture.examples(case.size)
        start = time.process_time()
        loss_of(model(batch[0]), batch[1]).backward()
        times.append(time.process_time() - start)
        capture.discard()
    return times[0] - times[1]


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
            first_pass(case)  # what is loaded once
            steps = median(first_pass(case) for _ in range(MODELS)) / usual_step(case)
            print(f"{case.name} B={case.size}: a proof costs {steps:.1f} steps, {steps / 10:.2f} % of 1,000")


if __name__ == "__main__":
    main()
