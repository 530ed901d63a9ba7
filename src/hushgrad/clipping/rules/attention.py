"""``nn.MultiheadAttention``: input projections, masked attention, output projection.

The layer passes its parameters to a function instead of calling its ``out_proj``, so one rule covers all of them. The attention is
run again from the projected queries, keys and values; with the gradients there every parameter is that of a linear layer:
G_i(W_q) = sum_t dq_t query_t^T, and so on. ``bias_k`` and ``bias_v`` are one more key and value, so their gradient is that row's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad.clipping.base import Example, Record, rule
from hushgrad.clipping.rules.input_checks import is_strided
from hushgrad.clipping.rules.outer import Block, OuterProducts, Terms
from hushgrad.errors import CaptureError

_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)
_IN = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")


@rule(nn.MultiheadAttention)
class Attention(OuterProducts):
    """Rerunning the attention once gives the gradients at its projections; the rest are outer products."""

    parameters = frozenset(_IN)
    subtree = True  # it uses out_proj's parameters without calling out_proj

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """Queries and keys of different lengths."""
        return (
            (nn.MultiheadAttention(4, 2, batch_first=True), (torch.randn(5, 3, 4), torch.randn(5, 6, 4), torch.randn(5, 6, 4))),
        )

    def check(self, module: nn.Module) -> str | None:
        """Dropout of attention weights can be repeated on a CPU only; a replaced ``out_proj`` computes something else."""
        assert isinstance(module, nn.MultiheadAttention)
        if module.dropout > 0 and module.out_proj.weight.device.type != "cpu":
            return (
                "its dropout of attention weights is drawn inside a fused kernel and cannot be repeated. Set its attribute "
                "dropout = 0.0 (nn.Dropout elsewhere in the model may stay)"
            )
        others = {name for name, p in module.named_parameters() if p.requires_grad} - {*_IN, "out_proj.weight", "out_proj.bias"}
        return f"its {min(others)} is not a parameter of torch's own layer. Leave out_proj as it is" if others else None

    def folds(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """For a strided input with time first."""
        layer: Any = module
        asked = partial(is_strided, bias=layer.in_proj_bias is not None, turned=layer.batch_first)
        return any(map(asked, (*args, *kwargs.values())))

    def remember(self, module: nn.Module) -> Any:
        """The random state before the call, from which the same dropout can be drawn again."""
        layer: Any = module
        return torch.get_rng_state() if layer.training and layer.dropout > 0 else None

    def dims(self, module: nn.Module, outputs: int) -> tuple[int, ...]:
        """The second, unless ``batch_first``; for the attention weights always the first."""
        layer: Any = module
        return (0 if layer.batch_first else 1, *(0,) * (outputs - 1))

    def solve(self, record: Record) -> Terms:
        """Differentiate the attention with respect to its projected inputs."""
        call = _read(record)
        layer = _Layer(record.module, call.query.dtype)
        inputs = (call.query, call.key, call.value)
        q, k, v = (F.linear(x, W, b).requires_grad_() for x, W, b in zip(inputs, layer.weights, layer.biases, strict=True))
        k_all, v_all = layer.extended(k, v)
        context, attention = _attend(layer, call, q, k_all, v_all)
        outputs = (F.linear(context, layer.out_weight, layer.out_bias), attention.mean(1) if call.average else attention)
        wanted = [(y, g) for y, g in zip(outputs, call.grads, strict=False) if g is not None]
        d = torch.autograd.grad([y for y, _ in wanted], [q, k_all, v_all], [g for _, g in wanted])
        dq, dk, dv = d[0], d[1][:, : k.shape[1]], d[2][:, : v.shape[1]]
        out = torch.zeros_like(call.query) if call.grads[0] is None else call.grads[0]
        terms = {
            "in_proj_bias": [Block(dq, None), Block(dk, None), Block(dv, None)],
            "out_proj.weight": [Block(out, context)],
            "out_proj.bias": [Block(out, None)],
            "bias_k": [Block(d[1][:, k.shape[1] : k.shape[1] + 1], None)],
            "bias_v": [Block(d[2][:, v.shape[1] : v.shape[1] + 1], None)],
            "q_proj_weight": [Block(dq, call.query)],
            "k_proj_weight": [Block(dk, call.key)],
            "v_proj_weight": [Block(dv, call.value)],
        }
        if call.query is call.key is call.value:  # self-attention: one product instead of three
            return {**terms, "in_proj_weight": [Block(torch.cat([dq, dk, dv], 2), call.query)]}
        return {**terms, "in_proj_weight": terms["q_proj_weight"] + terms["k_proj_weight"] + terms["v_proj_weight"]}

    def pick(self, record: Record, index: Tensor) -> Record:
        """From the normal form."""
        call = _read(record)
        query, key, value = call.query[index], call.key[index], call.value[index]
        chosen = call._replace(
            query=query,
            key=query if call.key is call.query else key,
            value=query if call.value is call.query else value,
            mask=call.mask if call.mask is None or len(call.mask) == 1 else call.mask[index],
            keep=None if call.keep is None else call.keep[index],
            grads=tuple(None if g is None else g[index] for g in call.grads),
        )
        return Record(record.module, record.names, (chosen,), {}, ())


class _Call(NamedTuple):
    """One call in normal form, whatever its layout: examples first, and one additive mask."""

    query: Tensor  # (B, L, E)
    key: Tensor
    value: Tensor
    mask: Tensor | None  # (B or 1, heads or 1, L or 1, S), added to the scores
    keep: Tensor | None  # (B, heads, L, S): what dropout multiplies the attention weights by
    average: bool
    grads: tuple[Tensor | None, ...]  # of the output (B, L, E) and, if asked for, of the attention weights


def _read(record: Record) -> _Call:
    if record.args and isinstance(record.args[0], _Call):
        return record.args[0]
    module: Any = record.module
    bound = _SIGNATURE.bind(module, *record.args, **record.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, value = given["query"], given["key"], given["value"]
    if query.dim() != 3:
        raise CaptureError("MultiheadAttention got a single sequence without a batch dimension. Write x[None] for one example.")
    mask = _mask(module, given, query, key)
    first, *rest = record.grads
    if not module.batch_first:
        same_key, same_value = key is query, value is query
        query, first = query.transpose(0, 1), None if first is None else first.transpose(0, 1)
        key, value = query if same_key else key.transpose(0, 1), query if same_value else value.transpose(0, 1)
    query = query.detach()
    key = query if given["key"] is given["query"] else key.detach()
    value = query if given["value"] is given["query"] else value.detach()
    return _Call(query, key, value, mask, _keep(record, query, key), given["average_attn_weights"], (first, *rest))


def _keep(record: Record, query: Tensor, key: Tensor) -> Tensor | None:
    """The factors of the forward's dropout, drawn again: torch draws them for all weights at once, and nothing before them."""
    if record.memory is None:
        return None
    module: Any = record.module
    keys = key.shape[1] + (module.bias_k is not None) + module.add_zero_attn
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(record.memory)
        return F.dropout(query.new_ones(len(query), module.num_heads, query.shape[1], keys), module.dropout)


