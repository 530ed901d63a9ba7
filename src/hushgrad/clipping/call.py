"""One call of a captured module: its record, from the gradients that come back to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten

from hushgrad.clipping._torch import backward_task
from hushgrad.clipping.base import Record, Rule
from hushgrad.clipping.costs import ROUNDING, seal_of
from hushgrad.clipping.layout import NOBODY, Kind, gathered, padded
from hushgrad.clipping.proof.structure import DROPPED, NATIVE, WHOLE, Place
from hushgrad.clipping.rules.experts import Experts, Routed
from hushgrad.clipping.rules.parameter import Bare, Nothing, Whole, finite
from hushgrad.clipping.scaled import scaled_tasks

if TYPE_CHECKING:
    from hushgrad.clipping.site import Site
    from hushgrad.clipping.tape import Batch

__all__ = ["Call"]


class Call:
    """One call of a captured module; it becomes part of its batch when a gradient comes back to it.

    ``place`` says where its examples are (None: not proved); ``rows`` the example of each row, where that follows no rule, and ``index``
    that of each row which its rule takes for an example.
    """

    __slots__ = (
        "args", "batch", "edges", "index", "kwargs", "memory", "place", "record", "rows", "rule", "shapes", "site", "sq_norms", "tasks",
        "totals", "versions",
    )  # fmt: skip

    def __init__(self, site: Site, batch: Batch, args: tuple[Any, ...], kwargs: Mapping[str, Any], memory: Any) -> None:
        self.site, self.batch, self.args, self.kwargs, self.memory = site, batch, args, kwargs, memory
        self.rule: Rule = site.rule
        self.versions = _versions(args, kwargs)
        self.place: Place | None = None
        self.index: Tensor | None = None
        self.rows: Tensor | None = None
        self.shapes: list[torch.Size] = []
        self.edges: Sequence[GradientEdge | None] = ()
        self.record: Record | None = None
        self.sq_norms: dict[str, Tensor] | None = None
        self.tasks: list[int] = []
        self.totals: dict[int, Tensor] = {}  # of shared outputs, what came back from all examples together

    # Gradients come back -------------------------------------------------------------------------------------------------

    def arrive(self, *grads: Tensor | None) -> None:
        """Hook of the layer's outputs: a gradient, or None, for each."""
        tape, place = self.site.tape, self.place
        if tape.deaf:
            return
        if place is NATIVE:
            self._add(grads)
            if self.rule.hot:
                tape.quiet(self.prepare)
        elif place is WHOLE:
            for k, g in enumerate(grads):
                if g is not None:
                    self.take(k, g.unsqueeze(0))
        elif place is DROPPED:
            self._add_nothing()
        elif place is None:
            tape.unproved(self)
        elif place.layout.kind is Kind.DEAD:
            if any(g is not None and bool(g.any()) for g in grads):
                tape.unproved(self)
        elif place.layout.kind is Kind.SHARED:  # shares come from the frontier
            for k, g in enumerate(grads):
                self.require_all(k, g)
        else:
            self._add_placed(place, self.site.ready(grads))
            if self.rule.hot:
                tape.quiet(self.prepare)

    def take(self, output: int, share: Tensor | Routed, gross: float = 0.0) -> None:
        """Each example's share of the gradient of one output: (B, *its shape); ``gross``, the size of what cancelled in it."""
        if isinstance(share, Routed):
            if self.record is None:
                self._take_routed(share)
                return
            share = share.dense
        self._form_shares()
        own: Tensor = self.site.ready((share.detach(),))[0]
        if self.shapes:  # of a view, the gradient of what it is a view of was read
            own = own.reshape(len(own), *self.shapes[output])
        self.batch.largest = max(self.batch.largest, float(own.norm()), gross)
        grads: list[Tensor | None] = [None] * max(len(self.shapes), output + 1)
        grads[output] = own
        if self.rule.positions:
            x = None if self.record is not None else finite(_first(self.args, self.kwargs))
            self._add(tuple(grads), None if x is None else x.unsqueeze(0).expand(len(own), *x.shape))
            return
        if not isinstance(self.rule, Bare):
            self.rule = Whole()
        self._add(tuple(grads))

    def _take_routed(self, share: Routed) -> None:
        """The rows that an expert's shares are made of stand for them, as long as nothing else comes."""
        left, right = self.site.ready((share.left.detach(), share.right.detach()))
        self.args, self.rule = (share._replace(left=left, right=right),), Experts()
        self.versions = _versions(self.args, {})
        self._add((left,))
        total = self.site.tape.quiet(self.prepare)[self.site.names[0]].sum()
        self.batch.largest = max(self.batch.largest, float(total.sqrt()) * share.examples**0.5)

    def _form_shares(self) -> None:
        """Make the shares of which only the rows are there."""
        record = self.record
        if record is not None and isinstance(self.rule, Experts):
            record.grads, record.args = (self.rule.per_example(record)[self.site.names[0]],), ()
            record.masses, self.sq_norms, self.rule, self.versions = {}, None, Bare(), []

    def require_all(self, output: int, g: Tensor | None) -> None:
        """The shares are all that came back: what the model's outputs do not know of (something that it keeps) has no owner."""
        if g is None:
            return
        self.totals[output] = self.totals[output] + g.detach() if output in self.totals else g.detach()
        total = self.site.ready((self.totals[output],))[0]
        missing = scale = total.norm()
        structure = self.batch.structure
        dtypes = {g.dtype} | (structure.precisions if structure is not None else set())  # float32 inside a float64 model
        if self.record is not None and isinstance(self.rule, Experts):
            if bool(10 * self.record.args[0].missing(total) <= seal_of(dtypes) * scale):  # what probes see may be a tenth of it
                return
            self._form_shares()
        shares = None if self.record is None or output >= len(self.record.grads) else self.record.grads[output]
        if shares is not None:
            missing = (shares.sum(0) - total.reshape(shares.shape[1:])).norm()
        rounding = (
            ROUNDING * max(torch.finfo(dtype).eps for dtype in dtypes) * self.batch.largest
        )  # all there is, of a gradient of 0
        if shares is not None and bool(missing > seal_of(dtypes) * scale + rounding):
            scale = shares.abs().sum(0).norm()  # larger, where shares cancel
        if bool(missing > seal_of(dtypes) * scale + rounding):
            self.site.tape.fail(
                f"A gradient came back to {self.site.path or 'the model'} that does not come through the outputs of model(x), so it cannot "
                "be told whose it is. Use the model's outputs alone in the loss: return what the model keeps beside them, or detach it."
            )

    def _add_placed(self, place: Place, grads: tuple[Tensor | None, ...]) -> None:
        """Bring x and g into the form that the rule reads: the examples first; or note whose row it is."""
        B, layout, g = self.batch.examples, place.layout, grads[0]
        assert g is not None
        if layout.regular:
            layout = layout.at(g.shape, B)
        else:
            self.index = _rows(self.rows)
            if bool(g[self.index == NOBODY].any()):
                self.site.tape.unproved(self)
        x = None if self.record is not None else _first(self.args, self.kwargs)
        if not self.rule.positions:
            self._add_rows(_rows(layout.numbers(B).to(g.device) if layout.regular else self.rows), g, x)
            return
        if layout.regular:
            self._add((layout.first(g, B),), None if x is None else layout.first(x, B))
            return
        where = padded(_rows(self.rows), B)
        self._add((gathered(g, where),), None if x is None else gathered(x, where))

    def _add_rows(self, index: Tensor, g: Tensor, x: Tensor | None) -> None:
        """Rows as the rule's examples, of which the index says whose they are; those of nobody are left out."""
        own = index >= 0
        if bool(own.all()):
            self.index = index
            self._add((g,))
            return
        self.index = index[own]
        self._add((g[own],), None if x is None else x[own])

    def _add_nothing(self) -> None:
        if self.record is None:
            self.rule = Nothing()
            self._add((None,) * max(1, len(self.shapes)))
            assert self.record is not None
            params = zip(self.site.names, self.site.params, strict=True)
            self.record.kept = {name: p.detach().new_zeros((0, *p.shape), dtype=self.site.dtype) for name, p in params}
            self.sq_norms = {name: kept.new_zeros(0) for name, kept in self.record.kept.items()}
            self.record.release()

    def _add(self, grads: tuple[Tensor | None, ...], x: Tensor | None = None) -> None:
        """Open the record, with ``x`` in the place of the input; or add a second loss over the same pass."""
        site, batch = self.site, self.batch
        tape, task = site.tape, backward_task()
        if batch is not tape.current or task in scaled_tasks or torch.is_grad_enabled():
            tape.refuse_arrival(self)
        batch.tasks.add(task)
        batch.summed.add(tape.summing)
        self.tasks.append(task)
        args, kwargs = (self.args, self.kwargs) if x is None else ((x,), {})
        given = (*args, *grads)
        ready = site.ready(given)
        if ready is not given:
            args, grads = ready[: len(args)], ready[len(args) :]
        if self.record is not None:
            self._add_again(self.record, grads)
            return
        if self.versions != _versions(self.args, self.kwargs):
            tape.fail(self.stale_message())
        if kwargs:
            kwargs = dict(zip(kwargs, site.ready(tuple(kwargs.values())), strict=True))
        if kwargs or args is not self.args:
            self.versions = _versions(args, kwargs)
        self.record = Record(site.module, site.names, args, kwargs, grads, self.memory, tape.most)
        self.args, self.kwargs = (), {}
        batch.calls.append(self)

    def _add_again(self, record: Record, grads: tuple[Tensor | None, ...]) -> None:
        if not record.grads:
            self.site.tape.fail(
                f"A second backward came back to {self.site.path or 'the model'}, whose input is already released. Add the "
                "losses and run one backward."
            )
        # Per-example gradients are linear in g.
        record.grads = tuple(_plus(a, b) for a, b in zip(record.grads, grads, strict=True))
        record.kept, record.pieces, record.masses, self.sq_norms = {}, {}, {}, None

    # What reduce asks ----------------------------------------------------------------------------------------------------

    @property
    def examples(self) -> int:
        """Rows that the rule takes for examples."""
        return self.batch.examples if self.index is None or self.rule.positions else len(self.index)

    def units(self, units: Tensor | None) -> Tensor | None:
        """The privacy unit of each row, from those of the examples (None: each its own)."""
        if self.index is None or self.rule.positions:
            return units
        return self.index if units is None else units.to(self.index.device)[self.index]

    def stale(self) -> bool:
        """Whether an input that is still needed was changed in place since the gradient came back."""
        record = self.record
        return record is not None and bool(record.grads) and self.versions != _versions(record.args, record.kwargs)

    def stale_message(self) -> str:
        """What to say then."""
        path = self.site.path or "the model"
        return f"The input of {path} was changed in place after the module had used it. Write the operation out of place."

    def prepare(self) -> dict[str, Tensor]:
        """The squared norms by local name, on a device perhaps not all; what is no longer needed is released."""
        if self.sq_norms is None:
            record = self.record
            assert record is not None
            self.sq_norms = self.rule.sq_norms(record)
            if (record.kept or record.pieces) and record.complete:
                record.release()
        return self.sq_norms

    def measure(self) -> dict[str, Tensor]:
        """The squared norms of all parameters by local name."""
        made = self.prepare()
        if len(made) < len(self.site.names):
            assert self.record is not None
            missing = [name for name in self.site.names if name not in made]
            made = self.sq_norms = made | self.rule.rest(self.record, missing)
        return made


def _versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """How often each input tensor was changed in place (tensors made in inference mode do not count)."""
    found = []  # not a comprehension: it is one more call, of which a step has many
    for v in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(v, Tensor):
            if not v.is_inference():
                found.append(v._version)
        elif isinstance(v, (tuple, list, dict)):  # an LSTM's state, a packed sequence
            found += _versions(tuple(tree_flatten(v)[0]), {})
    return found


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a layer that has one."""
    return args[0] if args else next(iter(kwargs.values()))  # type: ignore[no-any-return]


def _rows(index: Tensor | None) -> Tensor:
    assert index is not None
    return index


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
