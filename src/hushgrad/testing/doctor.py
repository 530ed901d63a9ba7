"""The measurements of ``hushgrad doctor``: correct bits, waits and launches of a step, and its time next to other libraries."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.testing.devices import Meter, pretend
from hushgrad.testing.models import MODELS, Sample
from hushgrad.train import Plan, make_private

_CHECKED = ("MLP", "CNN", "WRN-16-4", "GPT, 4 blocks")
_BATCH = {"MLP": 64, "CNN": 32, "WRN-16-4": 8, "GPT, 4 blocks": 8}
Step = Callable[[], None]


def machine() -> dict[str, Any]:
    """Versions, and the measured device: CUDA if there is one, otherwise the CPU."""
    there = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "triton": _version("triton"),
        "opacus": _version("opacus"),
        "device": torch.cuda.get_device_name() if there else "processor",
    }


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


# Bits -------------------------------------------------------------------------------------------------------------------------------


def bits() -> dict[str, str]:
    """Whether each kernel gives the reference's bits: "equal", "other", or why it was not tested."""
    return {"C library, AES-256": _library(), "C library, ChaCha20": _chacha(), "Triton kernel, ChaCha20": _triton()}


def _library() -> str:
    from hushgrad.noise import _kernel

    if isinstance(_kernel.KERNEL, _kernel.NumpyKernel):
        return "not built: numpy draws"
    return "equal" if _kernel._agrees(_kernel.KERNEL) else "other"


def _chacha() -> str:
    from hushgrad.noise import _chacha

    if _chacha._LIBRARY is None:
        return "not built: numpy draws"
    stream, first = _chacha.ChaChaStream(bytes(32), b"hushgrad doctor"), (1 << 32) - 50
    words = stream.words((1 << 47) + 5, 7, 4 * first, 64 * 100)
    return "equal" if (words == stream.scattered((1 << 47) + 5, 7, np.arange(first, first + 100), 4)).all() else "other"


_PROGRAM = """
import torch, numpy as np
from hushgrad.noise._chacha import ChaChaStream
from hushgrad.noise.device_noise import Target, Turn, reference_row
from hushgrad.noise.triton_kernel import TritonKernel
np.seterr(all="ignore")
device = "cuda" if torch.cuda.is_available() else "cpu"
stream, turn = ChaChaStream(bytes(32), b"doctor"), Turn((5 << 32) + 9, weights=(-0.5, -0.3), rows=(0, 1), decay=(0.99, 0.5))
state = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
out, kept, want = torch.ones(300, device=device), state.to(device, copy=True), np.ones(300, np.float32)
TritonKernel().row(stream, turn, [Target(out, kept, 3, (1 << 40) + 77)], 0.7, fresh=False)
rows = state.numpy().copy()
reference_row(stream, turn, want, rows, (3, (1 << 40) + 77), 0.7, fresh=False)
same = out.cpu().numpy().tobytes() == want.tobytes() and kept.cpu().numpy().tobytes() == rows.tobytes()
print(("equal" if same else "other") + ("" if device == "cuda" else " (interpreted)"))
"""


def _triton() -> str:
    if _version("triton") is None:
        return "not asked: pip install 'hushgrad[triton]'"
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env={**os.environ, **interpreted})
    return done.stdout.strip() or f"failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"


# Counts -----------------------------------------------------------------------------------------------------------------------------


def counts() -> dict[str, dict[str, int]]:
    """Launches, waits and bytes of a private step on the simulated device, and launches of an ordinary one."""
    found = {}
    for name in _CHECKED:
        meter, ordinary = private_step(MODELS[name]), ordinary_step(MODELS[name])
        found[name] = {
            "launches": meter.launches.total(),
            "launches, ordinary": ordinary.launches.total(),
            "syncs": meter.syncs.total(),
            "bytes": meter.bytes.total(),
        }
    return found


# Time and memory --------------------------------------------------------------------------------------------------------------------


def ratios(seconds: float = 6.0) -> dict[str, dict[str, float | int | None]]:
    """The time of a whole step relative to plain PyTorch, for hushgrad and Opacus in turns; peak memory; waits that torch reports.

    Args:
        seconds: that each model is measured for, at most (three rounds at least).
    """
    return {name: _measured(MODELS[name], _BATCH[name], seconds) for name in _CHECKED}


