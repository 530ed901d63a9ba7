"""A private federated server beside what Flower ships: noise at equal privacy, time of a round, check-ins at scale.

    python benchmarks/federated.py [--quick] [--json out.json]

1. Error of the prefix sums (what a model drifts by) at one user-level epsilon: Flower's independent noise, accounted by
   Flower's own accountant; the same noise with this library's accountant; correlated noise under the same participation.
2. CPU time of ``aggregate_train`` for one model and the same replies: Flower's DifferentialPrivacyServerSideFixedClipping and
   this library's strategies, in one process, interleaved, minimum over rounds. One thread.
3. Choosing and entering a cohort among a million users.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from flwr.supercore.privacy_accounting import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from hushgrad import noise
from hushgrad.federated import DPFTRL, CheckIns, DPFedAvg, LocalGrid, MinSeparation
from hushgrad.noise import Mechanism, Source
from hushgrad.train import Plan

EPSILON, DELTA = 8.0, 1e-6
USERS, COHORT = 10_000, 100
TARGET = 1.0  # a round may cost no more than Flower's
Row = dict[str, float | str | bool]


# Noise -------------------------------------------------------------------------------------------------------------------


def flower_multiplier(rounds: int) -> float:
    """The smallest multiplier with which Flower's accountant certifies (EPSILON, DELTA), by bisection.

    The strategies that it accounts for take part in no amplification and keep no separation: every round counts in full.
    """
    model = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    low, high = 0.1, 1000.0
    while high / low > 1.0005:
        middle = (low * high) ** 0.5
        accountant = RdpAccountant(PrivacyConfig(DELTA, USERS, *model))
        accountant.compose(GaussianPrivacyEvent(noise_multiplier=middle, sample_size=COHORT, population_size=USERS), rounds)
        low, high = (low, middle) if accountant.get_privacy_spent().epsilon <= EPSILON else (middle, high)
    return high


def drift(mechanism: Mechanism, multiplier: float, rounds: int) -> float:
    """Root mean square over rounds and coordinates of the accumulated noise, in clip norms, as the stream really draws it."""
    stream, total, square = mechanism.stream(Source(seed=1), steps=rounds), torch.zeros(5000), 0.0
    for step in range(rounds):
        stream.row(step, 0, total, out=total, scale=multiplier)
        square += float(total.square().mean())
    return (square / rounds) ** 0.5


def noise_rows(rounds: int) -> list[Row]:
    sampler = MinSeparation(cohort=COHORT, gap=USERS // COHORT, times=-(-rounds * COHORT // USERS), steps=rounds)
    common = {"epsilon": EPSILON, "delta": DELTA, "batch_size": COHORT, "dataset_size": USERS, "unit": "user"}
    mechanisms = {
        "independent": noise.Independent(),
        "tree, restarted": noise.Tree(restart=USERS // COHORT, completion=True),
        "banded": noise.Banded(bands=min(64, rounds)),
        "BLT": noise.BLT(buffers=4),
    }
    plans = {f"{name}, check-ins": Plan.dpftrl(noise=m, sampling=sampler, **common) for name, m in mechanisms.items()}
    plans["independent, Poisson over all users"] = Plan.dpsgd(steps=rounds, **common)
    peer = drift(noise.Independent(), flower_multiplier(rounds), rounds)
    rows: list[Row] = [{"what": "flwr: independent, RdpAccountant", "value": peer, "ratio": 1.0}]
    for name, plan in plans.items():
        value = drift(plan.noise, plan.noise_multiplier or 0.0, rounds)
        rows.append({"what": name, "value": value, "ratio": value / peer, "pass": value < peer})
    return rows


# Time --------------------------------------------------------------------------------------------------------------------


def replies_to(messages: list[Message], payloads: list[ArrayRecord]) -> list[Message]:
    metrics = MetricRecord({"num-examples": 1})
    contents = [{"arrays": payloads[i % len(payloads)], "metrics": metrics} for i in range(len(messages))]
    return [Message(RecordDict(dict(content)), reply_to=m) for content, m in zip(contents, messages, strict=True)]


def strategies(rounds: int, clients: int) -> dict[str, Strategy]:
    sampler = MinSeparation(cohort=clients, gap=1, times=rounds, steps=rounds)
    common = {"noise_multiplier": 1.0, "delta": DELTA, "batch_size": clients, "dataset_size": clients, "unit": "user"}

    def plan(mechanism: Mechanism) -> Plan:
        return Plan.dpftrl(noise=mechanism, sampling=sampler, **common)

    return {
        "flwr": DifferentialPrivacyServerSideFixedClipping(FedAvg(min_train_nodes=clients), 1.0, 1.0, clients),
        "DPFedAvg": DPFedAvg(FedAvg(), plan(noise.Independent()), seed=0),
        "DPFTRL, BLT(4)": DPFTRL(FedAvg(), plan(noise.BLT(buffers=4)), seed=0),
        "DPFTRL, tree": DPFTRL(FedAvg(), plan(noise.Tree()), seed=0),
    }


def time_rows(size: int, clients: int, repeats: int) -> list[Row]:
    rng = np.random.default_rng(0)
    grid = LocalGrid(ClientApp(), clients=clients)
    arrays = ArrayRecord({f"layer{i}": Array(rng.normal(size=size // 10).astype(np.float32)) for i in range(10)})
    payloads = [
        ArrayRecord(
            {name: Array(a.numpy() + rng.normal(scale=0.01, size=a.shape).astype(np.float32)) for name, a in arrays.items()}
        )
        for _ in range(5)
    ]
    runs, best = strategies(repeats, clients), dict[str, float]()
    for round in range(1, repeats + 1):
        for name, strategy in runs.items():
            messages = list(strategy.configure_train(round, arrays, ConfigRecord(), grid))
            replies = replies_to(messages, payloads)
            begin = time.process_time()
            strategy.aggregate_train(round, replies)
            best[name] = min(best.get(name, np.inf), time.process_time() - begin)
    peer = best["flwr"]
    return [{"what": name, "value": t, "ratio": t / peer, "pass": t <= TARGET * peer} for name, t in best.items()]


# Check-ins ---------------------------------------------------------------------------------------------------------------


def check_in_rows(users: int, cohort: int, rounds: int) -> list[Row]:
    rng = np.random.default_rng(0)
    everyone = np.unique(rng.integers(0, 2**64 - 1, size=users, dtype=np.uint64))
    book = CheckIns(gap=users // cohort // 2, times=10)
    times = []
    for step in range(rounds):
        online = everyone[rng.random(len(everyone)) < 0.3]
        begin = time.process_time()
        free = book.eligible(online, round=step)
        book.enter(free[rng.choice(len(free), cohort, replace=False, shuffle=False)], round=step)
        times.append(time.process_time() - begin)
    size = sum(tensor.numel() * tensor.element_size() for tensor in book.state_dict().values())
    median = float(np.median(times))
    return [
        {
            "what": f"a round among {users:,} users, 30 % online, cohort {cohort:,}: seconds",
            "value": median,
            "pass": median < 0.5,
        },
        {
            "what": f"the book after {rounds} rounds: bytes per user seen",
            "value": size / len(book),
            "pass": size / len(book) <= 24,
        },
    ]


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    for row in rows:
        ratio = f"{row['ratio']:8.3f}" if "ratio" in row else " " * 8
        verdict = "" if "pass" not in row else "PASS" if row["pass"] else "MISS"
        print(f"  {row['what']!s:<70} {row['value']:10.4g} {ratio}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, in seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds, size, users = (100, 100_000, 100_000) if options.quick else (400, 1_000_000, 1_000_000)
    tables = {
        f"Accumulated noise in clip norms, {rounds} rounds, {COHORT} of {USERS:,} users, epsilon {EPSILON:g}": noise_rows(rounds),
        f"aggregate_train, {size:,} parameters, 100 clients: CPU seconds, target {TARGET:g} x flwr": time_rows(size, 100, 5),
        "Check-ins": check_in_rows(users, users // 1000, 50),
    }
    for title, rows in tables.items():
        show(title, rows)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
