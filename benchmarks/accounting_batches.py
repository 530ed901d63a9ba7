"""Batches, noise and choices beyond Poisson samples of Gaussian noise: certified intervals beside whatever peer knows the run.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/accounting_batches.py [--json PATH] [--docs docs/accounting-figures.md]

Peers are optional: dp-accounting (its PLD, else its RDP), PLD_accounting (Feldman and Shenfeld's random allocation, also in newer
dp-accounting), jax-privacy (its own description of a run). A peer that is missing or has no analysis shows "-" and why.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hushgrad._printed import at_least, at_most
from hushgrad.accounting import epsilon_interval
from hushgrad.errors import HushgradError
from hushgrad.events import (
    BallsInBins,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    Laplace,
    Sampled,
    TruncatedPoisson,
    to_dp_accounting,
)

DELTA = 1e-6


class Case(NamedTuple):
    """A run, what its upper end must not exceed, and how much of it the lower end must reach."""

    event: Event
    relation: str
    most: float
    share: float = 0.0
    peers: tuple[str, ...] = ()


def truncated(size: int) -> Event:
    """A thousand steps of a truncated Poisson sample."""
    return Sampled(TruncatedPoisson(rate=0.01, dataset_size=10_000, size=size), Gaussian(1.0)) * 1000


CASES = [
    Case(Sampled(BallsInBins(bins=100), Gaussian(0.6)), "add_remove", 4.26, 0.95, ("allocation",)),
    Case(Sampled(BallsInBins(bins=100), Gaussian(1.0)), "add_remove", 0.8583, 0.95, ("allocation",)),
    Case(Sampled(BallsInBins(bins=1000, epochs=10), Gaussian(1.0)), "add_remove", 12.53, 0.95),
    Case(Sampled(BallsInBins(bins=100, epochs=10, fresh=True), Gaussian(1.0)), "add_remove", 1.966, 0.95, ("allocation",)),
    Case(Sampled(BallsInBins(bins=100), Gaussian(1.0)), "replace_one", 1.02, 0.95),
    Case(Sampled(BallsInBins(bins=10, epochs=3, fresh=True), Gaussian(2.0)), "replace_one", 2.52),
    Case(truncated(120), "add_remove", 2.67, 0.0, ("dp", "jax")),
    Case(truncated(130), "add_remove", 2.19, 0.0, ("dp", "jax")),
    Case(truncated(140), "add_remove", 2.15, 0.0, ("dp", "jax")),
    Case(Laplace(1.0).sampled(rate=0.1) * 100, "replace_one", 9.6, 0.0, ("dp",)),
    Case(Laplace(1.0, scalar=True).sampled(rate=0.1) * 100, "replace_one", 8.1, 0.99, ("dp",)),
    Case(Sampled(FixedSize(dataset_size=1000, size=10), Gaussian(1.0)) * 1000, "zero_out", 12.3, 0.95, ("dp",)),
    Case(Sampled(FixedSize(dataset_size=1000, size=10), Gaussian(1.0)) * 1000, "replace_one", 16.97, 0.9, ("dp",)),
    Case(Exponential(1.0) * 10, "add_remove", 7.75, 0.99),
    Case(Exponential(0.5) * 100, "add_remove", 14.35, 0.99),
]


def dp(event: Event, relation: str) -> float:
    """dp-accounting's PLD, or its RDP where that has no analysis."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    names = {"add_remove": "ADD_OR_REMOVE_ONE", "replace_one": "REPLACE_ONE", "zero_out": "REPLACE_SPECIAL"}
    between = getattr(dp_accounting.NeighboringRelation, names[relation])
    # under replace-one its RDP takes the noise multiplier for the distance of a replacement: another question
    for kind in (PLDAccountant,) if relation == "replace_one" else (PLDAccountant, RdpAccountant):
        accountant = kind(neighboring_relation=between)
        if accountant.supports(to_dp_accounting(event)):
            return float(accountant.compose(to_dp_accounting(event)).get_epsilon(DELTA))
    raise HushgradError("no analysis")


def jax(event: Any, relation: str) -> float:
    """The run as jax-privacy describes it."""
    from dp_accounting.pld import PLDAccountant
    from jax_privacy.experimental import accounting

    how, sigma = event.of.how, event.of.of.noise_multiplier
    described = accounting.truncated_dpsgd_event(
        sigma, event.times, sampling_prob=how.rate, num_examples=how.dataset_size, truncated_batch_size=how.size
    )
    return float(PLDAccountant().compose(described).get_epsilon(DELTA))


def allocation(event: Any, relation: str) -> float:
    """PLD_accounting's upper bound, at its default accuracy."""
    from PLD_accounting import gaussian_allocation_epsilon_range

    bounds = gaussian_allocation_epsilon_range(
        delta=DELTA, sigma=event.of.noise_multiplier, num_steps=event.how.bins, num_epochs=event.how.epochs
    )
    return float(max(bounds))


PEERS: dict[str, tuple[str, Callable[[Any, str], float]]] = {
    "dp": ("dp-accounting", dp),
    "jax": ("jax-privacy", jax),
    "allocation": ("PLD_accounting", allocation),
}


def asked(name: str, case: Case) -> str:
    """A peer's answer and CPU seconds."""
    title, ask = PEERS[name]
    start = time.process_time()
    try:
        return f"{title} {ask(case.event, case.relation):.4g}, {time.process_time() - start:.1f} s"
    except (ImportError, HushgradError, ValueError, NotImplementedError) as error:
        return f"{title} - ({'not installed' if isinstance(error, ImportError) else 'no analysis'})"


def main() -> None:
    """Run and print a table; PASS where a bound is as tight as it should be and took at most five seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--docs", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    rows, lines = [], ["| run | relation | certified interval | seconds | peers |", "|---|---|---|---|---|"]
    for case in CASES:
        start = time.process_time()
        lower, upper = epsilon_interval(case.event, delta=DELTA, relation=case.relation)
        seconds = time.process_time() - start
        passed = upper <= case.most and lower >= case.share * upper and seconds <= 5
        peers = "; ".join(asked(name, case) for name in case.peers)
        rows.append({"event": str(case.event), "relation": case.relation, "lower": lower, "upper": upper, "seconds": seconds})
        ends = f"{at_least(lower, 5)} to {at_most(upper, 5)}"
        lines.append(f"| `{case.event}` | {case.relation} | {ends} | {seconds:.2f} | {peers or '-'} |")
        print(f"{'PASS' if passed else 'MISS'} {lines[-1]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.docs:
        page, (begin, end) = options.docs.read_text(), ("<!-- batches: begin -->\n", "<!-- batches: end -->")
        options.docs.write_text(page[: page.index(begin) + len(begin)] + "\n".join(lines) + "\n" + page[page.index(end) :])


if __name__ == "__main__":
    main()
