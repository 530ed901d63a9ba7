"""Noise drawn on the device that holds the sums: one row for all tensors of a model in one launch.

A device is supported by a :class:`DeviceKernel`, registered under its type. The numbers have the same bits as those drawn on the CPU, so a
run can move between them. For devices without a kernel, and mechanisms without a :class:`Turn`, the host draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hushgrad.noise import _kernel
from hushgrad.noise._chacha import ChaChaStream

MOST_THERE = 64  # rows of state on a device; a mechanism with more is drawn by the host, which regenerates the past


class Turn(NamedTuple):
    r"""How one row is computed from the Gaussians z at ``step`` and the kept state, each operation rounded separately, in this order:

        x = z (or 0 if ``last``);  x += weights[h] state[rows[h]] for h = 0, 1, ...;  x += own z if ``last``;  x /= divisor

    Then ``state[keep]`` becomes x (z if ``keeps_z``), or every ``state[j]`` becomes decay[j] state[j] + x.
    """

    step: int
    weights: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()
    last: bool = False
    own: float = 1.0
    divisor: float = 1.0
    keep: int = -1
    keeps_z: bool = False
    decay: tuple[float, ...] = ()


class Target(NamedTuple):
    """Where the numbers of tensor ``index`` from ``offset`` on go: a contiguous tensor, and the (rows, size) state of its recursion."""

    out: Tensor
    state: Tensor | None
    index: int  # type: ignore[assignment]  # a tuple's own method of that name is not needed
    offset: int


class DeviceKernel(ABC):
    """Draws noise on a device, in one launch for all targets of one dtype."""

    @abstractmethod
    def row(self, stream: ChaChaStream, turn: Turn, targets: Sequence[Target], scale: float | Tensor, *, fresh: bool) -> None:
        """``out = scale x`` if fresh, else ``out += scale x``; ``scale`` may be a tensor on the device, which is not copied to the host."""


_KERNELS: dict[str, DeviceKernel | Callable[[], DeviceKernel | None]] = {}


def register(kind: str, kernel: DeviceKernel | Callable[[], DeviceKernel | None]) -> None:
    """Use ``kernel`` for devices of this type, or what it returns when first called (None: no kernel)."""
    _KERNELS[kind] = kernel


def kernel_for(device: torch.device) -> DeviceKernel | None:
    """The kernel for this device; None if the host draws."""
    found = _KERNELS.get(device.type)
    if found is None or isinstance(found, DeviceKernel):
        return found
    made = found()
    if made is None:
        del _KERNELS[device.type]
    else:
        _KERNELS[device.type] = made
    return made


def _triton() -> DeviceKernel | None:
    try:
        from hushgrad.noise.triton_kernel import TritonKernel
    except ImportError:  # an optional extra
        return None
    return TritonKernel()


register("cuda", _triton)


# The reference: what every kernel must give, bit for bit ----------------------------------------------------------------------------


def reference_row(
    stream: ChaChaStream, turn: Turn, out: np.ndarray, state: np.ndarray | None, at: tuple[int, int], scale: float, *, fresh: bool
) -> None:
    """One target's row in numpy: ``out`` and ``state`` are float32 or float64 arrays, ``at`` is (index, offset)."""
    real = out.dtype.type
    z = np.empty_like(out)
    _kernel.KERNEL.draw(stream, turn.step, at[0], at[1], 1.0, z, fresh=True)
    x = np.zeros_like(z) if turn.last else z.copy()
    if state is not None:
        for weight, row in zip(turn.weights, turn.rows, strict=True):
            x += state[row] * real(weight)
    if turn.last:
        x += z * real(turn.own)
    if turn.divisor != 1.0:
        x /= real(turn.divisor)
    if state is not None and turn.decay:
        for decay, kept in zip(turn.decay, state, strict=True):
            kept *= real(decay)
            kept += x
    elif state is not None and turn.keep >= 0:
        state[turn.keep] = z if turn.keeps_z else x
    _kernel.NumpyKernel().emit(x, scale, out, fresh)
