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


def _normed(g: torch.Tensor) -> torch.Tensor:
    return g / g.norm(dim=-1, keepdim=True).clamp(min=1e-6)


@pytest.mark.parametrize("where", ["layer", "parameter", "module"])
def test_a_hook_that_normalises_gradients_is_called_by_its_name(where):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if where == "parameter":
        model.get_parameter("2.weight").register_hook(_normed)
    elif where == "module":
        model[2].register_full_backward_hook(lambda module, down, up: tuple(map(_normed, down)))
    else:
        model[0].register_forward_hook(lambda module, args, y: y.register_hook(_normed) and None if y.requires_grad else None)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    with pytest.raises(HushgradError, match="do not follow the size of the loss") as refused:
        model(torch.randn(9, 6)).square().sum().backward()
    assert where == "layer" or f"hooks on {'2.weight' if where == 'parameter' else '2'}, which" in str(refused.value)
    capture.detach()
    for hooked in (*model.parameters(), *model.modules()):  # as it says
        if hooked._backward_hooks:
            hooked._backward_hooks.clear()
    if where != "layer":
        capture = Capture(model, loss_reduction="sum")
        capture.attach()
        model(torch.randn(9, 6)).square().sum().backward()
        assert capture.collect(Flat(1.0)).raw_norms.isfinite().all()
