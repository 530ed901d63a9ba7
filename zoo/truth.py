"""The clipped sum of single-example gradients, each from a pass of its own, and what a private step makes of it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from hushgrad.train import Plan, make_private
from zoo.specimen import Specimen

__all__ = ["Truth", "apart"]

_STEPS = 3  # the first proves whose row is whose, later ones use the proof
_CROWD = 128  # copies of one, beside the examples: other batches of a run may be as large, and a capacity binds in them
_SILENT = 1e-13  # noise multiplier: far below any error that counts
_MIXED = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative: above rounding, below any influence worth the name


class Truth:
    """What a batch should come to, from passes over one example at a time."""

    def __init__(self, model: nn.Module, specimen: Specimen, records: list[Any], dtype: torch.dtype) -> None:
        self.model, self.specimen, self.dtype = model, specimen, dtype
        self.records = tree_map(lambda leaf: _cast(leaf, dtype), records)
        self.collate = specimen.collate or default_collate
        self.params = [p for p in model.parameters() if p.requires_grad]
        before = _state(model)
        singles = [self._gradient([record]) for record in self.records]
        whole, self.plain_seconds = self._gradient(self.records), self._plain_seconds()
        self.unused = any(g is None for gradient in (*singles, whole) for g in gradient)
        dense = [self._dense(gradient) for gradient in singles]
        norms = torch.stack([_norm(gradient) for gradient in dense])
        self.finite = bool(norms.isfinite().all())
        self.bound = max(0.9 * float(norms.median()), 1e-8)  # half of the examples are clipped
        self.clipped = _total(dense, (self.bound / norms).nan_to_num(posinf=1.0).clamp(max=1.0))
        share = torch.ones_like(norms) / (1 if specimen.reduction == "sum" else len(self.records))
        self._keeps = any(not torch.equal(now, before[name]) for name, now in _state(model).items() if name in before)
        self._whole, self._singles = self._dense(whole), dense
        self._mean = _total(dense, share)

    @property
    def mixing(self) -> bool:
        """Whether a run that refuses the model is right to: it keeps something, or a batch is not its examples, alone or in a crowd."""
        return self._keeps or self._apart(self._whole, self._mean) or any(self._crowded(i) for i in range(len(self.records)))

    def _crowded(self, one: int) -> bool:
        """All examples among many copies of one: a capacity that the batch does not reach binds for them."""
        copies, total = _CROWD, _CROWD + len(self.records)
        share = torch.ones(len(self.records), dtype=torch.float64)
        share[one] += copies
        mean = _total(self._singles, share / (1 if self.specimen.reduction == "sum" else total))
        return self._apart(self._dense(self._gradient([*self.records, *[self.records[one]] * copies])), mean)

    def _apart(self, a: list[Tensor], b: list[Tensor]) -> bool:
        return not apart(a, b) <= _MIXED[self.dtype]

    def _gradient(self, records: list[Any]) -> list[Tensor | None]:
        self.model.zero_grad(set_to_none=True)
        self.specimen.loss(self.model, self.collate(records)).backward()
        gradient = [None if p.grad is None else p.grad.detach().clone() for p in self.params]
        self.model.zero_grad(set_to_none=True)
        return gradient

    def _dense(self, gradient: list[Tensor | None]) -> list[Tensor]:
        return [torch.zeros_like(p) if g is None else g for g, p in zip(gradient, self.params, strict=True)]

    def _plain_seconds(self) -> float:
        began = time.process_time()
        self._gradient(self.records)
        return time.process_time() - began

    def compare(self) -> tuple[float, float]:
        """(largest relative error of the steps' clipped sums, CPU time of the last step to a plain pass)."""
        optimizer = torch.optim.SGD(self.params, lr=1.0)
        rows = len(self.records)
        plan = Plan.dpgd(noise_multiplier=_SILENT, delta=1e-5, dataset_size=rows, steps=_STEPS, max_grad_norm=self.bound)
        unused = "zero" if self.unused else "raise"
        private = make_private(self.model, optimizer, plan, loss_reduction=self.specimen.reduction, unused=unused)
        before = [p.detach().clone() for p in self.params]
        error, seconds = 0.0, 0.0
        try:
            for batch in private.loader(self.records, collate_fn=self.collate):
                began = time.process_time()
                optimizer.zero_grad()
                self.specimen.loss(self.model, batch).backward()
                optimizer.step()
                seconds = time.process_time() - began
                moved = [(b - p.detach()) * rows for b, p in zip(before, self.params, strict=True)]
                error = max(error, apart(moved, self.clipped, least=self.bound))
                with torch.no_grad():
                    for p, b in zip(self.params, before, strict=True):
                        p.copy_(b)
        finally:
            private.detach()
        return error, round(seconds / max(self.plain_seconds, 1e-6), 1)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _state(model: nn.Module) -> dict[str, Tensor]:
    """What is released with the model: statistics of the data in it are refused, and rightly."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _total(gradients: list[list[Tensor]], weights: Tensor) -> list[Tensor]:
    return [torch.stack([w * g for w, g in zip(weights, column, strict=True)]).sum(0) for column in zip(*gradients, strict=True)]


def _norm(gradient: list[Tensor]) -> Tensor:
    return torch.stack([g.double().square().sum() for g in gradient]).sum().sqrt()


def apart(a: list[Tensor], b: list[Tensor], *, least: float = 1e-30) -> float:
    """Distance relative to ``b`` (or to ``least``, if ``b`` is smaller); infinite where it cannot be said."""
    far = float(_norm([x - y for x, y in zip(a, b, strict=True)]) / max(float(_norm(b)), least))
    return far if far == far else float("inf")
