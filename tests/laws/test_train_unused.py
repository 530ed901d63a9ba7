"""Parameters that a pass does not reach: refused, or counted as zero if the user says so."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.errors import CaptureError
from hushgrad.train import Plan, make_private


class _TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.used(self.body(x).tanh())


def _stepped(noise_multiplier, **options):
    torch.manual_seed(0)
    model, data = _TwoHeads(), TensorDataset(torch.randn(6, 4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = Plan.dpgd(noise_multiplier=noise_multiplier, delta=1e-5, dataset_size=6, steps=1)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=1, **options)
    try:
        for (x,) in private.loader(data):
            model(x).mean().backward()
            private.optimizer.step()
    finally:
        private.detach()
    return {name: float((p.detach() - before[name]).abs().max()) for name, p in model.named_parameters()}


def test_a_parameter_without_a_gradient_is_refused():
    with pytest.raises(CaptureError, match="spare"):
        _stepped(1.0)


def test_unused_zero_trains_the_rest_and_gives_the_unused_only_noise():
    moved = _stepped(1e-12, unused="zero")
    assert moved["used.weight"] > 1e-3 and moved["spare.weight"] < 1e-9
    assert _stepped(1.0, unused="zero")["spare.weight"] > 1e-3  # noise: whether an example reached it must not be seen
