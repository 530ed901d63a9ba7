"""Placements of whole parameters: in this process, on a device, or in each of several processes that share the work.

Also the methods that are called between steps; for those in a step, see the core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hushgrad.clipping.parameter_placement import ParameterPlacement
from hushgrad.denoise.base import Denoiser, NoiseInfo
from hushgrad.noise.base import NoiseStream
from hushgrad.noise.device_noise import kernel_for
from hushgrad.noise.streams.prefetch import drawn_ahead
from hushgrad.release.core import Placement
from hushgrad.release.placement.world import World
from hushgrad.sampling.batch import Batch

if TYPE_CHECKING:
    from hushgrad.train.plan import Plan


class Whole(Placement, ParameterPlacement):
    """Where the parameters of a run, their sums, their noise and their state live. This one: whole, in one process."""

    in_parts = False  # whether a process holds a part of each parameter only

    def __init__(self, params: dict[str, Tensor], world: World) -> None:
        self.params, self.world = params, world
        self.index = {name: i for i, name in enumerate(params)}  # of the parameter's noise

    # Parameters ------------------------------------------------------------------------------------------------------

    def here(self, name: str) -> Tensor:
        """What this process holds of a parameter, sharing its memory."""
        return self.params[name].detach()

    def like(self, name: str) -> Tensor:
        """A tensor of a sum's shape, device and type: sums and noise are float32 for parameters of lower precision."""
        p = self.here(name)
        wide = torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
        return p if p.dtype is wide else torch.empty(p.shape, dtype=wide, device=p.device)

    def moved(self, model: nn.Module) -> None:
        """Called after the parameters changed between two passes: the next one must use the new values."""

    # Noise -----------------------------------------------------------------------------------------------------------

    def streamed(self, stream: NoiseStream) -> NoiseStream:
        """The run's noise as it is best drawn for tensors that are here: for devices, one step ahead."""
        return stream if any(p.is_cpu for p in self.params.values()) else drawn_ahead(stream)

    @property
    def draws_all(self) -> bool:
        """Whether this process draws the noise of everything that it holds."""
        return True

    def ranges(self) -> list[tuple[int, int]]:
        """(offset, count) of each parameter's part whose noise is drawn here, in the parameters' order."""
        return [(offset, part.numel()) for _, part, offset in self.own({name: self.here(name) for name in self.params})]

    def early(self, scattered: frozenset[str]) -> list[str]:
        """Sums that are cheapest added to their noise: tables of which few rows are touched. The others get it afterwards."""
        return [name for name in self.params if name in scattered] if scattered else []

    def gather(self, buffers: dict[str, Tensor]) -> None:
        """Give every process all of what it holds, after each has finished its own part of the sums."""

    # Denoisers -------------------------------------------------------------------------------------------------------

    def denoised(self, denoiser: Denoiser, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        """The denoiser's result for what this process holds."""
        return denoiser(grads, info, state)

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """A denoiser's state as it is saved."""
        return dict(state)

    def loaded(self, state: dict[str, Any]) -> dict[str, Any]:
        """A saved state as the denoiser keeps it here."""
        return dict(state)

    # Passes ----------------------------------------------------------------------------------------------------------

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """Micro-batches of at most ``size`` examples."""
        return batch.split(size)


class Replicated(Whole):
    """Whole parameters in each of W processes. Each adds its part of the noise to its own sum; then the sums are added up."""

    finishes = False

    @property
    def draws_all(self) -> bool:
        """One part of W, of every parameter."""
        return False

    def own(self, buffers: Mapping[str, Tensor]) -> list[tuple[str, Tensor, int]]:
        """A range of each flattened sum, assigned as FSDP does, so that a checkpoint fits both."""
        parts = []
        for name, buffer in buffers.items():
            offset, count = self.world.part(buffer.numel())
            parts.append((name, buffer.view(-1).narrow(0, offset, count), offset))  # a view, or an error: never a copy
        return parts

    def gather(self, buffers: dict[str, Tensor]) -> None:
        """Add each process's part to zeros of the others: the parts themselves, bit for bit."""
        for name, part, offset in self.own(buffers):
            flat = buffers[name].view(-1)
            flat[:offset] = 0
            flat[offset + part.numel() :] = 0
        self.world.add_up(buffers.values())

    def add_up(self, buffers: dict[str, Tensor]) -> None:
        """One message with all sums and all parts of the noise."""
        self.world.add_up(buffers.values())


class OnDevice(Whole):
    """Whole, on a device: a row of noise is one launch, or one copy, and the sums are added to it in place."""

    waited_for = False

    def early(self, scattered: frozenset[str]) -> list[str]:
        """All: adding to noise that exists costs no further launch."""
        return list(self.params)


def draws_there(params: Mapping[str, Tensor]) -> bool:
    """Whether all parameters are on devices that have a kernel for noise."""
    devices = {p.device for p in params.values()}
    return all(device.type != "cpu" and kernel_for(device) is not None for device in devices)


def with_cipher(plan: Plan, params: Mapping[str, Tensor]) -> Plan:
    """The plan of a run whose parameters are here: a plan without a cipher gets the one of the device."""
    if plan.cipher is None and not plan.secure and draws_there(params):
        return replace(plan, cipher="chacha20")
    return plan
