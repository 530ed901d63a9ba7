"""Steps with several micro-batches, units of several examples, probes or certificates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hushgrad.clipping.base import ClippedSum
from hushgrad.clipping.certificate import Certificate
from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.preconditioned import precondition
from hushgrad.clipping.reconcile import REPLACED, is_replaced, problem_of
from hushgrad.clipping.reduce import Group, Part, Use, add_clipped
from hushgrad.clipping.rejected import joined
from hushgrad.clipping.root import Root
from hushgrad.clipping.site import Site
from hushgrad.clipping.sums import Form, Sum
from hushgrad.errors import CaptureError

if TYPE_CHECKING:
    from hushgrad.clipping.collecting import Batch
    from hushgrad.clipping.parameter_placement import Added
    from hushgrad.clipping.tape import Tape

BESIDE = (
    "One pass has two backward passes, one from private.loss and one beside it. Put all terms into the function that private.loss is "
    "given, and run one backward."
)


class Grouping:
    """The state of a capture, and how it groups calls by privacy unit."""

    model: nn.Module
    loss_reduction: str
    unused: str
    scales: Callable[[], Mapping[str, Tensor] | None] | None
    _tape: Tape
    _likes: Mapping[str, Tensor | Form]
    _reduced: Added
    _grouped: tuple[Clipper | None, bool]
    _certificate: Certificate | None
    _copies: int
    _fixed: int | None
    _sites: list[Site]
    _params: dict[str, nn.Parameter]
    _names: dict[int, str]
    _bare: dict[str, Site]
    _covered: frozenset[str]
    _usual_calls: int
    _frozen: list[tuple[str, nn.Parameter]]
    _dtypes: dict[str, torch.dtype]
    _blank: dict[str, Sum]
    _by_rows: frozenset[str]
    _tied: bool
    _folded: tuple[dict[str, Sum], list[Part]] | None
    _folded_units: set[int]
    _root: Root
    _most: int | None
    not_isolated: str | None  # why this model may not be trained privately, if a proof has shown it

    def _added_apart(
        self, clipper: Clipper, sums: dict[str, Sum], scale: float, scales: Mapping[str, Tensor] | None
    ) -> list[Part]:
        """The parts of such a step: each group of privacy units by itself."""
        self._reconcile()
        if scales is not None:
            calls = [call for batch in self._tape.batches for call in batch.calls]
            self._tape.quiet(partial(precondition, calls, scales))
        groups, certificate = self._groups(), self._certificate
        if certificate is not None:
            self._require_capacity(certificate, groups)
        return self._tape.quiet(lambda: [add_clipped(group, clipper, sums, scale, certificate) for group in groups])

    def _groups(self) -> list[Group]:
        """The calls, grouped by privacy unit."""
        batches = [batch for batch in self._tape.batches if batch.calls]
        if any(batch.units is not None for batch in batches):
            return [self._by_unit(batches)] if batches else []
        lanes: dict[int | None, list[Batch]] = {}
        for batch in batches:
            lanes.setdefault(batch.probe, []).append(batch)
        if len(lanes) > 1 and len({tuple((b.examples, b.padding) for b in lane) for lane in lanes.values()}) > 1:
            raise CaptureError("Every probe must pass over the same batches, in the same order.")
        return [
            Group(same[0].examples, [u for b in same for u in self._uses(b)], same[0].padding, self._fixed is not None)
            for same in zip(*lanes.values(), strict=True)
        ]

    def _by_unit(self, batches: list[Batch]) -> Group:
        if any(b.units is None or len(b.units) != b.examples for b in batches):
            raise CaptureError(
                "Expected one unit id for every example of every batch. Call capture.units(ids) before each forward."
            )
        counted = [b.units[: b.examples - b.padding] for b in batches if b.units is not None]
        ids, index = torch.cat(counted).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        if self._folded_units and not self._folded_units.isdisjoint(ids.tolist()):
            raise CaptureError(
                "A unit has examples in two micro-batches, of which the first is clipped already. Cut a batch with batch.split(size): it "
                "keeps a unit's examples together."
            )
        uses, padding = [], int(any(batch.padding for batch in batches))
        if padding:  # all padding is one more unit, the last
            own = zip(index.split([len(units) for units in counted]), batches, strict=True)
            index = torch.cat([t for units, b in own for t in (units, units.new_full((b.padding,), len(ids)))])
        index = index.to(next(iter(self._params.values())).device, non_blocking=True)
        for batch, units in zip(batches, index.split([batch.examples for batch in batches]), strict=True):
            uses += self._uses(batch, units)
        if self._fixed is not None:  # units without examples, and that of the padding
            return Group(self._fixed + 1, uses, self._fixed + 1 - len(ids), fixed=True)
        return Group(len(ids) + padding, uses, padding)

    def _uses(self, batch: Batch, units: Tensor | None = None) -> list[Use]:
        factor = batch.factor(mean=self.loss_reduction == "mean") / self._copies
        return [Use(call, factor, call.units(units)) for call in batch.calls]

    def _require_capacity(self, certificate: Certificate, groups: list[Group]) -> None:
        taken = sum(group.size - group.padding for group in groups) + sum(
            part.taken for part in (self._folded[1] if self._folded else [])
        )
        if taken > certificate.here:
            raise CaptureError(
                f"The step has more contributions than the {certificate.here} that its certificate is for. Make the plan for larger "
                "batches (batch_size=)."
            )

    def _joined(self, clipper: Clipper, sums: dict[str, Sum], parts: list[Part], scale: float) -> ClippedSum:
        """All micro-batches, including folded ones; there may be none."""
        if self._folded is not None:
            folded, earlier = self._folded
            for name, total in folded.items():
                if total.tensor is not None:
                    sums[name].add(total.tensor.mul_(scale))
            parts = earlier + parts
        raw_sums = {name: total.done for name, total in sums.items()}
        if not parts:
            first = next(iter(self._params))
            empty = self._params[first].new_zeros(0, dtype=self._dtypes[first])
            return ClippedSum(raw_sums, empty, clipper.weights(empty), 0)
        norms, weights = torch.cat([p.norms for p in parts]), torch.cat([p.weights for p in parts])
        rejected, taken = joined([p.rejected for p in parts]), sum(p.taken for p in parts)
        # Micro-batches of fixed shape are cut so that padding comes last.
        return ClippedSum(raw_sums, norms[:taken], weights[:taken], rejected, None if parts[0].counted is None else norms)

    def _reconcile(self) -> None:
        """Require that every trainable parameter was seen completely; otherwise raise, and forget the passes."""
        problem = problem_of(self._tape, self._params, self._frozen, require_all=self.unused == "raise")
        if problem:
            problem = REPLACED if is_replaced(self.model, self._params) else problem
            self._tape.failure = problem  # until the passes are discarded
            raise CaptureError(problem)

    def check(self) -> int:
        """Raise what :meth:`collect` would raise for the passes so far; otherwise return how many examples (or units) it will clip.

        A caller can thus refuse a step before it draws the step's noise. Nothing is cleared.
        """
        self._reconcile()
        folded = self._folded[1] if self._folded else []
        return sum(part.taken for part in folded) + sum(group.size - group.padding for group in self._groups())
