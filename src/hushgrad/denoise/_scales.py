"""Scales for gradients from their second moments, large where gradients are small."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def inverse_sizes(state: dict[str, Any], prefix: str, eps: float) -> dict[str, Tensor] | None:
    """S = k / (sqrt(v) + ``eps`` r) for the v that stand under ``prefix`` in ``state``; None if all of them are 0.

    r is the root mean square of all sqrt(v), and k is such that s ⊙ sqrt(v) has the norm of sqrt(v): a typical gradient keeps its norm,
    so that a clip norm and a learning rate keep their meaning under the scales.
    """
    squares = {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}
    total = sum(float(v.double().sum()) for v in squares.values())
    count = sum(v.numel() for v in squares.values())
    if not total > 0 or not math.isfinite(total):
        return None
    floor = eps * math.sqrt(total / count)
    sizes = {name: v.sqrt() for name, v in squares.items()}
    made = {name: (size + floor).reciprocal() for name, size in sizes.items()}
    scaled = sum(float((made[name] * size).double().square().sum()) for name, size in sizes.items())
    return {name: s.mul_(math.sqrt(total / scaled)) for name, s in made.items()}
