"""Whole placement: every parameter is in this process. Also the methods called between steps; for those in a step, see the core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping.parameter_placement import ParameterPlacement
from hushgrad.denoise.base import Denoiser, NoiseInfo
from hushgrad.noise.base import NoiseStream
from hushgrad.noise.streams.prefetch import drawn_ahead
from hushgrad.release.core import Placement
from hushgrad.release.placement.world import World
from hushgrad.sampling.batch import Batch

__all__ = ["Whole"]


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
