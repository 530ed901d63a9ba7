"""What denoising costs: Laplacian smoothing beside drawing the noise, the other denoisers beside one pass over the parameters.

    python benchmarks/denoise.py [--quick] [--json PATH] [--threads N]

Each group is timed in one process, interleaved, as the minimum of CPU times; only the ratios are meant to be compared. Freed memory
is kept by the process (as in the steady state of a training loop), since page faults on fresh memory are charged at random.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from hushgrad.denoise import DebiasedSecondMoment, Denoiser, JamesStein, Kalman, Laplacian, LowPass, NoiseInfo, SoftThreshold
from hushgrad.noise import Source

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # the parameters of glibc's mallopt
INFO = NoiseInfo(std=0.01, step=0, max_grad_norm=1.0)


class Row(NamedTuple):
    """One measured call, the call it is compared with, and the ratio that was promised."""

    what: str
    milliseconds: float
    beside: str
    ratio: float
    target: float | None

    @property
    def verdict(self) -> str:
        """PASS or MISS, where there is a target."""
        return "" if self.target is None else "PASS" if self.ratio <= self.target else "MISS"


def keep_freed_memory() -> None:
    """Let malloc recycle large blocks instead of returning them to the kernel; a no-op where the C library is not glibc."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least CPU time of each call in milliseconds, over rounds in which each is made once."""
    best = dict.fromkeys(calls, math.inf)
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - start)
    return {name: 1e3 * seconds for name, seconds in best.items()}


def by_fft(v: torch.Tensor, sigma: float) -> torch.Tensor:
    """The formula of the DP-LSSGD paper."""
    angles = torch.arange(v.numel() // 2 + 1, dtype=v.dtype) * (math.pi / v.numel())
    return torch.fft.irfft(torch.fft.rfft(v) / (1 + 4 * sigma * torch.sin(angles) ** 2), n=v.numel())


def laplacian(d: int, repeats: int) -> list[Row]:
    v, source = torch.randn(d), Source(seed=0)
    calls: dict[str, Callable[[], object]] = {
        "noise": lambda: source.z(0, 0, v),
        "randn": lambda: torch.randn(d),
        "fft": lambda: by_fft(v, 1.0),
        **{f"sigma={sigma:g}": lambda sigma=sigma: Laplacian(sigma).smooth(v) for sigma in (1.0, 100.0)},
        "sigma=1 neumann": lambda: Laplacian(1.0, boundary="neumann").smooth(v),
    }
    times = interleaved(calls, repeats)
    ours = [name for name in times if name.startswith("sigma")]
    rows = [Row(f"Laplacian d={d:,} {name}", times[name], "Source.z", times[name] / times["noise"], 1.0) for name in ours]
    rows += [Row(f"Laplacian d={d:,} {name}", times[name], "torch.randn", times[name] / times["randn"], None) for name in ours]
    rows.append(Row(f"Laplacian d={d:,} sigma=1", times["sigma=1"], "rfft", times["sigma=1"] / times["fft"], None))
    return rows


def memory_bound(d: int, repeats: int) -> list[Row]:
    """The denoisers without a matrix product, beside torch.add of two vectors: two reads and one fresh write."""
    x, y = torch.randn(d), torch.randn(d)
    denoisers: dict[str, Denoiser] = {
        "Kalman": Kalman(),
        "LowPass": LowPass(),
        "JamesStein": JamesStein(),
        "SoftThreshold": SoftThreshold(),
        "DebiasedSecondMoment": DebiasedSecondMoment(),
    }
    states: dict[str, dict[str, object]] = {name: {} for name in denoisers}
    calls: dict[str, Callable[[], object]] = {"add": lambda: torch.add(x, y)}
    for name, denoiser in denoisers.items():
        calls[name] = lambda denoiser=denoiser, state=states[name]: denoiser({"w": x}, INFO, state)
    times = interleaved(calls, repeats)
    return [Row(f"{name} d={d:,}", times[name], "torch.add", times[name] / times["add"], 3.0) for name in denoisers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    smooth, prime = (1_000_000, 999_983) if arguments.quick else (10_000_000, 9_999_991)
    rows = [*laplacian(smooth, 9), *laplacian(prime, 9), *memory_bound(smooth, 15)]
    print(f"{'what':44s} {'ms':>8s}  {'beside':12s} {'ratio':>6s} {'target':>6s}")
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}"
        print(f"{row.what:44s} {row.milliseconds:8.1f}  {row.beside:12s} {row.ratio:6.2f} {target:>6s} {row.verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps([{**row._asdict(), "verdict": row.verdict} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
