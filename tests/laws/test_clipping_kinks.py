"""A number that rounds to one side of a kink in its batch and to the other one alone is no influence; a hook beside it is seen as ever."""

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated

EXAMPLES, INPUTS, WIDTH = 24, 64, 8


class Pairs(nn.Module):
    """The larger one of each two neighbours."""

    def forward(self, h):
        return h.unflatten(1, (-1, 2)).amax(2)


def drawn(seed, kink):
    """A model, a batch whose last example is at a kink but for rounding, and whether it is on another side there than alone."""
    torch.manual_seed(seed)
    layer, x = nn.Linear(INPUTS, WIDTH, bias=False), torch.randn(EXAMPLES, INPUTS)
    with torch.no_grad():
        normal = (layer.weight[0] - layer.weight[1] * (kink == "maximum")).double()
        last = x[-1].double()
        x[-1] = (last - normal * (last @ normal) / (normal @ normal)).float()
        sides = [bool(h[0] > h[1] * (kink == "maximum")) for h in (layer(x)[-1], layer(x[-1:])[0])]
    act, width = (Pairs(), WIDTH // 2) if kink == "maximum" else (nn.ReLU(), WIDTH)
    return nn.Sequential(layer, act, nn.Linear(width, 3)), x, sides[0] != sides[1]


def crossing(kink, count):
    found = (made for seed in range(4000) if (made := drawn(seed, kink))[2])
    return [next(found)[:2] for _ in range(count)]


def collected(model, x):
    capture = Capture(model)
    capture.attach()
    capture.examples(EXAMPLES)
    try:
        model(x).square().sum().backward()
        return capture.collect(Flat(1.0))
    finally:
        capture.detach()


@pytest.mark.parametrize("kink", ["maximum", "ReLU"])
def test_a_model_whose_numbers_round_to_the_other_side_of_a_kink_is_proved(kink):
    for model, x in crossing(kink, 6):
        before = [p.detach().clone() for p in model.parameters()]
        made = collected(model, x)
        assert bool(made.raw_norms.isfinite().all())
        assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("kink", ["maximum", "ReLU"])
def test_a_hook_that_mixes_gradients_beside_a_kink_is_refused(kink):
    model, x = crossing(kink, 1)[0]
    model[0].register_forward_hook(lambda _, __, h: h.register_hook(lambda g: g + 0.01 * g.flip(0)) and None)
    with pytest.raises((CaptureError, NotIsolated)):
        collected(model, x)
