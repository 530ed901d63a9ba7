"""The cost of per-example clipping, layer by layer: CPU time of a pass with the capture, divided by an ordinary pass.

    python benchmarks/clipping_layers.py [--quick] [--json PATH]

Each case is one layer (and the head that its output needs) on one thread; ordinary and clipped passes are interleaved and the minimum
of the repeats is taken. "growth" is the clipped time at twice the batch, divided by twice the clipped time: 1 is linear in the batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture, Flat, Shared


class Case(NamedTuple):
    """A layer, its input for a batch size, and the ratio that it should not exceed."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int
    target: float


class Outputs(nn.Module):
    """The first output of a layer that has several."""

    def __init__(self, layer: nn.Module, arguments: int = 1) -> None:
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x: Tensor) -> Tensor:
        """The layer with x for each argument."""
        return self.layer(*[x] * self.arguments)[0]


class Token(nn.Module):
    """A transformer layer behind a class token, as a bare parameter or as a layer of its own."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = Shared(torch.zeros(1, 128)) if shared else None
        self.token = None if shared else nn.Parameter(torch.zeros(1, 1, 128))
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The layer on the token and x."""
        token = self.shared(x) if self.shared is not None else self.token.expand(len(x), -1, -1)
        return self.layer(torch.cat([token, x], 1))


CASES = [
    Case("LSTM 128, T=64", lambda: Outputs(nn.LSTM(128, 128, batch_first=True)), lambda B: torch.randn(B, 64, 128), 32, 3.0),
    Case("GRU 128, T=64", lambda: Outputs(nn.GRU(128, 128, batch_first=True)), lambda B: torch.randn(B, 64, 128), 32, 3.0),
    Case("LSTM 2 x 128 both ways, T=64",
         lambda: Outputs(nn.LSTM(128, 128, num_layers=2, bidirectional=True, batch_first=True)),
         lambda B: torch.randn(B, 64, 128), 16, 3.0),
    Case("MultiheadAttention 128, T=64",
         lambda: Outputs(nn.MultiheadAttention(128, 4, batch_first=True), 3), lambda B: torch.randn(B, 64, 128), 32, 2.0),
    Case("TransformerEncoderLayer 128, T=64",
         lambda: nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True), lambda B: torch.randn(B, 64, 128), 32, 2.0),
    Case("class token, bare parameter", lambda: Token(False), lambda B: torch.randn(B, 64, 128), 32, 3.0),
    Case("class token, Shared", lambda: Token(True), lambda B: torch.randn(B, 64, 128), 32, 2.0),
    Case("ConvTranspose2d 64-32, 16x16", lambda: nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
         lambda B: torch.randn(B, 64, 16, 16), 32, 2.0),
    Case("EmbeddingBag 50k x 128, T=64", lambda: nn.EmbeddingBag(50_000, 128), lambda B: torch.randint(50_000, (B, 64)), 64, 2.0),
    Case("InstanceNorm2d 64, 32x32", lambda: nn.InstanceNorm2d(64, affine=True), lambda B: torch.randn(B, 64, 32, 32), 32, 2.0),
    Case("RMSNorm 512, T=128", lambda: nn.RMSNorm(512), lambda B: torch.randn(B, 128, 512), 32, 2.0),
]  # fmt: skip


def measure(case: Case, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain, clipped = case.make(), case.make()
    capture = Capture(clipped, loss_reduction="sum")
    capture.attach()
    x, xx = case.inputs(case.batch), case.inputs(2 * case.batch)

    def ordinary() -> None:
        plain.zero_grad()
        plain(x).square().sum().backward()

    def private(inputs: Tensor) -> None:
        clipped(inputs).square().sum().backward()
        capture.collect(Flat(1.0))

    runs = {"plain": ordinary, "clipped": lambda: private(x), "twice": lambda: private(xx)}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start)
    return {
        "case": case.name,
        "batch": case.batch,
        "plain_ms": 1e3 * best["plain"],
        "ratio": best["clipped"] / best["plain"],
        "growth": best["twice"] / (2 * best["clipped"]),
        "target": case.target,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'layer':36} {'B':>4} {'plain ms':>9} {'ratio':>6} {'growth':>7} {'target':>7}")
    for case in CASES:
        row = measure(case, 3 if arguments.quick else 15)
        rows.append(row)
        verdict = "PASS" if row["ratio"] <= row["target"] else "MISS"
        numbers = f"{row['plain_ms']:9.2f} {row['ratio']:6.2f} {row['growth']:7.2f} {row['target']:7.1f}"
        print(f"{row['case']:36} {row['batch']:4} {numbers} {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
