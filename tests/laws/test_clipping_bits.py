"""Whether rows of a batch have bits of their own: what a certified run checks on its first batch."""

import pytest
import torch
from torch import nn

from hushgrad.clipping.bits import least_rows
from hushgrad.errors import CaptureError
from hushgrad.train import Plan, make_private


class _Mixed(nn.Module):
    """A last bit that depends on the neighbours."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y * (1 + (y[0] > 0).float() * 2.0**-23)


class _OtherKernel(nn.Module):
    """Other roundings for few rows, as libraries have them."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, x):
        y = x.sin()
        return y if len(x) >= self.least else y * (1 + 2.0**-22)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("least", [1, 3, 6])
def test_the_least_batch_with_the_usual_bits_is_found(least):
    torch.manual_seed(0)
    model = _OtherKernel(least)
    assert least_rows(model, torch.randn(20, 4)) == least
    assert model.training


def test_bits_that_depend_on_neighbours_are_refused():
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="last bits"):
        least_rows(_Mixed(_Scale()), torch.randn(9, 6))


def test_a_certified_run_looks_at_its_first_batch():
    torch.manual_seed(0)
    model = nn.Sequential(_Scale(), nn.Dropout(0.5))  # no matrix product: the same bits on every machine
    for network, refused in ((model, False), (_Mixed(model), True)):
        plan = Plan.dpgd(noise_multiplier=1.0, delta=1e-5, dataset_size=20, steps=1, certified=True)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        private = make_private(network, optimizer, plan, seed=0, loss_reduction="sum", check_isolation=False)
        ((x,),) = list(private.loader(torch.utils.data.TensorDataset(torch.randn(20, 6))))[:1]
        if refused:
            with pytest.raises(CaptureError, match="last bits"):
                network(x)
        else:
            network(x).square().sum().backward()
            optimizer.step()
            assert "rows" in str(private.spent())
        private.detach()
