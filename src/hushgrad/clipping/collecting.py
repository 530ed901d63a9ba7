"""The part of the capture that every step runs: a batch is announced, passes over it are recorded, and a clipped sum is computed.

A batch begins with the first pass through the model after a backward. Gradients that arrive in one or several backward passes over
it belong to the same examples; a forward after a backward holds other examples (a micro-batch). An ordinary step of a small model is
mostly Python time and has a short path here; other cases are in :mod:`hushgrad.clipping.tape` and :mod:`hushgrad.clipping.grouping`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hushgrad import _check
from hushgrad.clipping._torch import backward_task, is_autocast, set_grad
from hushgrad.clipping.base import ClippedSum
from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.device_sum import summed_on_device
from hushgrad.clipping.gradient_layout import read_by_rows
from hushgrad.clipping.grouping import BESIDE, Grouping
from hushgrad.clipping.heavy_units import is_light
from hushgrad.clipping.mass import Mass
from hushgrad.clipping.record import clipped, versions_of
from hushgrad.clipping.reduce import Part
from hushgrad.clipping.sums import RoundedSum, RowSum, Sum
from hushgrad.errors import CaptureError

if TYPE_CHECKING:
    from hushgrad.clipping.proof.structure import Structure
    from hushgrad.clipping.site import Call

T = TypeVar("T")
_site, _requires_grad, _second = attrgetter("site"), attrgetter("requires_grad"), itemgetter(1)
_switched_off = attrgetter("switched_off")


class Batch:
    """The calls over one physical batch of examples."""

    __slots__ = (
        "announced", "bare", "calls", "coefficient", "examples", "faint", "largest", "padding", "probe", "routed", "structure", "summed",
        "tasks", "units", "watched",
    )  # fmt: skip

    def __init__(self, examples: int | None, units: Tensor | None, probe: int | None, coefficient: float) -> None:
        self.examples = -1 if examples is None else examples
        self.announced = examples is not None
        self.units, self.probe, self.coefficient = units, probe, coefficient
        self.padding = 0  # how many examples at the end are padding
        self.calls: list[Call] = []
        self.bare: dict[str, Call] = {}  # parameters that are read at the frontier
        self.faint: dict[Call, tuple[tuple[Any, ...], dict[str, Any], list[int]]] = {}  # see read_by_rows
        self.watched: list[Callable[[], None]] = []  # release what the frontier hooks hold
        self.largest = 0.0  # norm of what was read at a frontier, at most
        self.routed: frozenset[str] = frozenset()  # parameters that may get no gradient, or got 0: those of experts without rows
        self.structure: Structure | None = None  # of its last pass
        self.tasks: set[int] = set()  # the backward passes that reached it
        self.summed: set[bool] = set()  # whether its gradients were those of a sum, whatever the run's reduction

    def factor(self, *, mean: bool) -> float:
        """What gradients are multiplied by to undo the division of a ``mean`` by the number of examples."""
        if len(self.summed) > 1:
            raise CaptureError(BESIDE)
        return self.coefficient * (self.examples if mean and True not in self.summed else 1)

    def unwatch(self) -> None:
        """Make the frontier hooks forget the nodes of their graph (a reference cycle); from then on they refuse gradients."""
        for forget in self.watched:
            forget()
        self.bare, self.watched = {}, []


class Batches:
    """The physical batches between two collects: announced, entered by passes, and cleared together."""

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True, dtype=torch.float32)
        self.silent = 0
        self.deaf = False  # gradients that come back belong to a proof
        self.rounded = False  # gradients or inputs came in half precision
        self.summing = False  # gradients that come back are those of a sum
        self.vouched = False  # the user vouches for calls that no proof has seen
        self.most: int | None = None  # a public number of examples of a step, if one is needed
        self.calls: list[Call] | None = None  # of the running pass through the model
        self.dim: int | Callable[[], int | None] | None = int  # of the examples; 0 if nobody says it
        self.before_batch: Callable[[], None] | None = None
        self.batches: list[Batch] = []
        self.clear()

    def clear(self, *, announced: bool = True) -> None:
        """Forget all passes and, unless ``announced`` is False, what was announced about the next one."""
        for batch in self.batches:
            batch.calls, batch.faint = [], {}  # calls refer to their batch: the cycle would keep the norms alive until collected
            if batch.watched:
                batch.unwatch()
        self.batches = []
        self.current: Batch | None = None
        self.fresh = True  # the next forward begins a batch
        if not announced:
            return
        self.failure: str | None = None
        self.sizes: set[tuple[Any, ...]] = set()  # of an example in each input, of passes over the batch
        self.aside: str | None = None  # why a pass is not part of the batch: an evaluation
        self.leaks: set[str] = set()  # parameters whose gradient bypassed the capture
        self.coming: tuple[int | None, Tensor | None, int] = (None, None, 0)  # the next batch's examples, units and padding
        self._probe: int | None = None
        self._probes, self._coefficient = 0, 1.0

    def quiet(self, work: Callable[[], T]) -> T:
        """Run a rule's work: nothing inside is captured, or cast to a lower precision."""
        self.silent += 1
        try:
            if is_autocast():
                with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    return work()
            return work()
        except CaptureError as error:
            self.failure = str(error)  # an error inside backward may be swallowed
            raise
        finally:
            self.silent -= 1

    def announce(self, examples: int | None = None, units: Tensor | None = None) -> None:
        """Set what is known about the next physical batch; the next forward begins it."""
        n, ids, padding = self.coming
        self.coming, self.fresh = (n if examples is None else examples, ids if units is None else units, padding), True

    def expected(self) -> tuple[int | None, bool]:
        """How many examples the next pass holds, if announced; and whether it is a further pass over a batch that is still open."""
        batch = self.current
        if batch is None or self.fresh or (batch.tasks and backward_task() not in batch.tasks):
            examples, units, _ = self.coming
            return examples if examples is not None or units is None else len(units), False
        return batch.examples if batch.announced else None, True

    def enter(self, examples: int) -> Batch:
        """The batch of a pass over this many examples: the open one, whose backward is still to come, or a new one."""
        batch, task = self.current, backward_task()
        if batch is not None and not self.fresh:
            # An open batch without backward and with another number of examples was an evaluation with gradients enabled.
            is_open = task in batch.tasks if batch.tasks else batch.announced or examples == batch.examples
            if is_open:
                return batch
        if self.before_batch is not None and self.batches:
            self.before_batch()
        (count, units, padding), self.coming = self.coming, (None, None, 0)
        count = len(units) if count is None and units is not None else count
        batch = Batch(count, units, self._probe, self._coefficient)
        batch.padding = padding
        if batch.examples < 0:
            batch.examples = examples
        if task != -1:  # activation checkpointing runs the forward inside the backward
            batch.tasks.add(task)
        self.current, self.fresh = batch, False
        for before in self.batches:
            if before.watched and not before.calls:  # no gradient came back: a later one is refused
                before.unwatch()
        self.batches = [*(b for b in self.batches if b.calls), batch] if self.batches else [batch]
        return batch


