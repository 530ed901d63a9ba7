"""Aggregation: clips and sums clients' updates, and releases them through the code that releases every training step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from hushgrad.clipping.clipper import Clipper
from hushgrad.federated.layout import Layout
from hushgrad.federated.mods import CLIP_NORM
from hushgrad.federated.wire import Unusable
from hushgrad.release.core import Release
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.whole import Whole
from hushgrad.release.placement.world import World
from hushgrad.train.plan import Plan

_MODEL = "model"  # the one tensor of a server
_ROUNDING = 1 + 4e-9  # a float64 sum of 10⁷ squares is off by less; clipped to the enlarged norm, nobody exceeds the bound


class Aggregator:
    r"""(sum_i w_i u_i + noise_multiplier C (C⁻¹Z)_t) / batch_size over the clients' flat updates u_i, w_i = min(1, C / ‖u_i‖).

    **Formal guarantee.** Every client adds a vector of norm at most the clip norm, over all arrays together, or zero: for an
    update that is missing, malformed or not finite. The divisor is the plan's constant, so a drop-out moves the result by
    exactly its own contribution, and the sum's sensitivity is what the plan's event says.
    """

    def __init__(self, plan: Plan, key: RunKey) -> None:
        self._plan = plan
        # The server holds one flat model; until the first round nobody knows how long it is.
        self._release = Release(plan, Whole({_MODEL: torch.empty(0, dtype=torch.float64)}, World()), key)
        self._sum = self._update = self._current = np.empty(0)
        self._norms: list[float] = []

    @property
    def clip(self) -> Clipper:
        """The clipper of the next round: the plan's, or the current one of adaptive clipping."""
        return self._release.clip

    @property
    def clip_norm(self) -> float:
        """The norm that updates are clipped to."""
        return self._release.clip_norm

    def tell(self, config: ConfigRecord) -> None:
        """What clients must be told."""
        config[CLIP_NORM] = self.clip_norm

    def begin(self, step: int, layout: Layout, current: np.ndarray) -> None:
        """Start round ``step`` with an empty sum. ``current`` is the flat model that the clients were sent.

        If a round ended before its release, its row may already have been drawn; the stream is then set to the right row again.
        """
        self._layout, self._current = layout, current
        self._sum, self._update, self._norms = np.zeros(layout.size), np.empty(layout.size), []
        self._release.placement.params[_MODEL] = torch.from_numpy(self._sum)
        self._release.begin(step)

    def add(self, content: RecordDict) -> bool:
        """Add one client's clipped update; True if it had to be clipped.

        Raises:
            Unusable: for a reply that is no finite update of the model; it counts as zero.
        """
        self._layout.read_update(content, self._current, self._update)
        update = torch.from_numpy(self._update)
        square = float(update.dot(update))
        if not np.isfinite(square):
            raise Unusable("the update is not finite")
        weight = float(self.clip.weights(torch.tensor([square * _ROUNDING], dtype=torch.float64)))
        torch.from_numpy(self._sum).add_(update, alpha=weight)
        self._norms.append(square**0.5)
        return weight < 1

    def release(self, step: int) -> torch.Tensor:
        """The private mean update of round ``step``: divided by the plan's constant, noise added. Moves an adaptive clip norm."""
        total = torch.from_numpy(self._sum).mul_(1.0 / self._plan.batch_size)
        norms = torch.tensor(self._norms, dtype=torch.float64)
        return self._release.finished(self._release.noised(step, {_MODEL: total}, norms, begun={}), None)[_MODEL]

    def state_dict(self) -> dict[str, Any]:
        """The stream's buffers and the clip norm. As secret as the key."""
        return {"noise": self._release.stream.state_dict(), "clip": self.clip.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit."""
        self._release.stream.load_state_dict(state["noise"])
        self._release.use_clip(Clipper.from_json(state["clip"]))
