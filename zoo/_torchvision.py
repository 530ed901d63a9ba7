"""Lets a torchvision be imported whose compiled part does not fit this torch (no build for CPUs is published as a package).

Its models need none of the compiled operators, but importing it registers shapes for two of them.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

__all__ = ["declare"]

_KEPT: list[torch.library.Library] = []  # an operator lives as long as the library that declares it


def declare() -> None:
    """Declare the operators of which the import asks, if torchvision is there and did not bring them itself."""
    if _KEPT or find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
