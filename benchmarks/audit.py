"""Audits: the power of each bound on correct code and on code with too little noise, and what an audit costs.

    python benchmarks/audit.py [--quick] [--json PATH]

The settings are those of the published comparison of bounds on gradient canaries: 2,000 Dirac canaries, one run, delta 1e-5, 95 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from hushgrad import Plan
from hushgrad.audit import Auditor, AuditReport
from hushgrad.release.core import Release

METHODS = ("clopper-pearson", "one run", "one run f-dp", "clopper-pearson gdp")


def plans(n: int) -> dict[str, tuple[Plan, float]]:
    one = Plan.dpgd(noise_multiplier=1.0, delta=1e-5, dataset_size=n, steps=1)
    fifty = Plan.dpgd(noise_multiplier=50**0.5, delta=1e-5, dataset_size=n, steps=50)
    sampled = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=n // 5, dataset_size=n, steps=100)
    blt = Plan.dpftrl(noise_multiplier=2.0, delta=1e-5, batch_size=n // 10, dataset_size=n, epochs=3)
    return {
        "1 release, noise 1": (one, 1.0),
        "50 steps, noise 7.07": (fifty, 1.0),
        "50 steps, noise halved (defect)": (fifty, 0.5),
        "Poisson 0.2, 100 steps, noise 1": (sampled, 1.0),
        "BLT, 3 epochs of 10 steps, noise 2": (blt, 1.0),
        "BLT, noise halved (defect)": (blt, 0.5),
    }


def audited(plan: Plan, factor: float, canaries: int, seed: int) -> tuple[AuditReport, float]:
    add = Release._add

    def scaled(self: Release, step: int, buffers: dict[str, torch.Tensor]) -> None:
        noise = {name: torch.zeros_like(total) for name, total in buffers.items()}
        add(self, step, noise)
        for name, total in buffers.items():
            total.add_(noise[name], alpha=factor)

    Release._add = scaled  # type: ignore[method-assign]
    try:
        began = time.process_time()
        report = Auditor(plan, canaries=canaries, steps=100, seed=seed).run()
        return report, time.process_time() - began
    finally:
        Release._add = add  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    canaries, repeats = (500, 1) if options.quick else (2000, 3)
    audited(plans(100)["1 release, noise 1"][0], 1.0, 100, 0)  # imports
    rows = []
    print(f"{canaries} canaries, median of {repeats} seeds")
    print(f"{'setting':36}{'claimed':>8}" + "".join(f"{m:>21}" for m in METHODS) + f"{'CPU s':>7}  refuted by")
    for name, (plan, factor) in plans(canaries).items():
        found = [audited(plan, factor, canaries, seed) for seed in range(repeats)]
        medians = {m: statistics.median(r.bound(m) for r, _ in found) for m in METHODS}
        row = {
            "setting": name,
            "claimed": found[0][0].claimed.epsilon,
            **medians,
            "cpu_seconds": statistics.median(s for _, s in found),
            "refuted_by": list(found[0][0].refuted_by),
        }
        rows.append(row)
        cells = "".join(f"{medians[m]:>21.2f}" for m in METHODS)
        print(
            f"{name:36}{row['claimed']:>8.2f}{cells}{row['cpu_seconds']:>7.1f}  {', '.join(row['refuted_by']) or '-'}", flush=True
        )
    bound = rows[1]["clopper-pearson gdp"]
    right = all(bool(row["refuted_by"]) == ("defect" in str(row["setting"])) for row in rows)
    if not options.quick:
        print(f"CP + GDP at a claim of 4.38, target >= 3.0: {bound:.2f} {'PASS' if float(str(bound)) >= 3.0 else 'MISS'}")
    print(f"defects refuted, correct code not: {'PASS' if right else 'MISS'}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"canaries": canaries, "repeats": repeats, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
