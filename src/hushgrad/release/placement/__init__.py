"""Where the tensors of a run live: in one process, on a device, replicated in several processes, or sharded over them.

A placement is a value that the core calls; :func:`placement_of` finds a model's, and is the only place that distinguishes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hushgrad.release.placement.sharded import Sharded, is_sharded
from hushgrad.release.placement.whole import OnDevice, Replicated, Whole
from hushgrad.release.placement.world import World

if TYPE_CHECKING:
    from hushgrad.train.plan import Plan

__all__ = ["OnDevice", "Replicated", "Sharded", "Whole", "placement_of"]


def placement_of(params: dict[str, Tensor], world: World, plan: Plan) -> Whole:
    """The placement of these parameters: all or none must be sharded, by rows, over all processes.

    Raises:
        ArgumentError: for another kind of sharding, and for a plan that needs whole tensors of a sharded model.
    """
    if any(is_sharded(p) for p in params.values()):
        return Sharded.checked(params, world, plan)
    if world.size > 1:
        return Replicated(params, world)
    return Whole(params, world) if any(p.is_cpu for p in params.values()) else OnDevice(params, world)
