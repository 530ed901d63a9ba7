"""Whole models with recurrent layers, attention, adapters and bare parameters: exact, or refused with a remedy."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

from hushgrad.clipping import Capture, Flat, Shared, rules
from hushgrad.clipping.base import rule_for
from hushgrad.clipping.mass import Mass
from hushgrad.clipping.rules import attention, conv_transpose, embedding_bag, instance_norm, outer, rms_norm, rnn
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.testing.rules import check_rule, one_by_one, sum_of_sines

CLIP = 0.5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def attached(model):
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    return capture


def agrees(clipped, rows, tolerance=1e-11):
    """With the per-example gradients of the loop, clipped."""
    norms = sum(G.flatten(1).square().sum(1) for G in rows.values()).sqrt()
    torch.testing.assert_close(clipped.raw_norms, norms, rtol=tolerance, atol=tolerance)
    for name, G in rows.items():
        expected = torch.tensordot((CLIP / norms).clamp(max=1), G, dims=1)
        torch.testing.assert_close(clipped.raw_sums[name], expected, rtol=tolerance, atol=tolerance)


class Tagger(nn.Module):
    """A recurrent layer (on packed sequences, if asked) and a head on its last state."""

    def __init__(self, kind=nn.LSTM, packed=False):
        super().__init__()
        self.packed, self.embed = packed, nn.Embedding(9, 5)
        self.layer, self.head = kind(5, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, ids):
        h = self.embed(ids)
        if self.packed:
            lengths = 1 + ids[:, 0] % ids.shape[1]
            h = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        state = self.layer(h)[1]
        state = state[0] if isinstance(state, tuple) else state
        return self.head(state.transpose(0, 1).flatten(1))


class Encoder(nn.Module):
    """A transformer with a class token and positions of its own."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.token, self.position = Shared(torch.randn(1, 8)), Shared(torch.randn(6, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True, norm_first=True)
        self.first, self.layers, self.head = (
            nn.Linear(4, 8),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(8, 3),
        )

    def forward(self, x, padding=None):
        h = torch.cat([self.token(x), self.first(x)], 1) + self.position(x)
        return self.head(self.layers(h, src_key_padding_mask=padding)[:, 0])


# Exact -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("packed", [False, True])
def test_tagger_with_micro_batches(kind, packed):
    model, ids = Tagger(kind, packed).double(), torch.randint(9, (7, 5))
    rows = one_by_one(model, (ids,), sum_of_sines)
    capture = attached(model)
    for part in ids.split(3):
        sum_of_sines(model(part)).backward()
    agrees(capture.collect(Flat(CLIP)), rows)


def test_encoder_with_padding_masks():
    model, x = Encoder().double(), torch.randn(5, 5, 4).double()
    padding = torch.rand(5, 6) < 0.3
    padding[:, 0] = False
    rows = one_by_one(model, (x, padding), sum_of_sines)
    capture = attached(model)
    sum_of_sines(model(x, padding)).backward()
    agrees(capture.collect(Flat(CLIP)), rows)


@pytest.mark.parametrize("make", [lambda: Tagger(packed=True), lambda: Tagger(nn.GRU)])
def test_units_over_recurrent_layers(make):
    model, ids, owners = make().double(), torch.randint(9, (8, 5)), torch.tensor([4, 2, 4, 4, 0, 2, 0, 1])
    rows = one_by_one(model, (ids,), sum_of_sines)
    units = {name: torch.stack([G[owners == u].sum(0) for u in (0, 1, 2, 4)]) for name, G in rows.items()}
    capture = attached(model)
    for part, who in zip(ids.split(5), owners.split(5), strict=True):
        capture.units(who)
        sum_of_sines(model(part)).backward()
    agrees(capture.collect(Flat(CLIP)), units)


@pytest.mark.parametrize("way", ["keep", "gram"])
@pytest.mark.parametrize("name", ["encoder", "lstm", "bag", "up"])
def test_a_nan_example_leaves_the_others_as_they_are(name, way, monkeypatch):
    monkeypatch.setattr(outer, "_READ_COST", 0 if way == "keep" else 10**9)
    monkeypatch.setattr(conv_transpose, "_KEEP_AT_MOST", 1 << 26 if way == "keep" else 0)
    make, x = {
        "encoder": (Encoder, torch.randn(5, 5, 4)),
        "lstm": (lambda: nn.Sequential(nn.LSTM(4, 3, batch_first=True), First()), torch.randn(5, 5, 4)),
        "bag": (lambda: Weighted(nn.EmbeddingBag(7, 3, mode="sum")), torch.rand(5, 4)),
        "up": (lambda: nn.ConvTranspose2d(2, 3, 3), torch.randn(5, 2, 4, 4)),
    }[name]
    model, x = make().double(), x.double()
    good = torch.tensor([0, 1, 3, 4])
    rows = one_by_one(model, (x[good],), sum_of_sines)
    x[2].flatten()[0] = float("nan")
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(CLIP))
    assert clipped.rejected == 1
    agrees(clipped._replace(raw_norms=clipped.raw_norms[good]), rows)


