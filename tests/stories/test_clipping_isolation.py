"""Layers that mix the examples of a batch are found by what they do, named, and told how to be mended."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

import hushgrad
from hushgrad.clipping import Capture, Flat, isolation, isolation_at_first_call, replace_batchnorm, self_check
from hushgrad.errors import ArgumentError, CaptureError, NotIsolated

torch.manual_seed(0)  # models in the parameters of tests are made when this file is read


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def convnet(norm=nn.BatchNorm2d):
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


class First(nn.Module):
    """The first of several outputs."""

    def forward(self, outputs):
        return outputs[0]


class Text(nn.Module):
    """Integer inputs: there is nothing to differentiate before the embedding."""

    def __init__(self, middle):
        super().__init__()
        self.tokens, self.middle, self.head = nn.Embedding(11, 8), middle, nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.middle(self.tokens(ids).mean(1)))


class Custom(nn.Module):
    """Subtracts something that was computed over the batch."""

    def __init__(self, how):
        super().__init__()
        self.how, self.inner = how, nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        h = self.inner(x)
        if self.how == "mean":
            return h - h.mean(0)
        if self.how == "detached":
            return h - h.mean(0).detach()
        if self.how == "earlier":
            return h.cumsum(0)
        if self.how == "count":
            return h * (h[:, :1] > 0).sum()  # an integer: autograd does not see it
        if self.how == "memory":
            self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        if self.how == "memory in place":
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h


# Isolated ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LayerNorm(8)), (torch.randn(5, 4),)),
        (convnet(lambda c: nn.GroupNorm(2, c)), (torch.randn(4, 3, 8, 8),)),
        (convnet().eval(), (torch.randn(4, 3, 8, 8),)),
        (Text(nn.LayerNorm(8)), (torch.randint(11, (4, 6)),)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(3, 5, 8),)),
        (parametrizations.spectral_norm(nn.Linear(4, 3)), (torch.randn(5, 4),)),
        (Custom("none"), (torch.full((3, 4), float("nan")),)),
    ],
)
def test_models_that_keep_examples_apart(model, inputs):
    isolation(model, *inputs)


def test_nothing_is_changed():
    model, x = convnet(lambda c: nn.GroupNorm(2, c)), torch.randn(4, 3, 8, 8)
    mixing = convnet()
    model[0].weight.requires_grad_(False)
    before, random = {k: v.clone() for k, v in mixing.state_dict().items()}, torch.get_rng_state()
    isolation(model, x)
    with pytest.raises(NotIsolated):
        isolation(mixing, x)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in mixing.state_dict().items())
    assert [p.requires_grad for p in model.parameters()][:2] == [False, True] and not x.requires_grad
    assert not any(m._forward_hooks for net in (model, mixing) for m in net.modules())


# Not isolated ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            convnet(),
            (torch.randn(4, 3, 8, 8),),
            r"2\.1 \(BatchNorm2d\).*replace_batchnorm\(model\) before the optimizer is built",
        ),
        (convnet(lambda c: nn.BatchNorm2d(c, affine=False)), (torch.randn(4, 3, 8, 8),), r"2\.1 \(BatchNorm2d\)"),
        (Text(nn.BatchNorm1d(8)), (torch.randint(11, (4, 6)),), r"middle \(BatchNorm1d\)"),
        (
            nn.Sequential(Custom("mean")),
            (torch.randn(5, 4),),
            r"0 \(Custom\).*depends on the input of others.*within each example",
        ),
        (Custom("earlier"), (torch.randn(5, 4),), r"The model \(Custom\)"),
        (nn.Sequential(nn.Linear(4, 4), Custom("detached")), (torch.randn(5, 4),), r"1 \(Custom\).*changes when the others"),
        (Custom("count"), (torch.randn(6, 4),), "changes when the others"),
        (nn.Sequential(Custom("memory")), (torch.randn(5, 4),), r"0 \(Custom\).*buffer mean keeps something of the data"),
        (nn.Sequential(Custom("memory in place")), (torch.randn(5, 4),), "buffer mean keeps"),
        (nn.InstanceNorm2d(3, track_running_stats=True), (torch.randn(4, 3, 5, 5),), "buffer running_mean keeps"),
    ],
)
def test_models_that_mix_examples(model, inputs, message):
    with pytest.raises(NotIsolated, match=message):
        isolation(model, *inputs)


def test_attention_over_the_batch_names_batch_first():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2)  # (T, B, E), but gets (B, T, E)

        def forward(self, x):
            h = self.first(x)
            return self.attention(h, h, h)[0]

    with pytest.raises(NotIsolated, match=r"attention \(MultiheadAttention\).*batch_first=True"):
        isolation(Attending(), torch.randn(3, 5, 4))
    isolation(Attending(), torch.randn(5, 3, 4), batch_dim=1)


def test_one_example_cannot_show_it():
    for x in (torch.randn(1, 4), torch.randn(0, 4)):
        with pytest.raises(ArgumentError, match="two examples or more"):
            isolation(nn.Linear(4, 3), x)


# While training --------------------------------------------------------------------------------------------------------------


def test_the_first_batch_is_checked_once():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)), torch.randn(6, 4)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    isolation_at_first_call(model, capture.pause)
    model.eval()
    model(x)  # fixed statistics: not what training does
    model.train()
    with pytest.raises(NotIsolated, match="BatchNorm1d"):
        model(x)
    good = replace_batchnorm(model)
    isolation_at_first_call(good, capture.pause)
    for _ in range(2):
        good(x).sum().backward()
    assert len(good._forward_pre_hooks) == 1  # the capture's own
    assert capture.collect(Flat(1.0)).raw_norms.shape == (12,)  # the check's own passes do not count


@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(4)])
def test_time_may_come_first(norm):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.norm, self.head = nn.GRU(3, 4), norm or nn.Identity(), nn.Linear(4, 2)

        def forward(self, x):  # (T, B, 3)
            return self.head(self.norm(self.rnn(x)[0][-1]))

    model = Last()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    isolation_at_first_call(model, capture.pause)
    if norm is None:
        model(torch.randn(7, 5, 3)).sum().backward()
        assert capture.collect(Flat(1.0)).raw_norms.shape == (5,)
    else:
        with pytest.raises(NotIsolated, match=r"norm \(BatchNorm1d\)"):
            model(torch.randn(7, 5, 3))


# The remedy ------------------------------------------------------------------------------------------------------------------


def test_replaced_batchnorm_keeps_parameters_and_optimizer():
    model, x = convnet().double(), torch.randn(4, 3, 8, 8).double()
    nn.init.normal_(model[2][1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(model.named_parameters())
    assert hushgrad.replace_batchnorm(model.eval()) is model
    norm = model[2][1]
    assert isinstance(norm, nn.GroupNorm) and norm.num_groups == 2 and not norm.training
    assert all(p is before[name] for name, p in model.named_parameters()) and norm.weight.dtype == torch.float64
    assert not [name for name, _ in model.named_buffers()]
    isolation(model.train(), x)
    F.cross_entropy(model(x), torch.zeros(4, dtype=torch.long)).backward()
    old = norm.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(old, norm.weight)


@pytest.mark.parametrize(("channels", "groups"), [(64, 16), (48, 12), (512, 32), (7, 1), (6, 1), (96, 24), (4, 1)])
def test_groups(channels, groups):
    assert replace_batchnorm(nn.BatchNorm2d(channels)).num_groups == groups
    flat = replace_batchnorm(nn.BatchNorm1d(channels))(torch.randn(5, channels))
    assert flat.std() > 0.5  # (B, C) inputs are not normalised away


def test_a_layer_in_two_places_stays_one_layer_and_options_survive():
    shared = nn.BatchNorm1d(8, eps=0.1, affine=False)
    model = replace_batchnorm(nn.Sequential(shared, nn.Linear(8, 8), shared))
    assert model[0] is model[2] and model[0].eps == 0.1 and model[0].weight is None


def test_what_cannot_be_replaced_is_named():
    class Activated(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    for layer in (Activated(8), nn.LazyBatchNorm1d(), nn.BatchNorm1d(1)):
        with pytest.raises(ArgumentError, match=r"0\.norm"):
            replace_batchnorm(nn.Sequential(nn.ModuleDict({"norm": layer})))


# The order of the examples -----------------------------------------------------------------------------------------------------


class Sorted(nn.Module):
    """Sorts the examples by length, as packed sequences once needed; all of its layers see them so, or only some."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.before, self.layer, self.head = whole, nn.Linear(4, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x, lengths):
        lengths, order = lengths.sort(descending=True)
        x = self.before(x[order]) if self.whole else self.before(x)[order]
        last = self.layer(pack_padded_sequence(x, lengths, batch_first=True))[1][0][0]
        return self.head(last)[order.argsort()] if self.whole else self.head(last[order.argsort()])


