"""Brings gradients into the layout that a rule expects, if the examples are elsewhere: in another dimension or order, or shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hushgrad.clipping.layout import NOBODY, Kind, gathered, padded
from hushgrad.clipping.proof.structure import DROPPED, WHOLE, Place
from hushgrad.clipping.record import Record, versions_of
from hushgrad.clipping.rules.experts import Experts, Routed
from hushgrad.clipping.rules.parameter import Bare, Nothing, Whole, finite
from hushgrad.clipping.thresholds import CANCELLATION, seal_of

if TYPE_CHECKING:
    from hushgrad.clipping.collecting import Batch
    from hushgrad.clipping.site import Call


def arrive(call: Call, place: Place | None, grads: tuple[Tensor | None, ...]) -> None:
    """Take the gradients of the outputs of a call whose examples are not where its rule expects them, or unknown."""
    tape = call.site.tape
    if place is WHOLE:
        for k, g in enumerate(grads):
            if g is not None:
                take(call, k, g.unsqueeze(0))
    elif place is DROPPED:
        _add_nothing(call)
    elif place is None:
        tape.unproved(call)
    elif place.layout.kind is Kind.DEAD:
        if any(g is not None and bool(g.any()) for g in grads):
            tape.unproved(call)
        call.batch.routed |= frozenset(call.site.full.values())
    elif place.layout.kind is Kind.SHARED:  # shares come from the frontier
        for k, g in enumerate(grads):
            require_all(call, k, g)
    else:
        _add_placed(call, place, call.site.ready(grads))
        if call.rule.hot:
            tape.quiet(call.prepare)


def take(call: Call, output: int, share: Tensor | Routed, gross: float = 0.0) -> None:
    """Take each example's share of the gradient of one output: (B, *its shape); ``gross``: the size of the terms that cancelled in it."""
    if isinstance(share, Routed):
        if call.record is None:
            _take_routed(call, share)
            return
        share = share.dense
    _form_shares(call)
    if call.record is None and call.place is not None and call.place.faint:
        args, kwargs = call.site.ready(call.args), dict(zip(call.kwargs, call.site.ready((*call.kwargs.values(),)), strict=True))
        call.batch.faint[call] = args, kwargs, versions_of(args, kwargs)
    own: Tensor = call.site.ready((share.detach(),))[0]
    if call.shapes:  # for a view, the gradient of its base was read
        own = own.reshape(len(own), *call.shapes[output])
    call.batch.largest = max(call.batch.largest, float(own.norm()), gross)
    grads: list[Tensor | None] = [None] * max(len(call.shapes), output + 1)
    grads[output] = own
    if call.rule.positions:
        x = None if call.record is not None else finite(_first(call.args, call.kwargs))
        call.add(tuple(grads), None if x is None else x.unsqueeze(0).expand(len(own), *x.shape))
        return
    if not isinstance(call.rule, Bare):
        call.rule = Whole()
    call.add(tuple(grads))


def _take_routed(call: Call, share: Routed) -> None:
    """Take the rows that an expert's shares are made of, in place of the shares, as long as nothing else comes."""
    left, right = call.site.ready((share.left.detach(), share.right.detach()))
    call.args, call.rule = (share._replace(left=left, right=right),), Experts()
    call.versions = versions_of(call.args, {})
    call.add((left,))
    total = call.site.tape.quiet(call.prepare)[call.site.names[0]].sum()
    call.batch.largest = max(call.batch.largest, float(total.sqrt()) * share.examples**0.5)


def _form_shares(call: Call) -> None:
    """Form the shares for which only rows were taken."""
    record = call.record
    if record is not None and isinstance(call.rule, Experts):
        record.grads, record.args = (call.rule.per_example(record)[call.site.names[0]],), ()
        record.masses, call.sq_norms, call.rule, call.versions = {}, None, Bare(), []


def require_all(call: Call, output: int, g: Tensor | None) -> None:
    """Require that the shares add up to what came back: a gradient that bypasses the model's outputs (of a kept tensor) has no owner."""
    if g is None:
        return
    if call in call.batch.faint and not call.totals:  # in the order in which gradients arrive, as where nothing is shared
        call.batch.calls.remove(call)
        call.batch.calls.append(call)
    call.totals[output] = call.totals[output] + g.detach() if output in call.totals else g.detach()
    total = call.site.ready((call.totals[output],))[0]
    missing = scale = total.norm()
    structure = call.batch.structure
    dtypes = {g.dtype} | (structure.precisions if structure is not None else set())  # float32 inside a float64 model
    if call.record is not None and isinstance(call.rule, Experts):
        if bool(10 * call.record.args[0].missing(total) <= seal_of(dtypes) * scale):  # probes may underestimate it tenfold
            return
        _form_shares(call)
    shares = None if call.record is None or output >= len(call.record.grads) else call.record.grads[output]
    if shares is not None:
        missing = (shares.sum(0) - total.reshape(shares.shape[1:])).norm()
    rounding = (
        CANCELLATION * max(torch.finfo(dtype).eps for dtype in dtypes) * call.batch.largest
    )  # all there is, of a gradient of 0
    if shares is not None and bool(missing > seal_of(dtypes) * scale + rounding):
        scale = shares.abs().sum(0).norm()  # larger if shares cancel
    if bool(missing > seal_of(dtypes) * scale + rounding):
        call.site.tape.fail(
            f"A gradient came back to {call.site.path or 'the model'} that does not come through the outputs of model(x), so it cannot "
            "be told whose it is. Use the model's outputs alone in the loss: return what the model keeps beside them, or detach it; and "
            "leave out hooks that change gradients (register_hook, register_prehook)."
        )


