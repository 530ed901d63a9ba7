"""One odd record (not finite, too large, one more of them) leaves the weights and formulas of all others as they are, bit for bit.

Others that are alike add up whatever it moves them by: with 1000 of them, a last bit of each is 1e-4 C.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hushgrad.clipping import Automatic, Capture, Clipper, Flat, PerLayer, _fused
from hushgrad.clipping.certificate import Certificate
from hushgrad.clipping.rules import linear

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(20, 70), (20,)),
    "layers": (lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3)), (20,)),
    "positions": (lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3)), (5, 20)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), (2, 6, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (5, 8)),
}
CLIPPERS: list[Clipper] = [Flat(1.0), Automatic(1.0), PerLayer(1.0)]


def _alike(make: Callable[[], nn.Module], shape: tuple[int, ...], seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, 64 examples that are the same one, and their targets; and at the end one that is another."""
    torch.manual_seed(seed)
    model, x = make(), torch.randn(shape).expand(65, *shape).clone() * 3
    x[64] = torch.randn(shape)
    with torch.no_grad():
        one = torch.randn(model(x[:2]).shape[1:]) * 30
    return model, x, one.expand(65, *one.shape).clone()


def _sums(capture: Capture, x: Tensor, y: Tensor, clip: Clipper, scale: float = 1 / 9) -> Tensor:
    """<output, target> is an example's loss; one with a target of zeros has none."""
    capture.discard()
    capture.examples(len(x), usual=64)
    losses = (capture.model(x) * y).flatten(1).sum(1)
    torch.where(y.flatten(1).abs().sum(1) == 0, 0 * losses, losses).sum().backward()
    return torch.cat([t.double().flatten() for t in capture.collect(clip, scale=scale).raw_sums.values()])


@pytest.mark.parametrize("clip", CLIPPERS, ids=lambda clip: type(clip).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_a_record_that_is_not_finite_leaves_the_others_their_weights(name: str, clip: Clipper) -> None:
    """On another path than the usual one weights were scaled before they were rounded: all others' moved, by up to 7e-7 of themselves."""
    for seed in range(3):
        model, x, y = _alike(*MODELS[name], seed)
        capture = Capture(model, loss_reduction="sum")
        capture.attach()
        sums = []
        for odd in (0.0, float("nan"), float("inf")):
            y[64] = odd
            sums.append(_sums(capture, x, y, clip))
        assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
        capture.detach()


@pytest.mark.parametrize("size", [1e25, 3e38, float("inf")])
def test_a_record_that_is_too_large_leaves_the_others_their_certified_bounds(size: float) -> None:
    """Where a row is too large masses are written down, also those of others: their norms' bounds grew by 2^-37."""
    model, x, y = _alike(*MODELS["linear"], 0)
    capture = Capture(model, loss_reduction="sum", certificate=Certificate(1000, 1000))
    capture.attach()
    y[64] = 0
    before = _sums(capture, x, y, Flat(1.0), scale=1.0)
    x[64] = size
    assert float((_sums(capture, x, y, Flat(1.0), scale=1.0) - before).norm()) < 1e-13
    capture.detach()


@pytest.mark.parametrize("odd", [1.0, float("nan")])
def test_one_record_more_leaves_the_kernel_of_a_weighted_sum(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was chosen by how many are here."""
    monkeypatch.setattr(linear, "_AT_MOST", 64 * 20)
    served, original = [], linear._outer_sums

    def noted(*args: Tensor) -> tuple[Tensor, Tensor] | None:
        served.append(original(*args))
        return served[-1]

    monkeypatch.setattr(linear, "_outer_sums", noted)
    model, x, y = _alike(lambda: nn.Linear(20, 3), (20,), 0)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    y[64] = odd
    for some in (64, 65):
        _sums(capture, x[:some], y[:some], Flat(1.0))
    capture.detach()
    assert {made is None for made in served} == {_fused._LIBRARY is None}