class TimeFirst(nn.Module):
    """Between two layers with the examples first, some with time first."""

    def __init__(self, layer):
        super().__init__()
        self.before, self.layer, self.head = nn.Linear(4, 8), layer, nn.Linear(8, 3)

    def forward(self, x):
        y = self.before(x).transpose(0, 1)
        y = self.layer(y, y, y)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(y)
        return self.head((y[0] if isinstance(y, tuple) else y).mean(0))


def test_as_many_positions_as_examples_and_time_first():
    model, x, y = TimeFirst(nn.LayerNorm(8)), torch.randn(6, 6, 4), torch.randint(3, (6,))
    assert max(self_check(model, F.cross_entropy, (x, y)).values()) < 1e-5


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Sorted(whole=True), (torch.randn(6, 5, 4), torch.tensor([2, 3, 1, 4, 5, 5]))),
        (TimeFirst(nn.LSTM(8, 8)), (torch.randn(6, 6, 4),)),
        (TimeFirst(nn.MultiheadAttention(8, 2)), (torch.randn(6, 6, 4),)),
    ],
)
def test_layers_that_know_where_the_examples_are(model, inputs):
    isolation(model, *inputs)


# As many positions as examples ---------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Attention with a mask that the caller gives, or a table of distances."""

    def __init__(self, embed):
        super().__init__()
        self.embed, self.distance, self.head = embed, nn.Embedding(11, 1), nn.Linear(4, 3)

    def forward(self, x, mask=None):
        x, t = self.embed(x), torch.arange(6)
        bias = self.distance(t[:, None] - t + 5).squeeze(-1) if mask is None else mask
        return self.head(((x @ x.transpose(1, 2) + bias).softmax(-1) @ x).mean(1))