class Steps(nn.Module):
    """A cell in a loop of one's own."""

    def __init__(self, cell, start, named):
        super().__init__()
        self.cell, self.start, self.named = cell, start, named

    def forward(self, x):
        state = torch.ones(len(x), 3, dtype=x.dtype) if self.start else None
        state = (state, state) if self.start and isinstance(self.cell, nn.LSTMCell) else state
        for step in x.unbind(1):
            state = self.cell(input=step, hx=state) if self.named else self.cell(step, *([] if state is None else [state]))
        return state


@pytest.mark.parametrize(
    "make", [nn.RNNCell, nn.GRUCell, nn.LSTMCell, partial(nn.RNNCell, nonlinearity="relu"), partial(nn.GRUCell, bias=False)]
)
@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize(("start", "named"), [(False, False), (True, True)])
def test_cells(make, steps, start, named):
    assert isinstance(rule_for(make(4, 3), ["weight_ih"]), rules.RecurrentCell)
    check_rule(lambda: Steps(make(4, 3), start, named), torch.randn(5, steps, 4))


def test_cells_by_unit_and_without_a_bad_example():
    model, x = Steps(nn.GRUCell(4, 3), True, False).double(), torch.randn(5, 6, 4).double()
    x[1, 2] = torch.nan
    capture = attached(model)
    capture.units(torch.tensor([0, 1, 2, 0, 2]))
    sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(1e9))
    assert clipped.rejected == 1
    capture.detach()
    sum_of_sines(model(x[[0, 2, 3, 4]])).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(clipped.raw_sums[name], p.grad)


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


class Weighted(nn.Module):
    """Bags by offsets, with weights per id."""

    def __init__(self, bag):
        super().__init__()
        self.bag = bag

    def forward(self, weights):
        B, T = weights.shape
        ids = torch.arange(B * T).remainder(7)
        ids = ids.view(B, T)[:1].expand(B, T)  # the same for every example, whatever the batch
        return self.bag(ids.flatten(), torch.arange(0, B * T, T), weights.flatten())


def test_layers_that_are_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.attend = nn.GRU(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            h = self.rnn(self.rnn(x)[0])[0]
            a = self.attend(h, x, x)[0]
            return self.attend(a, a, a, need_weights=False)[0]

    check_rule(Twice, torch.randn(5, 3, 4))


@pytest.mark.parametrize("frozen", [("in_proj",), ("out_proj",), ("weight_ih",), ("weight_hh", "bias"), ("position", "head")])
def test_frozen_parts(frozen):
    model = nn.ModuleDict({"a": Encoder(), "b": Tagger()}).double()
    for name, p in model.named_parameters():
        if any(part in name for part in frozen):
            p.requires_grad_(False)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x, ids):
            return self.parts["a"](x), self.parts["b"](ids)

    check_rule(Both, (torch.randn(4, 5, 4), torch.randint(9, (4, 5))))


def test_bare_parameters_go_through_the_fallback():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.scale = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(4))
            self.position, self.inner = nn.Parameter(torch.randn(1, 6, 4)), nn.Linear(4, 4)

        def forward(self, x):
            h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
            return self.inner(h) * self.scale + self.position[0]

    check_rule(Scaled, torch.randn(5, 5, 4))


@pytest.mark.parametrize("whole", [False, True])
def test_a_module_that_returns_its_own_parameter(whole):
    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 3 if whole else 9, 4))

        def forward(self, x):
            return self.table if whole else self.table[:, : x.shape[1]]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.position, self.inner = Position(), nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x).sin() * self.position(x)

    check_rule(Net, torch.randn(5, 3, 4))


# Dropout inside a layer --------------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Attention with its own dropout between two dropout layers, in each layout."""

    def __init__(self, weights, **options):
        super().__init__()
        self.weights, self.drop, self.attend = weights, nn.Dropout(0.2), nn.MultiheadAttention(4, 2, dropout=0.3, **options)

    def forward(self, x):
        swap = (lambda t: t) if self.attend.batch_first else (lambda t: t.transpose(0, 1))
        h = swap(self.drop(x))
        return self.drop(swap(self.attend(h, h, h, need_weights=self.weights)[0]))


