"""A hook on gradients that hands something of one example to a later one: no output shows it, and few examples by themselves do not."""

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import HushgradError

_BY = 32


def _fed(g: torch.Tensor) -> torch.Tensor:
    return torch.cat([g[:_BY], g[_BY:] + 0.2 * g[:-_BY]]) if len(g) > _BY else g


class _Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).tanh()
        if h.requires_grad:
            h.register_hook(_fed)
        return self.outer(h)


@pytest.mark.parametrize("examples", [48, 64, 100, 128])
def test_an_example_whose_gradient_feeds_a_later_one_is_seen(examples):
    torch.manual_seed(0)
    model = _Hooked()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    with pytest.raises(HushgradError):
        model(torch.randn(examples, 6)).square().sum().backward()
        capture.collect(Flat(1.0))
