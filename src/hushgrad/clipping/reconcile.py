"""Reasons to refuse a step, checked after its passes and before its noise is drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from hushgrad.clipping.record import versions_of

if TYPE_CHECKING:
    from hushgrad.clipping.collecting import Batch
    from hushgrad.clipping.site import Call
    from hushgrad.clipping.tape import Tape

Params = Mapping[str, nn.Parameter]


REPLACED = (
    "The model's parameters are not those that were made private: one was replaced, by those of another layer, a parametrization or "
    "pruning. Detach, change the model, and call make_private again."
)


def is_replaced(model: nn.Module, params: Params) -> bool:
    """Whether a captured parameter is none of the model's any more; torch tells nobody of what is put into a module's dictionaries."""
    now = dict(model.named_parameters(remove_duplicate=False))
    return any(now.get(name) is not p for name, p in params.items())


def problem_of(tape: Tape, params: Params, frozen: Sequence[tuple[str, nn.Parameter]], *, require_all: bool) -> str | None:
    """Why the passes so far cannot be clipped, with the remedy; None if they can."""
    return (
        tape.failure
        or _leaked(tape)
        or _changed(params, frozen)
        or (_unseen(tape, params) if require_all else None)
        or _ambiguous(tape)
        or next((call.stale_message() for batch in tape.batches for call in batch.calls if _is_stale(call)), None)
    )


def _is_stale(call: Call) -> bool:
    """Whether an input that is still needed was changed in place since the gradient came back."""
    record = call.record
    return record is not None and bool(record.grads) and call.versions != versions_of(record.args, record.kwargs)


def _leaked(tape: Tape) -> str | None:
    if not tape.leaks:
        return None
    return (
        f"{_list(tape.leaks)} got a gradient that does not come through the outputs of model(x), so it cannot be told whose it is. Use "
        "parameters inside of the model only (with fully_shard inside of their own layers; a penalty on them is the optimizer's "
        "weight_decay), and its outputs in the loss."
    )


def _changed(params: Params, frozen: Sequence[tuple[str, nn.Parameter]]) -> str | None:
    changed = [name for name, p in params.items() if not p.requires_grad]
    changed += [name for name, p in frozen if p.requires_grad]
    if not changed:
        return None
    return f"requires_grad of {_list(changed)} has changed since the capture was attached. Detach and attach it again."


def _unseen(tape: Tape, params: Params) -> str | None:
    passes = [batch for batch in tape.batches if batch.calls and batch.examples]
    for missing in (_missing(batch, params) for batch in passes):
        if missing and not _missing(passes[-1], params):  # a later pass reached all: it may be the same one, repeated
            return (
                f"{_list(missing)} got no gradient in a pass before the last one. If that pass was interrupted (Ctrl-C), ask for a new "
                "private.loader(), which deals this batch again; otherwise freeze what the loss does not use (requires_grad_(False)), or "
                'say unused="zero".'
            )
        if missing:
            return (
                f"{_list(missing)} got no gradient in this pass. Freeze what the loss does not use (requires_grad_(False)), or say "
                'make_private(..., unused="zero"); after an interrupted pass (Ctrl-C), ask for a new private.loader().'
            )
    return None


def _missing(batch: Batch, params: Params) -> Collection[str]:
    return params.keys() - {name for call in batch.calls for name in call.site.full.values()} - batch.routed


def _ambiguous(tape: Tape) -> str | None:
    """Two calls of a module that were reached by different backward passes may hold different examples."""
    for batch in tape.batches:
        if len(batch.tasks) < 2:
            continue
        first: dict[str, set[int]] = {}
        for call in batch.calls:
            for name in call.site.full.values():
                if not first.setdefault(name, set(call.tasks)) & set(call.tasks):
                    return (
                        f"{name} was used in two forwards that were differentiated by separate backward passes. Run backward "
                        "after each forward (micro-batches), or add the losses and run one backward (the same examples)."
                    )
    return None


def _list(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