@pytest.mark.parametrize(
    ("embed", "x"),
    [(nn.Linear(4, 4), torch.randn(6, 6, 4)), (nn.Embedding(9, 4), torch.randint(9, (6, 6)))],
    ids=["floats", "ids"],
)
def test_positions_are_no_examples(embed, x):
    isolation(Positions(embed), x)
    isolation(Positions(embed), x, torch.full((6, 6), -1e9).triu(1))


def test_a_square_input_does_not_hide_mixing():
    class Graph(nn.Module):
        def forward(self, x, edges):
            return edges @ x

    with pytest.raises(NotIsolated, match="depends on the input of others"):
        isolation(Graph(), torch.randn(6, 4), torch.rand(6, 6))


def test_alike_examples_still_show_a_batch_norm():
    with pytest.raises(NotIsolated, match="BatchNorm1d"):
        isolation(
            nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4)),
            torch.zeros(6, 2, dtype=torch.int64),
        )


# Models that change their inputs in place ------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self, embed=None):
        super().__init__()
        self.embed, self.head = embed, nn.Linear(4, 3)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x).mean(1)
        x -= 1
        return self.head(x)


def test_activations_and_inputs_may_be_changed_in_place():
    x = torch.randn(6, 4)
    before = x.clone()
    isolation(InPlace(), x)
    assert torch.equal(x, before)
    isolation(nn.Sequential(nn.Embedding(9, 4), nn.ReLU(inplace=True), nn.Flatten()), torch.randint(9, (6, 2)))


@dataclass
class Result:
    scores: torch.Tensor


def test_a_dataclass_is_looked_into():
    class Model(nn.Linear):
        def forward(self, x):
            return Result(super().forward(x))

    isolation(Model(4, 3), torch.randn(6, 4))


# Self-check ------------------------------------------------------------------------------------------------------------------


def test_self_check_gives_errors_by_name():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    errors = self_check(model, F.cross_entropy, (torch.randn(6, 4), torch.randint(3, (6,))))
    assert set(errors) == {"0.weight", "0.bias", "2.weight", "2.bias"} and max(errors.values()) < 1e-5
    assert model[1].training


@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True),
        nn.Sequential(nn.GRU(4, 4, 2, dropout=0.5, batch_first=True), First()),
    ],
)
def test_self_check_switches_dropout_inside_layers_off(layer):
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(20, 3))
    assert max(self_check(model, F.cross_entropy, (torch.randn(6, 5, 4), torch.randint(3, (6,)))).values()) < 1e-4
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Custom("mean"), F.cross_entropy),
        (nn.Linear(4, 3), lambda out, y: F.cross_entropy(out, y, reduction="sum")),
        (nn.Linear(4, 3), lambda out, y: F.cross_entropy(out - out.mean(0), y)),
    ],
)
def test_self_check_rejects_mixing_and_other_reductions(model, loss):
    with pytest.raises(
        (CaptureError, NotIsolated), match=r"differ from single-example passes|influence each other|no way to take"
    ):
        self_check(model, loss, (torch.randn(6, 4), torch.randint(3, (6,))))
