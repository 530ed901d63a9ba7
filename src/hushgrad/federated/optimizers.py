"""Server optimizers: how the server applies the private mean update. This is post-processing and costs no privacy."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hushgrad import _check
from hushgrad._value import Value

_below_one = partial(_check.between, 0, 1, closed="left")


class ServerOptimizer(Value, family="server_optimizer"):
    """A frozen description; its state is a dictionary of float64 tensors that the caller keeps."""

    @abstractmethod
    def step(self, weights: Tensor, update: Tensor, round: int, state: dict[str, Any]) -> Tensor:
        """New weights from the flat float64 ``weights`` and the private mean ``update`` (a direction of descent, not a gradient).

        ``round`` counts from 0; ``state`` is changed in place.

        Args:
            weights: the flat float64 weights of the global model.
            update: the private mean update, a direction of descent.
            round: counted from 0.
            state: what the optimizer keeps between rounds; changed in place.
        """


@dataclass(frozen=True, kw_only=True)
class ServerSGD(ServerOptimizer):
    """weights += learning_rate v, v = momentum v + update. With the defaults this is plain averaging (FedAvg).

        >>> import torch
        >>> state = {}
        >>> w = ServerSGD(momentum=0.9).step(torch.zeros(1).double(), torch.ones(1).double(), 0, state)
        >>> ServerSGD(momentum=0.9).step(w, torch.ones(1).double(), 1, state).item()
        2.9

    Reference: Hsu et al. 2019 (FedAvgM), algorithm 1; Kairouz et al. 2021, section 4 (momentum in DP-FTRL).
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    expected = _check.each(learning_rate=_check.positive, momentum=_below_one)

    def step(self, weights: Tensor, update: Tensor, round: int, state: dict[str, Any]) -> Tensor:
        """One step along the (heavy-ball) direction."""
        velocity = update
        if self.momentum:
            velocity = update + self.momentum * state["velocity"] if "velocity" in state else update
            state["velocity"] = velocity
        return torch.add(weights, velocity, alpha=self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class ServerAdam(ServerOptimizer):
    """m = b1 m + (1 - b1) u, v = b2 v + (1 - b2) u², weights += learning_rate c m / (sqrt(v) + tau), u the update.

    c = sqrt(1 - b2^(t+1)) / (1 - b1^(t+1)) in round t = 1, 2, ..., as in Flower's FedAdam. The second moment of a noisy update is
    mostly noise: with small cohorts this optimizer divides by the noise's own size.

        >>> ServerAdam(learning_rate=0.05).beta_1
        0.9

    Reference: Reddi et al. 2021 (arXiv:2003.00295), algorithm 2.
    """

    learning_rate: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3
    expected = _check.each(learning_rate=_check.positive, beta_1=_below_one, beta_2=_below_one, tau=_check.positive)

    def step(self, weights: Tensor, update: Tensor, round: int, state: dict[str, Any]) -> Tensor:
        """One Adam step."""
        first = state.get("first", torch.zeros_like(update)) * self.beta_1 + (1 - self.beta_1) * update
        second = state.get("second", torch.zeros_like(update)) * self.beta_2 + (1 - self.beta_2) * update.square()
        state["first"], state["second"] = first, second
        t = round + 2  # Flower counts rounds from 1 and corrects with the next one's number
        rate = self.learning_rate * math.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        return torch.addcdiv(weights, first, second.sqrt().add_(self.tau), value=rate)
