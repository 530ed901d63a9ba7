"""Replicated: every process holds all parameters, and they share each batch and the work of drawing the noise."""

from __future__ import annotations

from torch import Tensor

from hushgrad.release.placement.whole import Whole

__all__ = ["Replicated"]


class Replicated(Whole):
    """Whole parameters in each of W processes. Each adds its part of the noise to its own sum; then the sums are added up."""

    finishes = False

    @property
    def draws_all(self) -> bool:
        """One part of W, of every parameter."""
        return False

    def own(self, name: str, buffer: Tensor) -> tuple[Tensor, int]:
        """A range of the flattened sum; ranges are dealt like FSDP's, so that a checkpoint fits both."""
        offset, count = self.world.part(buffer.numel())
        return buffer.view(-1).narrow(0, offset, count), offset  # a view, or an error: never a copy

    def gather(self, buffers: dict[str, Tensor]) -> None:
        """Sums of one part and zeros: the parts themselves, bit for bit."""
        for name, buffer in buffers.items():
            part, offset = self.own(name, buffer)
            flat = buffer.view(-1)
            flat[:offset] = 0
            flat[offset + part.numel() :] = 0
        self.world.add_up(buffers.values())

    def add_up(self, buffers: dict[str, Tensor]) -> None:
        """One message of all sums, with all parts of the noise."""
        self.world.add_up(buffers.values())