def _mask(module: Any, given: dict[str, Any], query: Tensor, key: Tensor) -> Tensor | None:
    """Attention mask and key padding mask as one additive mask, for the given keys."""
    time = 1 if module.batch_first else 0
    attention, padding = given["attn_mask"], given["key_padding_mask"]
    parts = []
    if given["is_causal"] and padding is None and not given["need_weights"]:  # then torch looks at the hint and not at the mask
        ones = torch.ones(query.shape[time], key.shape[time], dtype=torch.bool, device=query.device)
        attention = ones.triu(1)
    if attention is not None:
        shape = (1, 1) if attention.dim() == 2 else (-1, module.num_heads)
        parts.append(_additive(attention, query).view(*shape, *attention.shape[-2:]))
    if padding is not None:
        parts.append(_additive(padding, query)[:, None, None, :])
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.detach().to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(mask, float("-inf"))


class _Layer:
    """The parameters, one projection at a time, in the precision of norms and sums."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        layer: Any = module
        named = {name: p.detach().to(dtype) for name, p in module.named_parameters()}
        self.heads, self.zero = layer.num_heads, layer.add_zero_attn
        packed = named.get("in_proj_weight")
        self.weights = tuple(named[f"{n}_proj_weight"] for n in "qkv") if packed is None else packed.chunk(3)
        bias = named.get("in_proj_bias")
        self.biases = (None, None, None) if bias is None else bias.chunk(3)
        self.extra = (named["bias_k"], named["bias_v"]) if "bias_k" in named else None
        self.out_weight, self.out_bias = named["out_proj.weight"], named.get("out_proj.bias")

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """With the bias and the zero as further keys and values."""
        B, E = k.shape[0], k.shape[2]
        if self.extra is not None:
            k, v = (torch.cat([x, bias.expand(B, 1, E)], 1) for x, bias in zip((k, v), self.extra, strict=True))
        if self.zero:
            k, v = torch.cat([k, k.new_zeros(B, 1, E)], 1), torch.cat([v, v.new_zeros(B, 1, E)], 1)
        return k, v


def _attend(layer: _Layer, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The heads' outputs side by side (B, L, E), and the attention weights (B, heads, L, S)."""
    q, k, v = (x.view(*x.shape[:2], layer.heads, x.shape[2] // layer.heads).transpose(1, 2) for x in (q, k, v))
    scores = (q / sqrt(q.shape[3])) @ k.transpose(2, 3)
    if call.mask is not None:
        scores = scores + F.pad(call.mask, (0, scores.shape[3] - call.mask.shape[3]))  # further keys are never masked
    attention = scores.softmax(3)
    if call.keep is not None:
        attention = attention * call.keep
    return (attention @ v).transpose(1, 2).flatten(2), attention
