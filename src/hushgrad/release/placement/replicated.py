"""Replicated placement: every process holds all parameters; they share each batch and the work of drawing the noise."""

from __future__ import annotations

from collections.abc import Mapping

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
