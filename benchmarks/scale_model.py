"""What a private step costs at scale: time, memory and network of a process, by a model that can be checked.

    python benchmarks/scale_model.py                          # tables from 1e8 to 1e12 parameters, 1 to 4096 processes
    python benchmarks/distributed.py --worlds 1 2 3 --json out.json
    python benchmarks/scale_model.py --measured out.json      # beside measurements

P parameters, W processes, 4 bytes a number; a mechanism keeps s numbers of state for each parameter. Per step and process:

| | DDP-style | fully_shard (FSDP2) |
|---|---|---|
| forward, backward, weighted sums | 6 P n / F for n tokens of this process | the same |
| draws of noise | (P/W) / g | (P/W) / g |
| state of noise, read and written | traffic(s) (P/W) 4 / M | traffic(s) (P/W) 4 / M |
| the row, from host to device (0 where the device draws it) | (P/W) 4 / L | (P/W) 4 / L |
| optimizer (Adam), gradient, parameters | 7 P 4 / M | 7 (P/W) 4 / M |
| sent and received | 2 (W-1)/W P 4: one all-reduce | 3 (W-1)/W P 4: two all-gathers, one reduce-scatter |
| memory | (4 + s/W) P 4 | (4 + s) (P/W) 4 + two gathered units + two buckets |

L bytes over the link in a second.
F multiply-adds x 2 in a second, g numbers of noise in a second, M bytes of memory in a second, B bytes of network in a second.
A plain run sends the same bytes: clipped sums take the place of gradients. A private one adds a few messages of one number.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BYTES = 4
OPTIMIZER_TRAFFIC = 7  # Adam reads gradient, parameter and two moments, and writes the last three
BUCKET = 1 << 20
STATE = {"plain": 3, "independent": 3, "blt": 3 + 4}  # numbers for each parameter in the benchmark: SGD with momentum
SMALL_MESSAGES = 3  # agreement before the step, agreement after the sums, adaptive count


@dataclass(frozen=True)
class Machine:
    """One process's share of a machine: flops, noise numbers, bytes of memory and of network in a second; seconds a message.

    ``link``: bytes in a second from where noise is drawn to where the sums are; infinite where that is one place.
    """

    flops: float
    draws: float
    memory: float
    network: float
    latency: float
    link: float = math.inf


@dataclass(frozen=True)
class Noise:
    """A mechanism: numbers of state for each parameter, and how many of them a step reads and writes."""

    name: str
    state: int
    traffic: int


@dataclass(frozen=True)
class Cost:
    """Of one step in one process: seconds by part, bytes held, bytes received."""

    compute: float
    noise: float
    state: float
    optimizer: float
    network: float
    held: float
    received: float
    copied: float = 0.0

    @property
    def seconds(self) -> float:
        """Everything in turn: nothing overlaps (a bound from above)."""
        return self.compute + self.private + self.optimizer + self.network

    @property
    def private(self) -> float:
        """Seconds of noise: drawn, its state, its way to the device."""
        return self.noise + self.state + self.copied

    @property
    def private_share(self) -> float:
        """What noise adds to the rest."""
        return self.private / (self.seconds - self.private)


SGD = Noise("DP-SGD", 0, 0)


def blt(buffers: int) -> Noise:
    """Every buffer is read and written in every step."""
    return Noise(f"BLT({buffers})", buffers, 2 * buffers)


def banded(bands: int) -> Noise:
    """The last ``bands - 1`` rows are read and one is written."""
    return Noise(f"banded({bands})", bands - 1, bands)


# A process with one accelerator of about 400 Tflop/s in use, its noise drawn by 16 cores of the host at 1.5 ns a number each,
# state in the host's memory, 50 GB/s of network. Public data sheets' orders of magnitude, not measurements.
ACCELERATOR = Machine(flops=4e14, draws=16 / 1.5e-9, memory=2e11, network=5e10, latency=2e-5)
# The same with the row's way to the accelerator (25 GB/s), and one that draws for itself: 92 integer operations a number at 1e13 a second.
COPIES = replace(ACCELERATOR, link=2.5e10)
DRAWS = replace(ACCELERATOR, draws=1e13 / 92, memory=1.5e12)


def cost(
    machine: Machine, noise: Noise, *, parameters: float, ranks: int, tokens: float, sharded: bool, unit: float = 1 / 128
) -> Cost:
    """The cost of one step. ``tokens``: of one process; ``unit``: the largest unit's part of the parameters (fully_shard)."""
    share = parameters / ranks  # of the noise, which the processes draw between them
    own = share if sharded else parameters
    passes = 3 if sharded else 2
    received = passes * (ranks - 1) / ranks * parameters * BYTES
    messages = SMALL_MESSAGES * 2 * max(0, (ranks - 1).bit_length())
    gathered = (2 * unit * parameters + 2 * max(BUCKET, unit * parameters)) * BYTES if sharded and ranks > 1 else 0.0
    return Cost(
        compute=6 * parameters * tokens / machine.flops,
        noise=share / machine.draws,
        state=noise.traffic * share * BYTES / machine.memory,
        optimizer=OPTIMIZER_TRAFFIC * own * BYTES / machine.memory,
        network=received / machine.network + messages * machine.latency,
        held=(4 * own + noise.state * share) * BYTES + gathered,
        received=received,
        copied=share * BYTES / machine.link,
    )


