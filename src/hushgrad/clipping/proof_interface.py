"""What proofs, and hooks of proved passes, need from a capture."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.collecting import Collecting
from hushgrad.clipping.merged_adapters import require_unmerged
from hushgrad.clipping.rules.parameter import Bare
from hushgrad.clipping.site import Call, Site
from hushgrad.errors import CaptureError
from hushgrad.events import Relation


class ProofInterface(Collecting):
    """The part of a capture that proofs use."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The captured parameters by name."""
        return self._params

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a captured parameter."""
        return self._names.get(id(leaf))

    def routed(self, calls: list[Call]) -> None:
        """Note that the data choose rows: sites that were not called, or on no rows, may get no gradient."""
        busy = {name for c in calls if all(len(s) and s[0] for s in c.shapes) for name in c.site.full.values()}
        self._tape.batch().routed = frozenset(name for site in self._sites for name in site.full.values()) - busy

    def refuse_detached(self) -> None:
        """Refuse a pass whose outputs have no graph, though they had one in the proof."""
        require_unmerged(self.model)
        self._tape.fail(
            "The outputs of the model require no gradient in this pass, as behind a reentrant checkpoint whose inputs require none. Use "
            'checkpoint(..., use_reentrant=False), which is gradient_checkpointing_kwargs={"use_reentrant": False} in transformers.'
        )

    def refuse_around(self, shape: tuple[int, ...], g: Tensor) -> None:
        """Refuse a gradient through an output that belongs to no example."""
        if not self._tape.deaf and bool(g.any()):
            self._tape.fail(
                f"The loss uses an output of the model, of the shape {shape}, that is made of all examples together, so it cannot be told "
                "whose its gradient is. Return one value for each example instead, or detach it."
            )

    def refuse_beyond(self, beyond: Callable[[Tensor], bool], g: Tensor) -> None:
        """Refuse a gradient at padded positions, which an example has only because another one is longer."""
        if not self._tape.deaf and beyond(g):
            self._tape.fail(
                "The loss uses positions of an output beyond the length of their example, which are there as another is longer. Mask "
                "them, loss * (torch.arange(T) < lengths[:, None]), or pad all batches to one length (total_length=...)."
            )

    def refusals(self, tell: Callable[[CaptureError], None]) -> None:
        """Call ``tell`` with what is refused inside of a backward pass, from where it may not reach whoever waits for this process."""
        self._tape.refused = tell

    def bare_call(self, name: str) -> Call:
        """The use, in this batch, of a parameter outside of captured modules: it is read at the frontier."""
        batch, p = self._tape.batch(), self._params[name]
        if name not in batch.bare:
            if name not in self._bare:
                self._bare[name] = Site(self._tape, name, self.model, Bare(), {name: p}, {name: name})
            batch.bare[name] = Call(self._bare[name], batch, (), {}, None)
        return batch.bare[name]

    def watched(self, forget: Callable[[], None]) -> None:
        """Keep frontier hooks active while the batch is remembered; ``forget`` releases what they hold."""
        self._tape.batch().watched.append(forget)

    def refuse_gone(self) -> None:
        """Refuse a gradient that reaches the frontier of a forgotten pass."""
        if not self._tape.deaf:
            self._tape.fail(
                "A gradient came back from an earlier batch, after it was collected or a later forward began. Run backward for each batch "
                "before the next forward, or add the losses and run one backward."
            )

    def weighed(self, weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the per-example gradients with these weights, and the examples' norms; nothing is clipped."""
        rows, self._by_rows = self._by_rows, frozenset()
        folded, self._folded = self._folded, None
        copies, self._copies = self._copies, 1
        scales, self.scales = self.scales, None
        unused, self.unused, reduction, self.loss_reduction = self.unused, "zero", self.loss_reduction, "sum"
        certificate = self._certificate
        self._certificate = certificate and certificate._replace(above=False)
        try:
            with torch.set_grad_enabled(False):
                sums = self._sums({})
                parts = self._reduced(_Given(weights), sums, 1.0)
            # Examples without any numbers have no gradient.
            norms = parts[0].norms[: parts[0].taken] if parts else torch.zeros_like(weights)
            return {name: total.buffer for name, total in sums.items()}, norms
        finally:
            self._by_rows, self._folded, self.unused, self.loss_reduction = rows, folded, unused, reduction
            self._certificate, self._copies, self.scales = certificate, copies, scales


class _Given(Clipper):
    """A clipper with given weights, for a proof."""

    def __init__(self, given: Tensor) -> None:
        self._given = given

    def weights(self, sq_norms: Tensor) -> Tensor:
        """The given weights, whatever the norms."""
        return self._given.to(sq_norms)

    def sensitivity(self, relation: Relation) -> float:
        """Infinite: nothing computed with it is released."""
        return float("inf")
