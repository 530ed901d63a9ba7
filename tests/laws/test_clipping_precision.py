"""Every rule in single precision, and under bfloat16 autocast.

Single precision: 1e-6 of the norm of the sum, against a loop in float64. Autocast rounds activations to 8 bits, so passes over a batch and
over single examples agree to a few roundings only; but what is added for an example never exceeds the clip norm, to 1e-5.
"""

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.rules.linear import Linear
from hushgrad.testing.rules import check_rule, one_by_one, sum_of_sines


class _Last(nn.Module):
    """The first output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


IDS = torch.tensor([[1, 2, 2], [0, 3, 1], [4, 4, 4], [5, 0, 2]])
LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (4, 5)),
    "linear over positions": (lambda: nn.Linear(5, 4), (4, 6, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (4, 3, 8)),
    "conv2d, one channel": (lambda: nn.Conv2d(1, 4, 4, stride=2, padding=1), (4, 1, 8, 8)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), (4, 4, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 4, 3, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (4, 2, 4, 4)),
    "embedding": (lambda: nn.Embedding(6, 4), IDS),
    "bag": (lambda: nn.EmbeddingBag(6, 4, mode="sum"), IDS),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 4, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (4, 3, 7)),
    "rms norm": (lambda: nn.RMSNorm(6), (4, 3, 6)),
    "rnn": (lambda: _Last(nn.RNN(3, 4, batch_first=True)), (4, 5, 3)),
    "lstm": (lambda: _Last(nn.LSTM(3, 4, batch_first=True)), (4, 5, 3)),
    "gru": (lambda: _Last(nn.GRU(3, 4, batch_first=True)), (4, 5, 3)),
}
# torch's own bfloat16 kernels for these, as for attention, end the process on processors without the bfloat16 instructions.
AUTOCAST = [name for name in LAYERS if name not in ("transposed", "lstm")]


def _inputs(shape):
    return shape if isinstance(shape, torch.Tensor) else torch.randn(shape)


@pytest.mark.parametrize("name", LAYERS)
def test_single_precision(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    check_rule(make, _inputs(shape), dtype=torch.float32)


def test_an_error_of_a_few_millionths_is_noticed(monkeypatch):
    honest = Linear.sq_norms
    monkeypatch.setattr(Linear, "sq_norms", lambda *a: {n: s * (1 + 1e-5) for n, s in honest(*a).items()})
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="relative error"):
        check_rule(lambda: nn.Linear(5, 4), torch.randn(4, 5), dtype=torch.float32)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_torchs_default_type_moves_no_bit(name, default):
    """Lightning's "bf16-true" sets it, and so do loaders of models; what C writes to has the type that C writes."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, x, found = make(), _inputs(shape), []
    for kind in (torch.float32, default):
        capture = Capture(model, loss_reduction="sum")
        capture.attach()
        torch.set_default_dtype(kind)
        try:
            sum_of_sines(model(x)).backward()
            found.append(capture.collect(Flat(0.5)))
        finally:
            torch.set_default_dtype(torch.float32)
            capture.detach()
    one, other = found
    assert torch.equal(one.raw_norms, other.raw_norms)
    assert all(torch.equal(total, other.raw_sums[n]) for n, total in one.raw_sums.items())


def _autocast(make, x, clip):
    """(clipped sums, the loop's clipped sums) of one layer under autocast, and the norms of both."""
    model = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = {name: G.float() for name, G in one_by_one(model, (x,), sum_of_sines).items()}
    norms = torch.stack([G.flatten(1).square().sum(1) for G in rows.values()]).sum(0).sqrt()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = sum_of_sines(model(x))
    loss.backward()
    clipped = capture.collect(Flat(clip))
    weights = Flat(clip).weights(norms.square())
    return clipped, {name: torch.tensordot(weights, G, dims=1) for name, G in rows.items()}, norms


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_agrees_with_the_loop_and_keeps_the_bound(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    x = _inputs(shape)
    clipped, expected, norms = _autocast(make, x, 0.5)
    assert torch.allclose(clipped.raw_norms, norms, rtol=0.03)
    error = sum((clipped.raw_sums[n] - e).square().sum() for n, e in expected.items()).sqrt()
    assert error <= 0.03 * sum(e.square().sum() for e in expected.values()).sqrt()
    assert all(total.dtype == torch.float32 for total in clipped.raw_sums.values())
    for i in range(len(x)):  # one example alone: the sum is its clipped gradient
        alone, _, _ = _autocast(make, x[i : i + 1], 1e-3)
        total = sum(t.square().sum() for t in alone.raw_sums.values()).sqrt()
        assert total <= 1e-3 * (1 + 1e-5)


# What is added where a gradient's terms cancel --------------------------------------------------------------------------------------


def _centred(y: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return y - y.mean(dims, keepdim=True)


class _Difference(nn.Module):
    """One layer on two inputs that hardly differ, with opposite gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return torch.cat([self.layer(half) for half in x.chunk(2, 1)], 1)


def _cancelling(name):
    """(layer, inputs, gradient of its output): the terms of a weight's gradient are thousands of times as large as their sum."""
    if name == "positions":
        return (
            nn.Linear(64, 64, bias=False),
            1e4 * torch.randn(4, 1, 64) + torch.randn(4, 8, 64),
            _centred(torch.randn(4, 8, 64), (1,)),
        )
    if name == "convolution":
        x = 1e4 * torch.randn(4, 64, 1, 1) + torch.randn(4, 64, 4, 4)
        return nn.Conv2d(64, 64, 1, bias=False), x, _centred(10 * torch.randn(4, 64, 4, 4), (2, 3))
    if name == "twice":
        x, g = 1e3 * torch.randn(4, 64), 10 * torch.randn(4, 64)
        return _Difference(), torch.cat([x, x + torch.randn(4, 64)], 1), torch.cat([g, -g], 1)
    ids, g = torch.tensor([[0, 0, 1, 1, 2, 3]] * 4), torch.randn(4, 6, 16)
    g[:, :4:2] *= 1e4
    g[:, 1:4:2] = -g[:, :4:2]
    return nn.Embedding(9, 16), ids, g


@pytest.mark.parametrize("name", ["convolution", "embedding", "positions", "twice"])
@pytest.mark.parametrize("seed", range(3))
def test_cancelling_gradients_are_clipped(name, seed):
    """Norms from Gram matrices, or from differences of squares, were far too small here, and examples added up to thousands of C."""
    torch.manual_seed(seed)
    layer, x, g = _cancelling(name)
    capture = Capture(layer, loss_reduction="sum")
    capture.attach()
    torch.autograd.backward(layer(x), g)
    clipped = capture.collect(Flat(1.0))
    capture.detach()
    exact = layer.double()
    for i in range(len(x)):
        one = x[i : i + 1]
        grads = torch.autograd.grad(
            exact(one.double() if one.is_floating_point() else one), list(exact.parameters()), g[i : i + 1].double()
        )
        norm = torch.stack([G.norm() for G in grads]).norm()
        assert float(norm * clipped.raw_weights[i]) < 1.002
        assert float(clipped.raw_norms[i]) == pytest.approx(float(norm), rel=2e-3)
