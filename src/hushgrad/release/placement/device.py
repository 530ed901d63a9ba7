"""Placement on a device: every parameter is whole in this process, on an accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from hushgrad.noise.device_noise import kernel_for
from hushgrad.release.placement.whole import Whole

if TYPE_CHECKING:
    from hushgrad.train.plan import Plan

__all__ = ["OnDevice", "draws_there", "with_cipher"]


def draws_there(params: Mapping[str, Tensor]) -> bool:
    """Whether all parameters are on devices that have a kernel for noise."""
    devices = {p.device for p in params.values()}
    return all(device.type != "cpu" and kernel_for(device) is not None for device in devices)


def with_cipher(plan: Plan, params: Mapping[str, Tensor]) -> Plan:
    """The plan of a run whose parameters are here: a plan without a cipher gets the one of the device."""
    if plan.cipher is None and not plan.secure and draws_there(params):
        return replace(plan, cipher="chacha20")
    return plan


class OnDevice(Whole):
    """Whole, on a device: a row of noise is one launch, or one copy, and the sums are added to it in place."""

    waited_for = False

    def early(self, scattered: frozenset[str]) -> list[str]:
        """All: adding to noise that exists costs no further launch."""
        return list(self.params)
