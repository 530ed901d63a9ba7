"""Federated learning on Flower: the server clips, adds correlated noise, and accounts for whole users.

Needs Flower: ``pip install 'hushgrad[federated]'``.
"""

from __future__ import annotations

try:
    import flwr.serverapp  # noqa: F401
except ModuleNotFoundError as error:
    if error.name is not None and error.name.split(".")[0] == "flwr":
        raise ModuleNotFoundError(
            "hushgrad.federated needs Flower; install it with: pip install 'hushgrad[federated]'", name="flwr"
        ) from None
    raise

from hushgrad.federated.check_ins import CheckIns
from hushgrad.federated.cohorts import MinSeparation
from hushgrad.federated.grids import LocalGrid
from hushgrad.federated.mods import clip_update
from hushgrad.federated.optimizers import ServerAdam, ServerOptimizer, ServerSGD
from hushgrad.federated.shares import Shares, add_share
from hushgrad.federated.strategy import DPFTRL, DPFedAvg

__all__ = [
    "DPFTRL",
    "CheckIns",
    "DPFedAvg",
    "LocalGrid",
    "MinSeparation",
    "ServerAdam",
    "ServerOptimizer",
    "ServerSGD",
    "Shares",
    "add_share",
    "clip_update",
]
