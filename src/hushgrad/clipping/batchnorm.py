"""Replaces BatchNorm, which mixes the examples of a batch, by GroupNorm, which does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad import _check

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CHANNELS = 4  # of a group at least: a group of one channel on (B, C) inputs would normalise every number to 0


def replace_batchnorm(model: nn.Module, *, groups: int = 32) -> nn.Module:
    """Put a GroupNorm in the place of every BatchNorm of ``model``, in place; returns the model.

    C channels are normalised in the largest number of equal groups that is at most ``groups`` and leaves four channels or more in
    each; one group if there is none. Weight and bias are the *same* parameters, so their values, device, dtype and names stay, and so
    does an optimizer that holds them; the running statistics are dropped. A layer derived from BatchNorm that applies its own children
    after it (timm's ``BatchNormAct2d``: norm, drop, activation) becomes a GroupNorm, named ``norm``, followed by the same children; that it
    computes this is tried, and what computes anything else is refused.

        >>> net = replace_batchnorm(nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()))
        >>> type(net[1]).__name__, net[1].num_groups
        ('GroupNorm', 16)

    Reference: Wu and He, "Group normalization" (ECCV 2018); its use in DP-SGD: De et al., "Unlocking high-accuracy differentially private
    image classification through scale" (2022), section 3.1.
    """
    _check.instance(nn.Module, model=model)
    _check.positive_int(groups=groups)
    made: dict[int, nn.Module] = {}  # a layer that is used in two places is replaced by one layer
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if id(module) not in made:
                made[id(module)] = _replacement(path or "the model", module, groups)
            if not path:
                return made[id(module)]
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent).register_module(name, made[id(module)])
    return model


class _Followed(nn.Module):
    """A norm and what the replaced layer did after it, under the names that it had there."""

    def __init__(self, norm: nn.Module, children: dict[str, nn.Module]) -> None:
        super().__init__()
        self.norm = norm
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        for child in self._modules.values():
            x = x if child is None else child(x)
        return x


def _replacement(path: str, module: Any, groups: int) -> nn.Module:
    if type(module) in _KINDS:
        return _group_norm(path, module, groups)
    if not _is_followed(module):
        _check.fail("model", path, "to be one of torch's own BatchNorm layers", f"Replace this {type(module).__name__} by hand.")
    children = dict(module.named_children())
    norm = _group_norm(path, module, groups)
    return _Followed(norm, children).train(module.training) if children else norm


@torch.no_grad()
def _is_followed(module: Any) -> bool:
    """Whether it computes, in evaluation mode, what torch's own layer does and then its children, one after the other."""
    places = next((n for n, kind in enumerate(_KINDS[:3], 1) if isinstance(module, kind)), None)
    if places is None or module.running_mean is None or "norm" in module._modules:
        return False
    mean, training = module.running_mean, [m for m in module.modules() if m.training]
    x = (
        torch.rand(2, module.num_features, *[3] * places, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(
            mean
        )
        - 0.5
    )
    module.eval()
    try:
        expected = F.batch_norm(x, mean, module.running_var, module.weight, module.bias, False, 0.0, module.eps)
        for child in module.children():
            expected = child(expected)
        got = module(x)
    finally:
        for m in training:
            m.training = True
    return isinstance(got, Tensor) and got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-6)


def _group_norm(path: str, module: Any, groups: int) -> nn.GroupNorm:
    if isinstance(module, nn.BatchNorm1d) and module.num_features == 1:
        _check.fail("model", path, "to have more than one channel", "Alone it would be normalised to 0: remove the layer.")
    channels = module.num_features
    fitting = [g for g in range(1, groups + 1) if channels % g == 0 and channels // g >= _CHANNELS]
    norm = nn.GroupNorm(max(fitting, default=1), channels, eps=module.eps, affine=False)
    if module.affine:
        norm.affine, norm.weight, norm.bias = True, module.weight, module.bias
    return norm.train(module.training)
