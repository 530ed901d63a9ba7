"""Recurrent layers, attention, transposed convolutions, bags and further norms equal a loop of single-example backward passes."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hushgrad.clipping.rules import conv_transpose, outer
from hushgrad.testing import rules

few = settings(max_examples=25, deadline=None)
size = st.integers(1, 5)
batch = st.sampled_from([0, 1, 2, 5])
some = st.sampled_from([1, 2, 5])


def check_rule(make, inputs, tolerance=1e-12):
    rules.check_rule(make, inputs, tolerance=tolerance)


def shaken(module):
    for p in module.parameters():
        nn.init.normal_(p, std=0.7)
    return module


# Transposed convolutions ---------------------------------------------------------------------------------------------


@st.composite
def transposed(draw):
    dims = draw(st.sampled_from([1, 2, 2, 3]))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    C_in, C_out = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    stride, dilation = each(1, 3), each(1, 2)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    options = {"kernel_size": each(2, 3), "stride": stride, "dilation": dilation, "groups": groups, "output_padding": extra}
    options["padding"] = each(0, 1)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    return kind, C_in, C_out, options, (draw(batch), C_in, *each(2, 4)), draw(st.booleans())


@settings(max_examples=50, deadline=None)
@given(transposed(), st.booleans())
def test_transposed_convolution(case, keep):
    kind, C_in, C_out, options, shape, bias = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_transpose, "_KEEP_AT_MOST", 1 << 26 if keep else 0)
        check_rule(lambda: kind(C_in, C_out, bias=bias, **options), torch.randn(shape))


# Embedding bags --------------------------------------------------------------------------------------------------------


class ByOffsets(nn.Module):
    """Flattens (B, T) ids into bags of different lengths: example i holds its first 1 + id[i, 0] % T ids."""

    def __init__(self, weighted, **options):
        super().__init__()
        self.bag, self.weighted = nn.EmbeddingBag(6, 3, **options), weighted

    def forward(self, ids, scale):
        sizes = 1 + ids[:, 0] % ids.shape[1]
        used = torch.arange(ids.shape[1]) < sizes[:, None]
        ends = sizes.cumsum(0)
        offsets = torch.cat([ends - sizes, ends[-1:]]) if self.bag.include_last_offset else ends - sizes
        return self.bag(ids[used], offsets, scale[used] if self.weighted else None)


@few
@given(batch, st.integers(1, 6), st.sampled_from(["sum", "mean", "weighted"]), st.sampled_from([None, 0, 2]))
def test_embedding_bag(B, T, mode, padding_idx):
    weights = (None, torch.randn(B, T)) if mode == "weighted" else ()
    how = "sum" if mode == "weighted" else mode
    check_rule(lambda: nn.EmbeddingBag(6, 3, mode=how, padding_idx=padding_idx), (torch.randint(6, (B, T)), *weights))


@few
@given(some, st.integers(1, 6), st.sampled_from(["sum", "mean", "weighted"]), st.booleans(), st.sampled_from([None, 1]))
def test_embedding_bag_by_offsets(B, T, mode, last, padding_idx):
    options = {"mode": "sum" if mode == "weighted" else mode, "include_last_offset": last, "padding_idx": padding_idx}
    check_rule(lambda: ByOffsets(mode == "weighted", **options), (torch.randint(6, (B, T)), torch.randn(B, T)))


# Norms ---------------------------------------------------------------------------------------------------------------


@few
@given(some, st.integers(1, 4), st.integers(1, 3))
def test_instance_norm(B, C, dims):
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    check_rule(lambda: shaken(kind(C, affine=True)), torch.randn(B, C, *(3, 2, 4)[:dims]) + 3, tolerance=1e-9)


@few
@given(batch, st.lists(size, max_size=2), st.lists(size, min_size=1, max_size=2), st.sampled_from([None, 1e-3]))
def test_rms_norm(B, positions, shape, eps):
    assume(eps is not None or math.prod(shape) > 1)  # one number without eps becomes its sign: its gradient is rounding alone
    torch.manual_seed(0)
    check_rule(lambda: shaken(nn.RMSNorm(shape, eps=eps)), torch.randn(B, *positions, *shape) + 2, tolerance=1e-9)


# Recurrent layers ------------------------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """A recurrent layer on (B, T, d), whatever its own layout; the initial states come as (B, layers, size)."""

    def __init__(self, layer, use="all", packed=False):
        super().__init__()
        self.layer, self.use, self.packed = layer, use, packed

    def forward(self, x, *states, lengths=None):
        first = self.layer.batch_first
        hx = tuple(s.transpose(0, 1).contiguous() for s in states)
        hx = None if not hx else hx if isinstance(self.layer, nn.LSTM) else hx[0]
        if self.packed:
            lengths = 1 + (x[:, 0, 0].detach().abs() * 100).long() % x.shape[1]
            inputs = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, last = self.layer(inputs, hx)
            out = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]
        else:
            out, last = self.layer(x if first else x.transpose(0, 1), hx)
            out = out if first else out.transpose(0, 1)
        last = [h.transpose(0, 1) for h in (last if isinstance(last, tuple) else (last,))]
        return {"all": [out, *last], "output": out, "state": last}[self.use]


@st.composite
def recurrent(draw):
    kind = draw(st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]))
    d, H = draw(size), draw(st.integers(2, 4))
    options = {"num_layers": draw(st.integers(1, 2)), "bidirectional": draw(st.booleans()), "batch_first": draw(st.booleans())}
    options["bias"] = draw(st.booleans())
    if kind is nn.LSTM and draw(st.booleans()):
        options["proj_size"] = H - 1
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    B, T = draw(some), draw(st.integers(1, 6))
    cells = options["num_layers"] * (2 if options["bidirectional"] else 1)
    states = [torch.randn(B, cells, options.get("proj_size", H)), torch.randn(B, cells, H)][: 2 if kind is nn.LSTM else 1]
    inputs = (torch.randn(B, T, d), *(states if draw(st.booleans()) else []))
    return lambda: kind(d, H, **options), inputs


@settings(max_examples=30, deadline=None)
@given(recurrent(), st.sampled_from(["all", "output", "state"]), st.booleans(), st.sampled_from(["gram", "keep", "choose"]))
def test_recurrent(case, use, packed, way):
    make, inputs = case
    with pytest.MonkeyPatch.context() as patch:
        if way != "choose":
            patch.setattr(outer, "_READ_COST", 10**9 if way == "gram" else 0)
        check_rule(lambda: shaken(Sequence(make(), use, packed)), inputs)


# Attention -------------------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    """An attention layer on (B, L, E) inputs, whatever its own layout; masks come with the examples first."""

    def __init__(self, layer, how, **options):
        super().__init__()
        self.layer, self.how, self.options = layer, how, options

    def forward(self, query, key, value, padding=None, mask=None):
        if self.how == "self":
            key = value = query
        elif self.how == "cross":
            value = key
        swap = (lambda t: t) if self.layer.batch_first else (lambda t: t.transpose(0, 1))
        if self.how == "self":
            q = k = v = swap(query)
        else:
            q, k = swap(query), swap(key)
            v = k if value is key else swap(value)
        masks = {"key_padding_mask": padding, "attn_mask": mask if mask is None or mask.dim() == 2 else mask.flatten(0, 1)}
        out, weights = self.layer(q, k, v, **masks, **self.options)
        return [swap(out)] if weights is None else [swap(out), weights]


@st.composite
def attention(draw):
    heads, E = draw(st.integers(1, 3)), 6
    how = draw(st.sampled_from(["self", "cross", "other"]))
    options = {"batch_first": draw(st.booleans()), "bias": draw(st.booleans())}
    options |= {"add_bias_kv": draw(st.booleans()), "add_zero_attn": draw(st.booleans())}
    if how == "other":
        options |= {"kdim": 4, "vdim": 3}
    B, L = draw(some), draw(st.integers(1, 4))
    S = L if how == "self" else draw(st.integers(2, 5))
    key, value = torch.randn(B, S, 4 if how == "other" else E), torch.randn(B, S, 3 if how == "other" else E)
    call = {"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())}
    padding = torch.rand(B, S) < 0.4
    padding[:, 0] = False
    padding = draw(st.sampled_from([None, padding, torch.randn(B, S)]))
    mask = torch.rand(B, heads, L, S) < 0.4
    mask[..., 0] = False
    shared = mask[0, 0] if L != B else None
    mask = draw(st.sampled_from([None, shared, mask, torch.randn(B, heads, L, S)]))
    if mask is not None and padding is not None and mask.dtype != padding.dtype:
        padding = None  # torch deprecates masks of two kinds
    return (lambda: nn.MultiheadAttention(E, heads, **options)), how, call, (torch.randn(B, L, E), key, value, padding, mask)


@settings(max_examples=30, deadline=None)
@given(attention(), st.sampled_from(["gram", "keep", "choose"]))
def test_attention(case, way):
    make, how, call, inputs = case
    with pytest.MonkeyPatch.context() as patch:
        if way != "choose":
            patch.setattr(outer, "_READ_COST", 10**9 if way == "gram" else 0)
        check_rule(lambda: shaken(Attend(make(), how, **call)), inputs)
