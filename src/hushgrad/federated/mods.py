"""A client mod that clips the update before it leaves the device. This is defence in depth; the server clips again in any case.

The server cannot switch a mod off: what a mod cannot bound is not sent. The client decides how much the server may ask for, in the
node's own configuration (``flower-supernode --node-config "hushgrad-clip-norm=1.0 hushgrad-share=0.1"``): there :data:`CLIP_NORM` is the
largest clip norm, and :data:`SHARE` the least standard deviation of a share, in clip norms. A message that asks for more is answered
without arrays. A client without these limits believes the server's numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from hushgrad import _check
from hushgrad.federated.layout import Layout
from hushgrad.federated.wire import Unusable

CLIP_NORM = "hushgrad-clip-norm"
"""The key in the round's ConfigRecord under which the server sends the clip norm; in a node's configuration, the largest one."""
SHARE = "hushgrad-share"
"""The key in a node's configuration of the least standard deviation of a share of noise, in clip norms."""


def clip_update(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Scale what the client sends back to norm at most the server's clip norm: ``ClientApp(mods=[clip_update])``.

    **Formal guarantee.** Nothing relies on it: a server trusts no client, and clips again. It bounds what an eavesdropper or
    a leaky log sees of one device, and does not send a diverged model (NaN, infinity): that update is zero.

    Put it first in the list: Flower's first mod is the outermost, and sees what others have made of the update.
    Arrays in the reply to a message without a clip norm (evaluation, another strategy) or with one above the node's own limit, and
    arrays that cannot be read as an update, are taken out; numbers and metrics pass.

    Args:
        message: from the server; it holds the clip norm.
        context: of the client, as Flower hands it over.
        call_next: the rest of the client.
    """
    norms = told(message, CLIP_NORM)
    if norms is None or norms[0] > own_limit(context, CLIP_NORM, math.inf):
        return without_arrays(call_next(message, context))
    answer = answered(message, context, call_next)
    if answer.update is None:
        return without_arrays(answer.reply)
    reply, update = answer.reply, answer.update
    norm = float(np.linalg.norm(update))
    scaled = update * min(1.0, norms[0] / norm) if np.isfinite(norm) and norm > 0 else np.zeros_like(update)
    (name,) = reply.content.array_records
    reply.content[name] = answer.layout.record(answer.sent + scaled)
    return reply


def told(message: Message, *names: str) -> tuple[float, ...] | None:
    """The positive numbers that the server sends under ``names``, in one record with a model; None if there are none."""
    config = next((c for c in message.content.config_records.values() if set(names) <= set(c)), None)
    if config is None or not message.content.array_records:
        return None
    values = [config[name] for name in names]
    numbers = tuple(float(value) for value in values if isinstance(value, int | float))
    return numbers if len(numbers) == len(names) and all(0 < number < math.inf for number in numbers) else None


def own_limit(context: Context, name: str, default: float) -> float:
    """The client's own limit ``name`` from its node configuration, otherwise ``default``.

    Raises:
        ArgumentError: where it says something that is no positive number; then nothing leaves.
    """
    found = context.node_config.get(name)
    return (
        default
        if found is None
        else _check.positive("Set a number in the node's configuration.", **{name.replace("-", "_"): found})
    )


def without_arrays(reply: Message) -> Message:
    """The reply without its arrays: the server counts the client as one that sent nothing usable."""
    for name in [] if reply.has_error() else list(reply.content.array_records):
        del reply.content[name]
    return reply


class Answer(NamedTuple):
    """A client's answer to a message: its reply, the layout of the arrays that were sent, the arrays, and its update."""

    reply: Message
    layout: Layout
    sent: np.ndarray
    update: np.ndarray | None  # None if the client has failed, or its reply cannot be read


def answered(message: Message, context: Context, call_next: ClientAppCallable) -> Answer:
    """Run the rest of the client on a message that holds arrays, and read its update."""
    arrays = next(iter(message.content.array_records.values()))
    layout = Layout.of(arrays)
    sent = layout.flat(arrays)  # before the client's code runs: it may change the arrays in place
    reply = call_next(message, context)
    update = np.empty_like(sent)
    try:
        if not reply.has_error():
            layout.read_update(reply.content, sent, update)
            return Answer(reply, layout, sent, update)
    except Unusable:
        pass
    return Answer(reply, layout, sent, None)
