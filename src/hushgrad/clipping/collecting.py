"""From the passes since the last collect to a clipped sum, and what a proof asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hushgrad.clipping.base import ClippedSum
from hushgrad.clipping.call import Call
from hushgrad.clipping.certificate import Certificate
from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.preconditioned import precondition
from hushgrad.clipping.reconcile import problem_of
from hushgrad.clipping.reduce import Group, Part, Use, add_clipped, add_usual
from hushgrad.clipping.rejected import joined
from hushgrad.clipping.rules.parameter import Bare
from hushgrad.clipping.site import Site
from hushgrad.clipping.sums import Form, RoundedSum, RowSum, Sum
from hushgrad.clipping.tape import Batch, Tape
from hushgrad.errors import CaptureError
from hushgrad.events import Relation

if TYPE_CHECKING:
    from hushgrad.clipping.held import Added

__all__ = ["Collecting"]

_site = attrgetter("site")


class Collecting:
    """The private half of a capture."""

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
    _by_rows: frozenset[str]
    _tied: bool
    _folded: tuple[dict[str, Sum], list[Part]] | None
    _folded_units: set[int]

    # What a proof asks -------------------------------------------------------------------------------------------------

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a captured parameter."""
        return self._names.get(id(leaf))

    def routed(self, calls: list[Call]) -> None:
        """Rows are chosen by the data: sites that were not called, or on no rows, may get no gradient."""
        busy = {name for c in calls if all(len(s) and s[0] for s in c.shapes) for name in c.site.full.values()}
        self._tape.batch().routed = frozenset(name for site in self._sites for name in site.full.values()) - busy

    def refuse_detached(self) -> None:
        """No output of a pass has a graph, though it had one in the proof."""
        self._tape.fail(
            "The outputs of the model require no gradient in this pass, as behind a reentrant checkpoint whose inputs require none. Use "
            'checkpoint(..., use_reentrant=False), which is gradient_checkpointing_kwargs={"use_reentrant": False} in transformers.'
        )

    def refuse_around(self, shape: tuple[int, ...], g: Tensor) -> None:
        """A gradient comes back through an output that is no example's."""
        if not self._tape.deaf and bool(g.any()):
            self._tape.fail(
                f"The loss uses an output of the model, of the shape {shape}, that is made of all examples together, so it cannot be told "
                "whose its gradient is. Return one value for each example instead, or detach it."
            )

    def refuse_beyond(self, beyond: Callable[[Tensor], bool], g: Tensor) -> None:
        """A gradient comes back to positions that an example has because another one is longer."""
        if not self._tape.deaf and beyond(g):
            self._tape.fail(
                "The loss uses positions of an output beyond the length of their example, which are there as another is longer. Mask "
                "them, loss * (torch.arange(T) < lengths[:, None]), or pad all batches to one length (total_length=...)."
            )

    def bare_call(self, name: str) -> Call:
        """The use of a parameter in this batch that no site sees: it is read at the frontier."""
        batch, p = self._tape.batch(), self._params[name]
        if name not in batch.bare:
            if name not in self._bare:
                self._bare[name] = Site(self._tape, name, self.model, Bare(), {name: p}, {name: name})
            batch.bare[name] = Call(self._bare[name], batch, (), {}, None)
        return batch.bare[name]

    def watched(self, forget: Callable[[], None]) -> None:
        """Hooks on nodes of this batch's graph read for as long as the batch is remembered; ``forget`` lets go of what they know."""
        self._tape.batch().watched.append(forget)

    def refuse_gone(self) -> None:
        """A gradient comes back to the frontier of a pass that is forgotten."""
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

    # Sums ----------------------------------------------------------------------------------------------------------------

    def _joined(self, clipper: Clipper, sums: dict[str, Sum], parts: list[Part], scale: float) -> ClippedSum:
        """All micro-batches, those that were folded too; there may be none."""
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
        # Micro-batches of fixed shape are cut so that what is filled up comes last.
        return ClippedSum(raw_sums, norms[:taken], weights[:taken], rejected, None if parts[0].counted is None else norms)

    def _sums(self, out: Mapping[str, Tensor]) -> dict[str, Sum]:
        whole = Sum if self._certificate is None else RoundedSum  # of what is in ``out``
        sums = {}
        for name, like in self._likes.items():
            kind = RowSum if name in self._by_rows else whole if name in out else Sum
            sums[name] = kind(like, self._dtypes[name], out.get(name))
        return sums

    def _added(self, clipper: Clipper, sums: dict[str, Sum], scale: float) -> list[Part]:
        certificate, scales = self._certificate, None if self.scales is None else self.scales()
        if clipper is not self._grouped[0]:
            self._grouped = clipper, clipper.groups(list(sums)) is not None
        plain = certificate is None and scales is None and not self._grouped[1]
        usual = self._usual() if plain else None
        if usual is not None:
            counted = usual.examples - usual.padding if usual.padding or self._fixed is not None else None
            part = self._tape.quiet(partial(add_usual, usual.calls, self._factor(usual), clipper, sums, scale, counted))
            if part is not None:
                return [part]
        self._reconcile()
        if scales is not None:
            calls = [call for batch in self._tape.batches for call in batch.calls]
            self._tape.quiet(partial(precondition, calls, scales))
        groups = self._groups()
        if certificate is not None:
            self._require_capacity(certificate, groups)
        return self._tape.quiet(lambda: [add_clipped(group, clipper, sums, scale, certificate) for group in groups])

    def _require_capacity(self, certificate: Certificate, groups: list[Group]) -> None:
        taken = sum(group.size - group.padding for group in groups) + sum(
            part.taken for part in (self._folded[1] if self._folded else [])
        )
        if taken > certificate.here:
            raise CaptureError(
                f"The step has more contributions than the {certificate.here} that its certificate is for. Make the plan for larger "
                "batches (batch_size=)."
            )

    def _usual(self) -> Batch | None:
        """The batch of a usual step, if this is one: one backward pass, each module called once, and nothing to be refused.

        What it lets through, :meth:`_reconcile` would; a small model's step is mostly Python, and this is less of it.
        """
        tape = self._tape
        if tape.failure or tape.leaks or len(tape.batches) != 1 or self._tied:
            return None
        batch = tape.batches[0]
        calls = batch.calls
        if (
            len(batch.tasks) != 1
            or batch.units is not None
            or len(calls) != self._usual_calls
            or (len(calls) > 1 and len({*map(_site, calls)}) < len(calls))  # a module was called twice
            or not self._covered.isdisjoint(batch.bare)
        ):
            return None
        for p in self._params.values():
            if not p.requires_grad:
                return None
        for _, p in self._frozen:
            if p.requires_grad:
                return None
        for call in calls:
            if call.index is not None or call.stale():
                return None
        return batch

    def _groups(self) -> list[Group]:
        """The calls, by privacy unit."""
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
        if padding:  # all of it is one unit more, the last
            own = zip(index.split([len(units) for units in counted]), batches, strict=True)
            index = torch.cat([t for units, b in own for t in (units, units.new_full((b.padding,), len(ids)))])
        index = index.to(next(iter(self._params.values())).device, non_blocking=True)
        for batch, units in zip(batches, index.split([batch.examples for batch in batches]), strict=True):
            uses += self._uses(batch, units)
        if self._fixed is not None:  # units without examples, and the one of what fills up
            return Group(self._fixed + 1, uses, self._fixed + 1 - len(ids), fixed=True)
        return Group(len(ids) + padding, uses, padding)

    def _uses(self, batch: Batch, units: Tensor | None = None) -> list[Use]:
        return [Use(call, self._factor(batch), call.units(units)) for call in batch.calls]

    def _factor(self, batch: Batch) -> float:
        """What gradients are multiplied by, as those of a mean were divided by the number of examples."""
        if len(batch.summed) > 1:
            raise CaptureError(
                "One pass has two backward passes, one from private.loss and one beside it. Put all terms into the function that "
                "private.loss is given, and run one backward."
            )
        is_mean = self.loss_reduction == "mean" and True not in batch.summed
        return batch.coefficient * (batch.examples if is_mean else 1) / self._copies

    def _reconcile(self) -> None:
        """Every trainable parameter seen, and seen completely; else raise, and forget the passes."""
        problem = problem_of(self._tape, self._params, self._frozen, require_all=self.unused == "raise")
        if problem:
            self._tape.failure = problem  # until the passes are discarded
            raise CaptureError(problem)


class _Given(Clipper):
    """Weights that are given, for a proof."""

    def __init__(self, given: Tensor) -> None:
        self._given = given

    def weights(self, sq_norms: Tensor) -> Tensor:
        """As they were given, whatever the norms."""
        return self._given.to(sq_norms)

    def sensitivity(self, relation: Relation) -> float:
        """Nothing of this is released."""
        return float("inf")
