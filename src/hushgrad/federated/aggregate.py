"""Aggregation: from clients' updates to a private mean. The only place where updates are clipped and the noise is added."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict

from hushgrad.clipping.adaptive import Adaptive
from hushgrad.clipping.base import Clipper
from hushgrad.events import Relation
from hushgrad.federated.layout import Layout, Unusable
from hushgrad.noise.source import Source
from hushgrad.release.keys import RunKey
from hushgrad.train.plan import Plan

__all__ = ["Aggregator"]

_MODEL, _COUNT = 0, 1  # the source's tensor numbers: the flat model, and the count of adaptive clipping
_ROUNDING = 1 + 4e-9  # a float64 sum of 10⁷ squares is off by less; clipped to the enlarged norm, nobody exceeds the bound


class Aggregator:
    r"""(sum_i w_i u_i + noise_multiplier C (C⁻¹Z)_t) / batch_size over the clients' flat updates u_i, w_i = min(1, C / ‖u_i‖).

    **Formal guarantee.** Every client adds a vector of norm at most the clip norm, over all arrays together, or zero: for an
    update that is missing, malformed or not finite. The divisor is the plan's constant, so a drop-out moves the result by
    exactly its own contribution, and the sum's sensitivity is what the plan's event says.
    """

    def __init__(self, plan: Plan, key: RunKey) -> None:
        self._plan, self._source = plan, Source(key=key.secret)
        self.stream = plan.noise.stream(self._source, steps=plan.steps)
        self.use_clip(plan.clip)
        self._sum = self._update = self._current = np.empty(0)
        self._norms: list[float] = []

    def use_clip(self, clip: Clipper) -> None:
        """Clip the next round with ``clip``: the plan's, or what adaptive clipping has moved it to."""
        multiplier = self._plan.noise_multiplier or 0.0
        self.clip = clip
        self.clip_norm = clip.sensitivity(Relation.ADD_REMOVE)
        # With adaptive clipping the rest of the budget goes to the count.
        self._noise_std = (clip.gradient_noise(multiplier) if isinstance(clip, Adaptive) else multiplier) * self.clip_norm

    def begin(self, layout: Layout, current: np.ndarray) -> None:
        """A new round: nothing summed yet. ``current`` is the flat model that the clients were sent."""
        self._layout, self._current = layout, current
        self._sum, self._update, self._norms = np.zeros(layout.size), np.empty(layout.size), []

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
        """The private mean update of round ``step``: noise added, divided by the plan's constant. Moves an adaptive clip norm."""
        total = torch.from_numpy(self._sum)
        self.stream.row(step, _MODEL, total, out=total, scale=self._noise_std)
        self._adapt(step)
        return total.div_(self._plan.batch_size)

    def _adapt(self, step: int) -> None:
        """Release how many norms lie below the clip norm, with its own noise, and move the clip norm accordingly."""
        clip = self.clip
        if not isinstance(clip, Adaptive):
            return
        count = torch.tensor([clip.raw_count(torch.tensor(self._norms, dtype=torch.float64))], dtype=torch.float64)
        self._source.z(step, _COUNT, count, out=count, scale=clip.count_noise or 0.0)
        self.use_clip(clip.moved(float(count)))

    def state_dict(self) -> dict[str, Any]:
        """The stream's buffers and the clip norm. As secret as the key."""
        return {"noise": self.stream.state_dict(), "clip": self.clip.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit."""
        self.stream.load_state_dict(state["noise"])
        self.use_clip(Clipper.from_json(state["clip"]))
