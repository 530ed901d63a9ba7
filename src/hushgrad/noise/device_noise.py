"""Noise where the sums are: one row for all tensors of a model in one launch on their device.

A device takes part by a :class:`DeviceKernel`, registered under its type. The numbers have the bits that the processor draws, so a run
moves between them. Devices without a kernel, and mechanisms that have no :class:`Turn`, are served by the host.
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

MOST_THERE = 64  # rows of state on a device: more memory than that is the host's, which draws the past again instead


class Turn(NamedTuple):
    r"""How one row is made of the Gaussians z at ``step`` and of what is kept, each operation rounded by itself, in this order:

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
    """Where the numbers from ``offset`` on of tensor ``index`` go: a contiguous tensor, and the (rows, size) that its recursion keeps."""

    out: Tensor
    state: Tensor | None
    index: int  # type: ignore[assignment]  # a tuple's own method of that name is not needed
    offset: int


class DeviceKernel(ABC):
    """Draws on a device. One launch for all targets of one type."""

    @abstractmethod
    def row(self, stream: ChaChaStream, turn: Turn, targets: Sequence[Target], scale: float | Tensor, *, fresh: bool) -> None:
        """``out = scale x`` if fresh, else ``out += scale x``; ``scale`` may be a number on the device, which is not fetched."""


_KERNELS: dict[str, DeviceKernel | Callable[[], DeviceKernel | None]] = {}


def register(kind: str, kernel: DeviceKernel | Callable[[], DeviceKernel | None]) -> None:
    """Serve devices of this type by ``kernel``, or by what it returns when it is first needed (None: not at all)."""
    _KERNELS[kind] = kernel


def kernel_for(device: torch.device) -> DeviceKernel | None:
    """The kernel of this device; None where the host draws."""
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
