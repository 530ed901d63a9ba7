"""The clipped sum of a fixed small model, stored.

Source: a loop of ``torch.autograd.grad`` over single examples in float64 (torch 2.13.0); ``GradSampleModule`` of Opacus 1.6.0 gives the
same per-example gradients to 2e-16. Parameters and inputs are fractional parts of arithmetic sequences, so no random stream is involved.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad.clipping import Flat, clipped_sum
from hushgrad.clipping.proof import trials
from hushgrad.clipping.rules.conv import Conv
from hushgrad.errors import NotIsolated

NORMS = [1.5154102211234308, 1.1405442615566928, 0.9774127247330308]
SUMS = {
    "0.weight": [
        0.004520498932763253, 0.03444238783604594, -0.028202953168499967, 0.03546007745805679,
        0.019023262852520373, 0.012802236425009828, -0.026824154664173913, 0.04184517035882511,
    ],
    "0.bias": [0.037049249906405235, 0.03377583251767108],
    "3.weight": [
        -0.6570455097259111, -0.1128904472297404, -0.24145856430887747, -0.3394508562709732,
        0.6235051248369303, -0.070761693093853, 0.4666912167357633, 0.08467322592814369,
        0.6570455097259111, 0.11289044722974045, 0.24145856430887747, 0.33945085627097327,
        -0.6235051248369304, 0.07076169309385294, -0.4666912167357633, -0.08467322592814372,
    ],
    "3.bias": [0.3322455326203156, -0.33224553262031564],
}  # fmt: skip


def _ramp(shape: tuple[int, ...], slope: float, start: float) -> Tensor:
    k = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return ((slope * k + start) % 1.0 - 0.5).view(shape)


def _clipped(reduction: str = "sum"):
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for j, p in enumerate(model.parameters()):
            p.copy_(_ramp(tuple(p.shape), 0.37, 0.11 * (j + 1)))
    batch = (4 * _ramp((3, 1, 3, 3), 0.29, 0.05), torch.tensor([0, 1, 1]))
    loss = lambda output, target: F.cross_entropy(output, target, reduction=reduction)  # noqa: E731
    return clipped_sum(model, loss, batch, Flat(0.9), loss_reduction=reduction)


def _agrees(clipped) -> bool:
    found = [(clipped.raw_norms, NORMS), *((clipped.raw_sums[name].flatten(), values) for name, values in SUMS.items())]
    return all(torch.allclose(t, torch.tensor(v, dtype=torch.float64), rtol=1e-12, atol=1e-14) for t, v in found)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_clipped_sums_are_the_stored_ones(reduction):
    assert _agrees(_clipped(reduction))


def test_a_rule_that_forgets_the_bias_in_the_norm_is_noticed(monkeypatch):
    honest = Conv.sq_norms

    def forgetful(self, record):
        return {name: norms * (name != "bias") for name, norms in honest(self, record).items()}

    monkeypatch.setattr(Conv, "sq_norms", forgetful)
    with pytest.raises(NotIsolated, match="norm"):  # by the capture's own proof
        _clipped()
    monkeypatch.setattr(trials, "broken", lambda *_: None)  # and by the stored values, where nothing is sealed
    assert not _agrees(_clipped())