def read_by_rows(batch: Batch) -> None:
    """Where a proof saw no gradient, so that shares were taken, but each example has shares of its own rows alone: read these rows.

    The result is the same but for rounding. What a proof sees may follow from one record; with this, all others' roundings do not.
    """
    given, batch.faint = batch.faint, {}
    for call, (args, kwargs, versions) in given.items():
        site, record = call.site, call.record
        if record is None or versions != versions_of(args, kwargs) or not _has_own_rows(call, record):
            continue
        totals = [call.totals.get(k) for k in range(len(record.grads))]
        grads = tuple(g if g is None else g.reshape(shape) for g, shape in zip(totals, call.shapes, strict=True))
        call.record = Record(site.module, site.names, args, kwargs, site.ready(grads), record.memory, record.most)
        call.rule, call.versions, call.sq_norms = site.rule, versions, None


def _has_own_rows(call: Call, record: Record) -> bool:
    """Whether, where the rule expects the examples, each one's share is 0 in others' rows (or no number, as 0 times infinity is)."""
    B, dims = call.batch.examples, call.site.rule.dims(call.site.module, len(call.shapes))
    for k, shares in enumerate(record.grads):
        if (shares is None) != (k not in call.totals):
            return False
        if shares is None:
            continue
        if len(shares) != B or shares.dim() < dims[k] + 2 or shares.shape[dims[k] + 1] != B:
            return False
        rows = shares.movedim(dims[k] + 1, 1)
        own = rows.diagonal().movedim(-1, 0)
        came = call.totals[k].reshape(shares.shape[1:]).movedim(dims[k], 0)
        apart = torch.eye(B, dtype=torch.bool, device=rows.device).view(B, B, *(1 for _ in rows.shape[2:]))
        if bool(rows.masked_fill(apart, 0.0).nan_to_num_(0.0, 0.0, 0.0).any()) or not bool(
            (came.isfinite() | ~own.isfinite()).all()
        ):
            return False
    return any(g is not None for g in record.grads)


def _add_placed(call: Call, place: Place, grads: tuple[Tensor | None, ...]) -> None:
    """Bring x and g into the form that the rule reads, examples first; or record the example of each row."""
    B, layout, g = call.batch.examples, place.layout, grads[0]
    assert g is not None
    if layout.regular:
        layout = layout.at(g.shape, B)
    else:
        call.index = _rows(call.rows)
        stray = g[call.index == NOBODY]
        if bool(stray.isnan().any()):
            call.site.tape.fail(
                f"A record overflows behind {call.site.path or 'the model'}: its rows get gradients that are no numbers, which do not tell "
                "whose they are. Bound the inputs (torch.nan_to_num, clamp) before they reach the model. Nothing was released."
            )
        if bool(stray.any()):
            call.site.tape.unproved(call)
    x = None if call.record is not None else _first(call.args, call.kwargs)
    if not call.rule.positions:
        _add_rows(call, _rows(layout.numbers(B).to(g.device) if layout.regular else call.rows), g, x)
        return
    if layout.regular:
        call.add((layout.first(g, B),), None if x is None else layout.first(x, B))
        return
    where = padded(_rows(call.rows), B)
    call.add((gathered(g, where),), None if x is None else gathered(x, where))


def _add_rows(call: Call, index: Tensor, g: Tensor, x: Tensor | None) -> None:
    """Treat rows as the rule's examples; the index tells whose they are, and rows without an owner are dropped."""
    own = index >= 0
    if bool(own.all()):
        call.index = index
        call.add((g,))
        return
    call.index = index[own]
    call.add((g[own],), None if x is None else x[own])


def _add_nothing(call: Call) -> None:
    if call.record is None:
        call.rule = Nothing()
        call.add((None,) * max(1, len(call.shapes)))
        assert call.record is not None
        params = zip(call.site.names, call.site.params, strict=True)
        call.record.kept = {name: p.detach().new_zeros((0, *p.shape), dtype=call.site.dtype) for name, p in params}
        call.sq_norms = {name: kept.new_zeros(0) for name, kept in call.record.kept.items()}
        call.record.release()


def add_again(call: Call, record: Record, grads: tuple[Tensor | None, ...]) -> None:
    """A second loss over the same pass."""
    if not record.grads:
        call.site.tape.fail(
            f"A second backward came back to {call.site.path or 'the model'}, whose input is already released. Add the "
            "losses and run one backward."
        )
    # Per-example gradients are linear in g.
    record.grads = tuple(_plus(a, b) for a, b in zip(record.grads, grads, strict=True))
    record.kept, record.pieces, record.masses, call.sq_norms = {}, {}, {}, None


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a layer with a single one."""
    return args[0] if args else next(iter(kwargs.values()))  # type: ignore[no-any-return]


def _rows(index: Tensor | None) -> Tensor:
    assert index is not None
    return index


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
