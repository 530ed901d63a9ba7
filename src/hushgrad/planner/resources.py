r"""Predicted peak memory and time of a private step of a language model: a linear model, fitted to measurements.

A process holds 4-byte numbers: P parameters, for each of the P' trained ones a clipped sum, two moments of Adam and s numbers of noise
state, and for a micro-batch of m tokens what the backward pass needs. It multiplies, handles activations, and updates. With W processes:

| | whole, replicated | sharded (``fully_shard``) |
|---|---|---|
| numbers held | P + 3 P' + s P'/W | (P + 3 P' + s P') / W, and two gathered layers |
| activations of a micro-batch, T tokens in a text | a m L (8 h + 4 f + p heads T) + b m V, both more with a table of positions | the same |
| multiply-adds x 2 of n tokens | 6 n M (all weights), 4 n M + 6 n A (adapters), with M = L (weights of a layer) + V h | the same |
| activations and scores handled | n L (8 h + 4 f + 2 heads T), and n V | the same |
| calls | L times the number of micro-batches | the same |
| numbers updated | P' | P' / W |
| noise state read and written | t P' / W | t P' / W |
| numbers of a tied table, which gets sums from both ends | V h times the number of micro-batches | the same |
| bytes received | 2 (W-1)/W 4 P' | 2 (W-1)/W 4 P of weights, and (W-1)/W 4 P' of sums |

The coefficients are those of one thread of the CPU that the project is measured on, with float32 weights and Adam
(``benchmarks/resources.py``; docs/scale.md shows them beside models that were not fitted, all of less than 18 million parameters). The
peak is mostly that of the proof in the first step. Another machine has other times; what it holds is nearly the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hushgrad import _check
from hushgrad.planner.model_shapes import Shape

_BYTES = 4
_BUCKET = 1 << 20  # numbers that fully_shard reduces at once, at least
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Numbers of noise state for each trained parameter, and how many of them a step reads and writes.
MECHANISMS = {"DP-SGD": (0, 0), "banded(4)": (3, 4), "banded(16)": (15, 16), "BLT(4)": (4, 8)}
TUNED = ("lora", "full")

# Fitted; see benchmarks/resources.py. Seconds of an operation, of one beside a bias, an activation, a score, a call, an updated number, a
# number of a tied table.
_SECONDS: dict[str, tuple[float, ...]] = {
    "lora": (1.24e-11, 0.0, 3.02e-9, 3.27e-9, 3.51e-3, 0.0, 2.7e-10),
    "full": (1.07e-11, 1.64e-11, 5.18e-9, 3.99e-9, 8.01e-4, 8.67e-9, 9.13e-9),
}
_STATE = 5e-10  # seconds of a number of noise state; not fitted, 8 GB in a second
# Numbers held for an activation of a micro-batch and for a score, how many more beside a learned table of positions; bytes whatever the
# model is. A score counts so often because the proof in the first step runs several passes.
_HELD: dict[str, tuple[float, ...]] = {"lora": (1.12, 6.48, 0.609, 2.13, 2.81e7), "full": (1.22, 5.6, 2.26, 0.0, 3.13e7)}
_PAIRS = {"lora": 16, "full": 2}  # numbers that count as an activation, for two tokens of a text and a head
# Bytes in a second between two processes of one machine (gloo), packing and adding included.
_NETWORK = {"whole": math.inf, "replicated": 6.9e8, "sharded": 3.9e8}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step of a private run, as one of ``processes`` equal processes sees it.

    Args:
        shape: of the model.
        tuned: "lora" (adapters beside every matrix of the layers) or "full".
        rank: of the adapters.
        length: tokens of an example.
        batch_size: examples of a step, of all processes together.
        micro_batch: examples that a process runs at once.
        processes: how many.
        placement: "whole" (one process), "replicated" (DDP) or "sharded" (FSDP2).
        state: numbers of noise state for each trained parameter.
        traffic: how many of them a step reads and writes.
    """

    shape: Shape
    tuned: str = "full"
    rank: int = 4
    length: int = 512
    batch_size: int = 256
    micro_batch: int = 8
    processes: int = 1
    placement: str = "whole"
    state: int = 0
    traffic: int = 0

    @property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return self.shape.parameters if self.tuned == "full" else self.shape.adapters(self.rank)

    @property
    def total(self) -> int:
        """Parameters, adapters included."""
        return self.shape.parameters + (self.trained if self.tuned == "lora" else 0)

    @property
    def _own(self) -> float:
        """The fraction of the parameters that a process holds and updates."""
        return 1 / self.processes if self.placement == "sharded" else 1.0

    def activations(self, tokens: float) -> float:
        """Activations that the layers produce for this many tokens."""
        return tokens * self.shape.layers * (8 * self.shape.hidden + 4 * self.shape.inner)

    def pairs(self, tokens: float) -> float:
        """Attention scores for this many tokens: one for each head and each pair of tokens of a text."""
        return tokens * self.shape.layers * self.shape.heads * self.length

    # Memory ---------------------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> float:
        """Bytes held between steps (weights, sums, moments, noise state), and the layers that a sharded step gathers."""
        share = self.state * self.trained / self.processes
        numbers = self._own * (self.total + 3 * self.trained) + share
        if self.placement == "sharded" and self.processes > 1:
            layer = max(self.shape.multiplied, self.shape.vocabulary * self.shape.hidden)
            numbers += 2 * layer + 2 * max(_BUCKET, layer)
        return _BYTES * numbers

    def held(self) -> tuple[float, ...]:
        """The regressors of memory: bytes of a micro-batch's activations and scores, both again with a table of positions, and 1."""
        tokens = min(self.micro_batch, math.ceil(self.batch_size / self.processes)) * self.length
        made = _BYTES * (self.activations(tokens) + _PAIRS[self.tuned] * self.pairs(tokens))
        scores, table = _BYTES * tokens * self.shape.vocabulary, float(self.shape.positions > 0)
        return made, scores, table * made, table * scores, 1.0

    def peak(self) -> float:
        """The peak bytes of a process, beyond those of a tiny model (imports, libraries and their kernels)."""
        return self.kept + sum(c * x for c, x in zip(_HELD[self.tuned], self.held(), strict=True))

    # Time -----------------------------------------------------------------------------------------------------------------

    def spent(self) -> tuple[float, ...]:
        """The regressors of time: operations, those with biases (GPT-2), activations, scores, calls, numbers updated, tied numbers."""
        shape, examples = self.shape, math.ceil(self.batch_size / self.processes)
        tokens = examples * self.length
        multiplied = shape.layers * shape.multiplied + shape.vocabulary * shape.hidden
        operations = 6 * tokens * multiplied if self.tuned == "full" else tokens * (4 * multiplied + 6 * self.trained)
        calls = shape.layers * math.ceil(examples / self.micro_batch)
        handled = self.activations(tokens) + 2 * self.pairs(tokens)
        biased = 0.0 if shape.gated else 6 * tokens * shape.layers * shape.multiplied
        tied = shape.tied * shape.vocabulary * shape.hidden * math.ceil(examples / self.micro_batch)
        return operations, biased, handled, tokens * shape.vocabulary, calls, self._own * self.trained, tied

    def carried(self) -> float:
        """Seconds for reading and writing noise state."""
        return _STATE * self.traffic * self.trained / self.processes

    def received(self) -> float:
        """Bytes that a process receives from the others in a step."""
        part = (self.processes - 1) / self.processes
        numbers = 2 * self.trained if self.placement != "sharded" else 2 * self.total + self.trained
        return _BYTES * part * numbers

    def seconds(self) -> float:
        """Seconds of a step: the sum of all its parts."""
        computed = sum(c * x for c, x in zip(_SECONDS[self.tuned], self.spent(), strict=True))
        return computed + self.carried() + self.received() / _NETWORK[self.placement]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way to run a step: peak bytes and seconds that are predicted for a process, and whether the device has room for it."""

    mechanism: str
    work: Work
    peak: float
    seconds: float
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        work = {
            name: getattr(self.work, name) for name in ("tuned", "placement", "processes", "micro_batch", "batch_size", "length")
        }
        return {"mechanism": self.mechanism, **work, "peak_bytes": self.peak, "seconds": self.seconds, "fits": self.fits}


def choices(work: Work, *, device_memory: float = math.inf) -> list[Choice]:
    """Every placement, mechanism and micro-batch for a step of ``work``: what fits first, then the fastest, then the smallest.

    Of micro-batches the best two of each placement and mechanism are kept.

    >>> from hushgrad.planner.model_shapes import shape_of
    >>> found = choices(Work(shape=shape_of("gpt2"), processes=2, tuned="lora"), device_memory=1e12)
    >>> found[0].fits, {one.work.placement for one in found} == {"replicated", "sharded"}
    (True, True)
    """
    found: list[Choice] = []
    for mechanism, (state, traffic) in MECHANISMS.items():
        for placement in ("whole",) if _check.positive_int(processes=work.processes) == 1 else ("replicated", "sharded"):
            made = [
                _choice(mechanism, work, device_memory, placement=placement, state=state, traffic=traffic, micro_batch=size)
                for size in MICRO_BATCHES
                if size <= max(1, math.ceil(work.batch_size / work.processes))
            ]
            found += sorted(made, key=_order)[:2]
    return sorted(found, key=_order)


def _choice(mechanism: str, work: Work, room: float, **changed: Any) -> Choice:
    own = replace(work, **changed)
    peak = own.peak()
    return Choice(mechanism=mechanism, work=own, peak=peak, seconds=own.seconds(), fits=peak <= room)


def _order(one: Choice) -> tuple[bool, float, float]:
    return not one.fits, one.seconds if one.fits else one.peak, one.peak
