"""Train: a plan describes a private run; make_private attaches it to an ordinary training loop, and fit is a ready-made one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._lazy_import import later
from hushgrad.train.after.averaging import EMA, Average, Polyak, Tail
from hushgrad.train.after.projection import Ball, Box, Projection
from hushgrad.train.plan import Plan
from hushgrad.train.spending import guarantee_of

if TYPE_CHECKING:
    from hushgrad.denoise.svrg import SVRG
    from hushgrad.release.placement.world import ProcessLost
    from hushgrad.train.checkpoint import Checkpoint
    from hushgrad.train.fitting import fit
    from hushgrad.train.private import Private, make_private

__all__ = [
    "EMA",
    "SVRG",
    "Average",
    "Ball",
    "Box",
    "Checkpoint",
    "Plan",
    "Polyak",
    "Private",
    "ProcessLost",
    "Projection",
    "Tail",
    "fit",
    "guarantee_of",
    "make_private",
]

# These need torch.
__getattr__, __dir__ = later(__name__)
