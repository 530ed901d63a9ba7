"""Detects adapters that are merged into the frozen weights, where no gradient reaches them."""

from __future__ import annotations

from torch import nn

from hushgrad.errors import CaptureError


def require_unmerged(model: nn.Module) -> None:
    """Refuse a pass whose adapters are merged into the frozen weights: no gradient would reach them.

    Raises:
        CaptureError: with the name of a layer.
    """
    for name, module in model.named_modules():
        if getattr(module, "merged", False) is True:
            raise CaptureError(
                f"The adapter of {name} is merged into the frozen weights, so it cannot be trained. Merge after the run, or into a copy "
                "of the model: merging and unmerging changes the frozen weights by rounding."
            )