def stacked(kind, packed, **options):
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(4, 3, num_layers=3, dropout=0.4, **options)

        def forward(self, x):
            first = self.layer.batch_first
            if packed:
                lengths = (x[:, 0, 0].abs() * 100).long() % x.shape[1] + 1  # of the example itself, not of its place
                x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                state = self.layer(x)[1]
                return (state[0] if isinstance(state, tuple) else state).transpose(0, 1)
            out = self.layer(x if first else x.transpose(0, 1))[0]
            return out if first else out.transpose(0, 1)

    return Stacked


def with_the_same_draws(model, x, seed):
    """Per-example gradients of one and the same random forward, example by example."""
    rows = []
    for i in range(len(x)):
        torch.manual_seed(seed)
        rows.append(torch.autograd.grad(sum_of_sines(model(x)[i]), list(model.parameters())))
    names = [name for name, _ in model.named_parameters()]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("size", [(5, 3), (6, 40)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Encoder(0.3).layers.layers[0],
        lambda: Heads(True, batch_first=True),
        lambda: Heads(False, batch_first=True),
        lambda: Heads(False),
        lambda: Heads(True, add_bias_kv=True, add_zero_attn=True),
        stacked(nn.LSTM, False),
        stacked(nn.GRU, False, batch_first=True, bidirectional=True),
        stacked(nn.LSTM, True, proj_size=2),
        stacked(nn.RNN, True, bidirectional=True),
    ],
)
def test_dropout_inside_a_layer_is_drawn_again(make, size):
    model = make().double()
    x = torch.randn(*size, 8 if isinstance(model, nn.TransformerEncoderLayer) else 4).double()
    rows = with_the_same_draws(model, x, 3)
    capture = attached(model)
    torch.manual_seed(3)
    sum_of_sines(model(x)).backward()
    state = torch.get_rng_state()
    agrees(capture.collect(Flat(CLIP)), rows)
    assert torch.equal(state, torch.get_rng_state())


# Adapters --------------------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """The structure of a peft adapter: a frozen base layer and two small linear layers by adapter name."""

    def __init__(self, base, rank=2, dropout=0.0):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout) if dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        small = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + 2.0 * self.lora_B["default"](small)


def test_adapters_are_exact_and_the_frozen_base_costs_no_weight_gradient():
    width, rank, B, T = 64, 2, 4, 8
    model = nn.Sequential(*(LoraLinear(nn.Linear(width, width), rank) for _ in range(3))).double()
    check_rule(lambda: model, torch.randn(B, T, width))
    capture = attached(model)
    assert {name.rpartition(".")[0].split(".")[1] for name in capture._params} == {"lora_A", "lora_B"}
    counted = []
    with FlopCounterMode(display=False) as counter:  # its hooks, and the graphs that they keep, belong to what is proved
        for _ in range(2):
            sum_of_sines(model(torch.randn(B, T, width).double())).backward()
            capture.collect(Flat(CLIP))
            counted.append(counter.get_total_flops())
    base = 2 * B * T * width * width  # one product with a base layer's weight
    adapters = counted[1] - counted[0] - (3 + 2) * base  # forward of three, backward to the activations of two
    assert 0 < adapters < base  # a weight gradient of one base layer would be one more


def test_adapters_in_parameter_dicts_belong_to_the_module_that_holds_them():
    class LoraEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Embedding(9, 4).requires_grad_(False)
            self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(2, 9))})
            self.lora_embedding_B = nn.ParameterDict({"default": nn.Parameter(torch.randn(4, 2))})

        def forward(self, ids):
            a, b = self.lora_embedding_A["default"], self.lora_embedding_B["default"]
            return self.base_layer(ids) + F.embedding(ids, a.T) @ b.T

    check_rule(LoraEmbedding, torch.randint(9, (3, 4)))


# Parametrised layers -----------------------------------------------------------------------------------------------------------


def test_weight_norm_and_orthogonal_are_exact():
    check_rule(lambda: parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(5, 4))
    check_rule(lambda: parametrizations.orthogonal(nn.Linear(4, 4)), torch.randn(5, 4))


def test_spectral_norm_is_exact():
    model, x = parametrizations.spectral_norm(nn.Linear(4, 3)).double(), torch.randn(5, 4).double()
    capture = Capture(model, loss_reduction="sum")
    model.parametrizations.eval()
    rows = one_by_one(model, (x,), sum_of_sines)
    capture.attach()
    sum_of_sines(model(x)).backward()
    agrees(capture.collect(Flat(CLIP)), rows)