class Collecting(Grouping):
    """The part of a capture that every step runs."""

    def examples(
        self, count: int, *, padding: int = 0, dim: int | Callable[[], int | None] | None = None, usual: int | None = None
    ) -> None:
        """Announce that the next physical batch has ``count`` examples, the last ``padding`` of which are only padding.

        Args:
            count: the number of examples.
            padding: how many at the end do not count.
            dim: the dimension of the inputs that holds the examples (or a function that returns it), if two have that size.
            usual: a public typical number of examples, by which formulas are chosen. Formulas round differently, so a choice by
                ``count`` would let one record change the rounding of all others.
        """
        self._root.announces, tape = True, self._tape
        tape.dim, tape.most = dim, self._most if usual is None else usual
        if type(count) is not int or type(padding) is not int or count < 0 or padding < 0:
            count, padding = _check.integer(0, count=count), _check.integer(0, padding=padding)
        tape.coming, tape.fresh = (count, tape.coming[1], padding), True

    def discard(self) -> None:
        """Forget everything since the last collect."""
        if self._root.running or self._tape.calls is not None:
            self._root.reset()
        if any(map(_switched_off, self._sites)) and not self._root.proving:
            for site in self._sites:
                site.restore()
        self._tape.clear()
        self._folded, self._folded_units = None, set()

    rounded = property(attrgetter("_tape.rounded"), doc="Whether gradients, or inputs of layers, have come in half precision.")

    def collect(self, clipper: Clipper, *, out: Mapping[str, Tensor] | None = None, scale: float = 1.0) -> ClippedSum:
        """Clip, add up and clear: ``raw_sums[name]`` = scale * sum_i w_i G_i, added to ``out[name]`` in place where that is given.

        Without a backward since the last collect the sum is empty: zeros (or ``out`` as it was), and no norms.

        Args:
            clipper: turns norms into weights.
            out: tensors to add the sums to, by parameter; with a certificate, each sum when it is complete, rounded once.
            scale: what the sums are multiplied by.
        """
        before = torch.is_grad_enabled()
        try:
            set_grad(False)  # inside the try: an interrupt must not leave it off
            for total in self._blank.values():
                total.tensor = None  # here: an interrupt at the end of another step may have left one
            sums = self._sums(out or {}) if out or self._by_rows else self._blank
            parts = self._reduced(clipper, sums, scale)
            if len(parts) == 1 and self._folded is None and parts[0].counted is None:
                made = {}
                for name, total in sums.items():
                    made[name] = total.tensor if total.tensor is not None and type(total) is Sum else total.done
                return ClippedSum(made, *parts[0][:3])
            return self._joined(clipper, sums, parts, scale)
        finally:
            set_grad(before)
            self.discard()
            for total in self._blank.values():
                total.tensor = None

    def _sums(self, out: Mapping[str, Tensor]) -> dict[str, Sum]:
        whole = Sum if self._certificate is None else RoundedSum  # of what is in ``out``
        sums = {}
        for name, like in self._likes.items():
            kind = RowSum if name in self._by_rows else whole if name in out else Sum
            sums[name] = kind(like, self._dtypes[name], out.get(name))
        return sums

    def _added(self, clipper: Clipper, sums: dict[str, Sum], scale: float) -> list[Part]:
        scales = None if self.scales is None else self.scales()
        if clipper is not self._grouped[0]:
            self._grouped = clipper, clipper.groups(list(sums)) is not None
        for batch in self._tape.batches:
            if batch.faint:
                self._tape.quiet(partial(read_by_rows, batch))
        plain = self._certificate is None and scales is None and not self._grouped[1]
        usual = self._usual() if plain else None
        part = None if usual is None else self._tape.quiet(partial(self._add_usual, usual, clipper, sums, scale))
        return self._added_apart(clipper, sums, scale, scales) if part is None else [part]

    def _usual(self) -> Batch | None:
        """The batch, if this is an ordinary step: one backward pass, each module called once, and nothing to refuse."""
        tape = self._tape
        if tape.failure or tape.leaks or len(tape.batches) != 1 or self._tied:
            return None
        calls = (batch := tape.batches[0]).calls
        if (
            len(batch.tasks) != 1
            or batch.units is not None
            or len(calls) != self._usual_calls
            or (len(calls) > 1 and len({*map(_site, calls)}) < len(calls))  # a module was called twice
            or not self._covered.isdisjoint(batch.bare)
        ):
            return None
        if not all(map(_requires_grad, self._params.values())) or any(map(_requires_grad, map(_second, self._frozen))):
            return None
        held, versions = list[Any](), list[int]()  # of inputs that are still needed
        for call in calls:
            if call.index is not None or (record := call.record) is None:
                return None
            if record.grads:
                held += (*record.args, *record.kwargs.values()) if record.kwargs else record.args
                versions += call.versions
        return batch if versions == versions_of(tuple(held), {}) else None

    def _add_usual(self, batch: Batch, clipper: Clipper, sums: dict[str, Sum], scale: float) -> Part | None:
        """As :func:`add_clipped` for an ordinary step clipped as a whole; None if some example has a non-finite norm or is heavy.

        In that case nothing has been added yet, and the norms are kept.
        """
        calls, factor = batch.calls, batch.factor(mean=self.loss_reduction == "mean") / self._copies
        counted = batch.examples - batch.padding if batch.padding or self._fixed is not None else None  # None: all take part
        if not calls[0].site.params[0].is_cpu:
            return Part(*summed_on_device(calls, factor, clipper, sums, scale, counted))
        rows: list[Tensor] = []
        masses: list[Mass] = []
        for call in calls:
            rows += (call.sq_norms or call.measure()).values()
            if call.record.masses:  # type: ignore[union-attr]
                masses += call.record.masses.values()  # type: ignore[union-attr]
        dtype = calls[0].site.dtype
        norms, weights, finite = clipped(clipper, rows, factor * factor, dtype)
        if not finite or (masses and not is_light(masses, weights * factor, clipper)):
            return None
        if counted is not None:
            weights[counted:] = 0
        scaled = weights if factor * scale == 1 else weights * (factor * scale)
        for call in calls:
            record, site = call.record, call.site
            assert record is not None
            by = scaled if dtype is site.dtype else scaled.to(site.dtype)
            out = dict(zip(site.full, map(sums.__getitem__, site.full.values()), strict=True))
            call.rule.add_weighted(record, dict.fromkeys(site.names, by), out)
            call.record = None  # what it holds is freed before the next sum is made
        return Part(norms, weights, 0) if counted is None else Part(norms[:counted], weights[:counted], 0)