def _measured(sample: Callable[[int], Sample], batch: int, seconds: float) -> dict[str, float | int | None]:
    makers = {"plain": _plain, "hushgrad": _hushgrad, "opacus": _opacus}
    steps = {name: made for name, make in makers.items() if (made := make(sample, batch)) is not None}
    peaks = {name: _warmed(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while len(times["plain"]) < 3 or time.perf_counter() < end:
        for name, step in steps.items():
            times[name].append(_timed(step))
    middle = {name: median(taken) for name, taken in times.items()}
    beside = {f"{name} / plain": round(middle[name] / middle["plain"], 2) for name in steps if name != "plain"}
    waits = _waits(steps["hushgrad"]) if torch.cuda.is_available() else None
    return {"ms, plain": round(1e3 * middle["plain"], 2), **beside, **{f"MB, {k}": v for k, v in peaks.items()}, "syncs": waits}


def _timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _warmed(step: Step) -> float:
    """Megabytes: of the device at its peak, or of this process so far."""
    if torch.cuda.is_available():
        step()
        torch.cuda.reset_peak_memory_stats()
    step()
    peak = (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    return round(peak / 1e6, 1)


def _waits(step: Step) -> int:
    """Waits that torch's own debug mode reports in one step."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        return sum("synchronizing" in str(one.message) for one in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _placed(sample: Callable[[int], Sample], batch: int) -> tuple[Sample, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made, device = sample(batch), "cuda" if torch.cuda.is_available() else "cpu"
    model = made.model.to(device)
    made = made._replace(model=model, x=made.x.to(device), y=made.y.to(device))
    return made, model, torch.optim.SGD(model.parameters(), lr=0.01)


def _step(made: Sample, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        made.loss(model(made.x), made.y).backward()
        optimizer.step()

    return step


def _plain(sample: Callable[[int], Sample], batch: int) -> Step | None:
    return _step(*_placed(sample, batch))


def _hushgrad(sample: Callable[[int], Sample], batch: int) -> Step | None:
    made, model, optimizer = _placed(sample, batch)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-6, batch_size=batch, dataset_size=1000 * batch, steps=100_000)
    make_private(model, optimizer, plan, check_isolation=False)
    return _step(made, model, optimizer)


def _opacus(sample: Callable[[int], Sample], batch: int) -> Step | None:
    try:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError:
        return None
    made, model, optimizer = _placed(sample, batch)
    wrapped = GradSampleModule(model)
    private = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch)
    return _step(made, wrapped, private)


_STEPS = 3  # the third is counted: states and constants are there by then, and no value is compared (steps 1, 2, 4, 8, ...)


def private_step(
    sample: Callable[[int], Sample], *, batch: int = 8, users: bool = False, foreach: bool = True, **plan: Any
) -> Meter:
    """What the third step of a private run does on the simulated device.

    Args:
        sample: makes the model and records.
        batch: the expected batch size.
        users: protect users of four records each.
        foreach: the optimizer updates all tensors together, as torch chooses to on CUDA.
        plan: further options of ``Plan.dpsgd``, or of ``Plan.dpftrl`` if there is a mechanism among them.
    """
    torch.manual_seed(0)
    records = 4 * batch
    made = sample(records)
    recipe = Plan.dpftrl if "noise" in plan else Plan.dpsgd
    sizes = (
        {"batch_size": batch // 4, "dataset_size": records // 4, "unit": "user"}
        if users
        else {"batch_size": batch, "dataset_size": records}
    )
    chosen = recipe(noise_multiplier=1.0, delta=1e-5, steps=4 if "noise" in plan else _STEPS, **{**sizes, **plan})
    with pretend() as device:
        model = device.put(made.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        private = make_private(model, optimizer, chosen, seed=0, check_isolation=False)
        groups = [i // 4 for i in range(records)] if users else None
        batches: Any = private.loader(TensorDataset(made.x, made.y), groups=groups)
        for drawn in batches:
            x, y = (t.to("pretend") for t in drawn)  # the batch itself is not counted
            with device.counting() as meter:
                made.loss(model(x), y).backward()
                optimizer.step()
            if private.steps == _STEPS:
                break
        private.detach()
    return meter


def ordinary_step(sample: Callable[[int], Sample], *, batch: int = 8, foreach: bool = True) -> Meter:
    """What one step of an ordinary run does on the simulated device."""
    torch.manual_seed(0)
    made = sample(batch)
    with pretend() as device:
        model = device.put(made.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        x, y = made.x.to("pretend"), made.y.to("pretend")
        with device.counting() as meter:
            made.loss(model(x), y).backward()
            optimizer.step()
        return meter