# Refused -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.EmbeddingBag(5, 3, mode="max"), "mode"),
        (nn.EmbeddingBag(5, 3, max_norm=1.0), "max_norm"),
        (nn.EmbeddingBag(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), "track_running_stats"),
    ],
)
def test_options_without_a_rule_are_refused(layer, message):
    with pytest.raises(CaptureError, match=message):
        attached(nn.Sequential(layer))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.GRUCell(4, 3), (4,)),
        (nn.Linear(4, 3), (4,)),
        (nn.InstanceNorm1d(4, affine=True), (4, 4)),
        (nn.LayerNorm(4), (4,)),
        (nn.LayerNorm((4, 4)), (4, 4)),
        (nn.RMSNorm(4), (4,)),
        (nn.Conv1d(4, 3, 2), (4, 4)),
        (nn.Conv2d(4, 3, 2), (4, 4, 4)),
        (nn.ConvTranspose2d(4, 3, 2), (4, 4, 4)),
    ],
)
def test_single_examples_without_a_batch_dimension_are_refused(layer, shape):
    capture = attached(layer)
    capture.examples(4)
    with pytest.raises((CaptureError, NotIsolated), match=r"without a batch dimension|no way to take|apart above it"):
        out = layer(torch.randn(shape))
        sum_of_sines(out).backward()
        capture.collect(Flat(CLIP))


# Planted defects: each of these mistakes is found by the conformance check -------------------------------------------------------


def lstm():
    return nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)


def bag():
    return nn.EmbeddingBag(3, 2, mode="mean")


def _wrong_gru(gates, hidden, state):
    return rnn._gru(gates + hidden, torch.zeros_like(hidden), state)  # forgets that the reset gate acts on the hidden part


@pytest.mark.parametrize(
    ("target", "name", "wrong", "make", "inputs"),
    [
        (rnn._Cell, "_in_time", lambda self, rows: torch.stack(rows, 1), lstm, torch.randn(4, 5, 3)),
        (rnn._Cell, "_times", lambda self: iter(range(self.x.shape[1])), lstm, torch.randn(4, 5, 3)),
        (rnn, "step_of", lambda module: _wrong_gru, lambda: nn.GRU(3, 4, batch_first=True), torch.randn(4, 5, 3)),
        (attention, "_mask", lambda *args: None, Encoder, (torch.randn(4, 5, 4), torch.arange(24).view(4, 6) % 5 == 1)),
        (attention, "sqrt", lambda x: 1.0, Encoder, torch.randn(4, 5, 4)),
        (outer, "gram_sq_norm", lambda x, g: (x.square().sum((1, 2)) * g.square().sum((1, 2)), Mass(x[:, 0, 0], 1)), Encoder,
         torch.randn(4, 5, 4)),
        (conv_transpose, "_padded", lambda r: F.pad(r.g, (0, 2)), lambda: nn.ConvTranspose1d(2, 3, 3, padding=1), torch.randn(4, 2, 6)),
        (embedding_bag, "measured", lambda _, r, t: r.values.square().sum(1).view(4, -1).sum(1), bag,
         torch.randint(3, (4, 6))),
        (instance_norm.F, "instance_norm", lambda x, *_, **o: x.clone(), lambda: nn.InstanceNorm1d(3, affine=True), torch.randn(4, 3, 6)),
        (rms_norm.torch, "rms_norm", lambda x, *_: x, lambda: nn.RMSNorm(3), torch.randn(4, 6, 3)),
    ],
)  # fmt: skip
def test_a_planted_defect_is_found(target, name, wrong, make, inputs, monkeypatch):
    monkeypatch.setattr(outer, "_READ_COST", 10**9)
    check_rule(make, inputs)
    if name in ("instance_norm", "rms_norm"):  # the defect must not be in the model itself
        check = lambda rule, original: lambda self, record: (setattr(target, name, wrong), original(self, record))[1]  # noqa: E731
        kind = instance_norm.InstanceNorm if name == "instance_norm" else rms_norm.RMSNorm
        right = vars(target)[name]
        monkeypatch.setattr(kind, "per_example", check(kind, kind.per_example))
        monkeypatch.setattr(target, name, right)
    else:
        monkeypatch.setattr(target, name, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        check_rule(make, inputs)


def test_every_layer_of_this_page_has_a_rule_of_its_own():
    layers = [nn.RNN(2, 2), nn.LSTM(2, 2), nn.GRU(2, 2), nn.MultiheadAttention(2, 1), nn.EmbeddingBag(2, 2), nn.RMSNorm(2)]
    layers += [nn.ConvTranspose1d(2, 2, 2), nn.ConvTranspose2d(2, 2, 2), nn.ConvTranspose3d(2, 2, 2), Shared(torch.ones(2))]
    layers += [nn.InstanceNorm1d(2, affine=True), nn.InstanceNorm2d(2, affine=True), nn.InstanceNorm3d(2, affine=True)]
    for layer in layers:
        assert rule_for(layer, [name for name, _ in layer.named_parameters(recurse=False)]) is not None, layer
