"""What a module computes with the capture attached is bit for bit what it computes without it: outputs, and gradients of inputs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture, Flat

Case = tuple[nn.Module, list[tuple[int, ...]], int]  # a layer, the shapes of its inputs, and the dimension of the examples


class First(nn.Module):
    """The first output of a layer; ``itself``: attention of the input to itself."""

    def __init__(self, layer: nn.Module, *, itself: bool = False) -> None:
        super().__init__()
        self.layer, self.itself = layer, itself

    def forward(self, *xs: Tensor) -> Tensor:
        out = self.layer(*(xs * 3 if self.itself else xs))
        return out[0] if isinstance(out, tuple) else out


def _linear(lot: Random) -> Case:
    d, p = lot.choice((3, 17, 64, 513)), lot.choice((1, 4, 33, 128))
    shape = (lot.choice((2, 5, 8)), *(lot.choice((1, 2, 7)) for _ in range(lot.randint(0, 2))), d)
    return nn.Linear(d, p, bias=lot.random() < 0.6), [shape], 0


def _sequence(lot: Random) -> tuple[tuple[int, ...], bool]:
    B, T, first = lot.choice((2, 3, 5)), lot.choice((1, 4, 7)), lot.random() < 0.5
    return ((B, T, 16) if first else (T, B, 16)), first


def _recurrent(lot: Random) -> Case:
    shape, first = _sequence(lot)
    kind: Any = lot.choice((nn.RNN, nn.GRU, nn.LSTM))
    options: dict[str, Any] = dict(proj_size=4) if kind is nn.LSTM and lot.random() < 0.3 else {}
    both, bias = lot.random() < 0.5, lot.random() < 0.6
    layer = kind(16, 9, num_layers=lot.randint(1, 2), batch_first=first, bidirectional=both, bias=bias, **options)
    return layer, [shape], 0 if first else 1


def _attention(lot: Random) -> Case:
    shape, first = _sequence(lot)
    kinds: dict[str, Any] = {} if lot.random() < 0.5 else dict(kdim=16, vdim=17)
    layer = nn.MultiheadAttention(16, 2, batch_first=first, bias=lot.random() < 0.6, **kinds)
    itself = not kinds and lot.random() < 0.5
    shapes = [shape] if itself else [shape, shape, (*shape[:2], 17 if kinds else 16)]
    return First(layer, itself=itself), shapes, 0 if first else 1


def _transformer(lot: Random) -> Case:
    B, T, first = lot.choice((2, 3, 5)), lot.choice((4, 7)), lot.random() < 0.5
    shape = (B, T, 16) if first else (T, B, 16)
    options: dict[str, Any] = dict(batch_first=first, dropout=0.0, norm_first=lot.random() < 0.5)
    if lot.random() < 0.5:
        return nn.TransformerEncoderLayer(16, 2, 24, **options), [shape], 0 if first else 1
    return nn.TransformerDecoderLayer(16, 2, 24, **options), [shape, shape], 0 if first else 1


def _convolution(lot: Random) -> Case:
    layer: Any = lot.choice((nn.Conv2d, nn.ConvTranspose2d))
    groups = lot.choice((1, 2, 8))
    return layer(8, 16, lot.choice((1, 3)), padding=1, groups=groups, bias=lot.random() < 0.6), [(3, 8, 5, lot.choice((4, 6)))], 0


def _norm(lot: Random) -> Case:
    layer = lot.choice((nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4)))
    return layer, [(lot.choice((2, 5)), 4, 3, 6)], 0


KINDS: dict[str, Callable[[Random], Case]] = {
    "linear": _linear,
    "recurrent": _recurrent,
    "attention": _attention,
    "transformer": _transformer,
    "convolution": _convolution,
    "norm": _norm,
}


def _strided(shape: tuple[int, ...], dtype: torch.dtype, lot: Random) -> Tensor:
    """Numbers in this shape, with strides of one kind or another."""
    kind = lot.choice(("contiguous", "permuted", "sliced", "every second", "turned"))
    order = lot.sample(range(len(shape)), len(shape))
    if kind == "permuted":
        return torch.randn([shape[d] for d in order]).to(dtype).permute([order.index(d) for d in range(len(shape))])
    if kind == "sliced":
        return torch.randn([n + 1 for n in shape]).to(dtype)[tuple(slice(n) for n in shape)]
    if kind == "every second":
        return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]
    if kind == "turned":
        return torch.randn(shape[1], shape[0], *shape[2:]).to(dtype).transpose(0, 1)
    return torch.randn(shape).to(dtype)


def _computed(model: nn.Module, xs: list[Tensor], *, needs: bool) -> list[Tensor | None]:
    xs = [x.detach().requires_grad_(needs) for x in xs]
    y = model(*xs)
    y.backward(torch.linspace(-1.0, 1.5, y.numel()).reshape(y.shape).to(y.dtype))
    return [y.detach(), *(x.grad for x in xs)]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_of_inputs_keep_their_bits(kind: str) -> None:
    lot = Random(kind)
    torch.manual_seed(0)
    for number in range(40):
        layer, shapes, dim = KINDS[kind](lot)
        half = torch.float32 if kind == "convolution" else torch.bfloat16  # of which torch's own take no strides
        dtype = lot.choice((torch.float32, torch.float32, torch.float64, half))
        model = (layer if isinstance(layer, First) else First(layer)).to(dtype).train(lot.random() < 0.7)
        xs, needs = [_strided(shape, dtype, lot) for shape in shapes], lot.random() < 0.6
        plain = _computed(model, xs, needs=needs)
        model.zero_grad(set_to_none=True)
        capture = Capture(model, loss_reduction="sum", check_isolation=False)
        capture.attach()
        capture.examples(shapes[0][dim], dim=dim)
        private = _computed(model, xs, needs=needs)
        capture.collect(Flat(1.0))
        capture.detach()
        for a, b in zip(plain, private, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), (number, layer, [(x.shape, x.stride()) for x in xs], dtype)


def test_the_weights_of_a_strided_layer_get_no_gradient_of_their_own() -> None:
    """The engine is asked for the inputs' gradients alone, and what the layer has kept is let go when backward is over."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    x = torch.randn(3, 6, 7).transpose(1, 2)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    for _ in range(2):
        capture.examples(3)
        model(x).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        found = capture.collect(Flat(1e9))
        capture.detach()
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        capture.attach()
        for (name, _), g in zip(model.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(found.raw_sums[name], g, rtol=1e-4, atol=1e-4)
    capture.detach()
