"""What every step walks through: a batch is announced, and from its passes comes a clipped sum.

A small model's step is mostly Python, so a usual step has a short way of its own: one backward pass, each module called once, nothing to
be refused. What is rarer is in :mod:`hushgrad.clipping.grouping`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from hushgrad import _check
from hushgrad.clipping._torch import set_grad
from hushgrad.clipping.base import ClippedSum
from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.grouping import Grouping
from hushgrad.clipping.heavy import is_light
from hushgrad.clipping.mass import Mass
from hushgrad.clipping.preconditioned import precondition
from hushgrad.clipping.reduce import Part, add_clipped
from hushgrad.clipping.sums import RoundedSum, RowSum, Sum
from hushgrad.clipping.tape import Batch
from hushgrad.clipping.there import summed_there

__all__ = ["Collecting"]

_site, _requires_grad = attrgetter("site"), attrgetter("requires_grad")


class Collecting(Grouping):
    """The part of a capture that every step walks through."""

    # A batch begins ------------------------------------------------------------------------------------------------------

    def examples(
        self, count: int, *, padding: int = 0, dim: int | Callable[[], int | None] | None = None, usual: int | None = None
    ) -> None:
        """The next physical batch has ``count`` examples, of which the last ``padding`` fill it up and do not count.

        Args:
            count: of examples.
            padding: examples at the end that do not count.
            dim: the dimension of the inputs that holds the examples (or a function that tells it); asked for only where two
                dimensions are both as long as the batch.
            usual: a public number of examples of such a batch, by which formulas are chosen. They round otherwise, so that a choice by
                ``count`` lets one record more or less move all others.
        """
        self._root.announces = True
        self._tape.dim = dim
        self._tape.most = self._most if usual is None else usual
        if type(count) is not int or type(padding) is not int or count < 0 or padding < 0:
            count, padding = _check.integer(0, count=count), _check.integer(0, padding=padding)
        self._tape.announce(examples=count, padding=padding)

    def discard(self) -> None:
        """Forget everything since the last collect."""
        if self._root.running:
            self._root.reset()
        self._tape.clear()
        self._folded, self._folded_units = None, set()

    @property
    def rounded(self) -> bool:
        """Whether gradients, or inputs of layers, came in half precision so far."""
        return self._tape.rounded

    # It ends -------------------------------------------------------------------------------------------------------------

    def collect(self, clipper: Clipper, *, out: Mapping[str, Tensor] | None = None, scale: float = 1.0) -> ClippedSum:
        """Clip, add up and clear: ``raw_sums[name]`` = scale * sum_i w_i G_i, added to ``out[name]`` in place where that is given.

        Without a backward since the last collect the sum is empty: zeros (or ``out`` as it was), and no norms.

        Args:
            clipper: turns norms into weights.
            out: tensors to add the sums to, by parameter; with a certificate, each sum when it is complete, rounded once.
            scale: what the sums are multiplied by.
        """
        before = torch.is_grad_enabled()
        set_grad(False)
        try:
            sums = self._sums(out or {})
            parts = self._reduced(clipper, sums, scale)
            if len(parts) == 1 and self._folded is None and parts[0].counted is None:
                raw_sums = {}
                for name, total in sums.items():
                    raw_sums[name] = total.tensor if total.tensor is not None and type(total) is Sum else total.done
                return ClippedSum(raw_sums, *parts[0][:3])
            return self._joined(clipper, sums, parts, scale)
        finally:
            set_grad(before)
            self.discard()

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
            part = self._tape.quiet(partial(self._add_usual, usual, clipper, sums, scale))
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
        if not all(map(_requires_grad, self._params.values())) or (
            self._frozen and any(p.requires_grad for _, p in self._frozen)
        ):
            return None
        for call in calls:
            if call.index is not None or call.stale():
                return None
        return batch

    def _add_usual(self, batch: Batch, clipper: Clipper, sums: dict[str, Sum], scale: float) -> Part | None:
        """As :func:`add_clipped`, of a usual step that is clipped as a whole; None if an example is not usual.

        That is one whose norm is not finite, or a heavy one. Then nothing was added yet, and the norms are remembered. Short, because a
        small model's step is mostly Python.
        """
        calls, factor = batch.calls, batch.factor(mean=self.loss_reduction == "mean") / self._copies
        counted = batch.examples - batch.padding if batch.padding or self._fixed is not None else None  # None: all take part
        if not calls[0].site.params[0].is_cpu:
            return Part(*summed_there(calls, factor, clipper, sums, scale, counted))
        rows: list[Tensor] = []
        masses: list[Mass] = []
        for call in calls:
            rows += (call.sq_norms or call.measure()).values()
            if call.record.masses:  # type: ignore[union-attr]
                masses += call.record.masses.values()  # type: ignore[union-attr]
        dtype = calls[0].site.dtype
        norms, weights, finite = clipper.clip(rows, factor * factor, dtype)
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
            record.clear()
        return Part(norms, weights, 0) if counted is None else Part(norms[:counted], weights[:counted], 0)
