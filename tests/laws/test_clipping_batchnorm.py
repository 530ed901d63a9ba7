"""Layers derived from BatchNorm: replaced if they are a norm and then their own children, refused if they are anything else."""

import pytest
import torch
from torch import nn

from hushgrad.clipping import replace_batchnorm
from hushgrad.errors import ArgumentError


class _NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: dropout and activation belong to the layer."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.PReLU(channels)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class _Renamed(nn.BatchNorm1d):
    pass


class _Scaled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


class _Skipping(_NormAct):
    def forward(self, x):
        return nn.BatchNorm2d.forward(self, x)


def _random(layer):
    torch.manual_seed(0)
    with torch.no_grad():
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
        layer.weight.normal_()
        layer.bias.normal_()
    return layer


def test_a_norm_with_an_activation_becomes_a_group_norm_with_the_same_activation():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), _random(_NormAct(8)))
    layer, weight, act = model[1], model[1].weight, model[1].act
    training = [m.training for m in model.modules()]
    replace_batchnorm(model)
    assert [m.training for m in model.modules()][: len(training) - 1] == training[: len(training) - 1]
    assert model[1].norm.weight is weight and model[1].act is act and model[1].norm.bias is layer.bias
    x = torch.randn(4, 8, 5, 5)
    assert torch.equal(model[1](x), act(model[1].norm(x)))
    assert model[1].norm.num_groups == 2 and not list(model.buffers())


def test_a_bare_subclass_becomes_a_group_norm():
    assert type(replace_batchnorm(nn.Sequential(nn.Linear(3, 8), _random(_Renamed(8))))[1]) is nn.GroupNorm


@pytest.mark.parametrize("layer", [_Scaled, _Skipping])
def test_a_layer_that_computes_something_else_is_refused(layer):
    with pytest.raises(ArgumentError, match="by hand"):
        replace_batchnorm(nn.Sequential(_random(layer(8))))