def tables(machine: Machine, tokens: float) -> None:
    """Print the cost of fully_shard over the sizes that matter."""
    print(f"fully_shard, {tokens:g} tokens in each process; seconds of a step, of which noise; GB held and received by a process")
    print(f"{'':<12}{'P':>7}{'W':>6}{'seconds':>10}{'noise':>9}{'adds':>8}{'held GB':>10}{'recv GB':>9}")
    for noise in (SGD, blt(4), banded(64)):
        for exponent in range(8, 13):
            for ranks in (1, 8, 64, 512, 4096):
                c = cost(machine, noise, parameters=10.0**exponent, ranks=ranks, tokens=tokens, sharded=True)
                print(
                    f"{noise.name:<12}{f'1e{exponent}':>7}{ranks:>6}{c.seconds:>10.3g}{c.private:>9.2g}"
                    f"{100 * c.private_share:>7.1f}%{c.held / 1e9:>10.3g}{c.received / 1e9:>9.3g}"
                )


# Beside measurements -----------------------------------------------------------------------------------------------------


def check(rows: list[dict[str, Any]]) -> list[tuple[str, int, float, float]]:
    """(what, processes, measured, predicted) for each measured figure that the model was not fitted to.

    Time: what does not shard (passes over a process's own examples) is the plain step on one process. What a private step adds
    there is split into a part that stays (norms) and a part that is divided by W (noise and its state). The
    time of a byte on the network is fitted to the plain run on two processes. Memory: of what one process holds, parameters,
    gradients, momentum and state of noise are divided by W; two gathered units come on top.
    """
    timed = {(r["parallel"], r["noise"], r["world"]): r for r in rows if "ratio" in r}
    held = {(r["noise"], r["world"]): r for r in rows if "peak" in r}
    found: list[tuple[str, int, float, float]] = []
    for parallel in ("ddp", "fsdp") if timed else ():
        base = timed[parallel, "independent", 1]
        sent = timed[parallel, "independent", 2]["plain cpu"] - base["plain cpu"]  # (W-1)/W = 1/2 of the bytes
        for noise in ("independent", "blt"):
            for world in sorted({w for p, n, w in timed if (p, n) == (parallel, noise) and w > 1}):
                row = timed[parallel, noise, world]
                added = base[f"{noise} cpu"] - base["plain cpu"]
                shards = row.get("noise part", {}).get(noise, 0.0)
                predicted = base["plain cpu"] + added - shards * (1 - 1 / world) + sent * 2 * (world - 1) / world
                found.append((f"{parallel} {noise}, ms", world, 1e3 * row[f"{noise} cpu"], 1e3 * predicted))
    for noise, world in sorted(held):
        if world > 1:
            row = held[noise, world]
            shards = STATE[noise] * row["parameter MB"]
            predicted = held[noise, 1]["peak"] - shards * (1 - 1 / world) + 2 * row["unit MB"]
            found.append((f"fsdp {noise}, MB", world, row["peak"], predicted))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measured", type=Path, help="figures of benchmarks/distributed.py --json")
    parser.add_argument("--tokens", type=float, default=8192, help="tokens of one process in a step")
    parser.add_argument("--json", type=Path, help="write the comparison to this file")
    arguments = parser.parse_args()
    if arguments.measured is None:
        tables(ACCELERATOR, arguments.tokens)
        return
    found = check(json.loads(arguments.measured.read_text()))
    print(f"{'':<24}{'W':>3}{'measured':>10}{'predicted':>11}{'ratio':>7}")
    for what, world, measured, predicted in found:
        print(f"{what:<24}{world:>3}{measured:>10.1f}{predicted:>11.1f}{predicted / measured:>7.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
