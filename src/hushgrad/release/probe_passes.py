"""The passes of one step at each point where the denoiser needs a gradient; the parameters are moved there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hushgrad.clipping import Capture
from hushgrad.denoise.base import Probe
from hushgrad.errors import ArgumentError
from hushgrad.release.core import Release

Closure = Callable[[], Any]
_HERE = [Probe()]


def run_passes(release: Release, capture: Capture, closure: Closure | None, announce: Callable[[], None]) -> Any:
    """Let ``closure`` do this step's passes, once for each point that the denoiser asks for; return its first result.

    The parameters are moved to each point and restored bit for bit. ``announce`` tells the capture which point a pass is for.
    """
    probes = release.probes()
    if closure is None:
        if probes != _HERE:
            raise ArgumentError(
                f"The plan's denoiser asks for gradients at {len(probes)} points. Put zero_grad, forward and backward into a "
                "function and call optimizer.step(closure)."
            )
        return None
    capture.discard()  # the closure does all of the step's passes; earlier ones do not count
    if probes == _HERE:
        announce()
        with torch.enable_grad():
            return closure()
    first, *_ = [_at(probe, release, capture, closure, announce) for probe in probes]
    return first


def _at(probe: Probe, release: Release, capture: Capture, closure: Closure, announce: Callable[[], None]) -> Any:
    place, shift = release.placement, probe.shift or {}
    here = [place.here(name) for name in shift]
    kept = [t.clone() for t in here]
    try:
        with torch.no_grad():
            if shift:
                torch._foreach_add_(here, [*shift.values()])
            place.moved(capture.model)
        with capture.probe(probe.coefficient), torch.enable_grad():
            announce()
            return closure()
    finally:
        if shift:  # copied back: w + s - s is not w in floating point. One call, so that no interrupt comes in between
            torch._foreach_copy_(here, kept)
        with torch.no_grad():
            place.moved(capture.model)
