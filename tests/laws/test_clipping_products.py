"""The C library's products: the same bits on any number of threads, and of each example whatever the others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hushgrad.clipping import _fused, _fused_products
from hushgrad.clipping.record import product
from hushgrad.clipping.rules import linear

pytestmark = pytest.mark.skipif(_fused._LIBRARY is None, reason="the C library was not built on this machine")


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _sum() -> list[Tensor]:
    return [product(_random(500, 101, seed=1).t(), _random(500, 37, seed=2))]


def _gradients() -> list[Tensor]:
    parts, norms = linear._formed(_random(9, 300, 37, seed=1), _random(9, 300, 29, seed=2), 64, 4)
    return [*parts, norms]


def _offsets() -> list[Tensor]:
    out = torch.empty(3, 7, 50, 17)
    assert _fused_products.offset_gradients(_random(7, 50, 290, seed=1), _random(7, 300, 17, seed=2), [0, 4, 10], 289, out)
    return [out]


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever vectors this processor has; and shares so small that threads have something to share."""
    monkeypatch.setattr(_fused_products, "_WIDEST", 64)
    monkeypatch.setattr(_fused, "_SHARE", 1000)


@pytest.mark.parametrize("work", [_sum, _gradients, _offsets])
def test_the_number_of_threads_changes_no_bit(work: Callable[[], list[Tensor]]) -> None:
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(work())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in made[1:] for a, b in zip(made[0], other, strict=True))


def test_an_example_has_the_same_gradient_whatever_the_others_are() -> None:
    x, g = _random(8, 70, 33, seed=1), _random(8, 70, 45, seed=2)
    (whole,), norms = linear._formed(x, g, 64, 8)
    x[3], g[5] = float("nan"), float("inf")
    (parts,), others = linear._formed(x, g, 64, 8)
    (alone,), norm = linear._formed(x[7:], g[7:], 64, 1)
    kept = [0, 1, 2, 4, 6, 7]
    assert torch.equal(parts[kept], whole[kept]) and torch.equal(others[kept], norms[kept])
    assert torch.equal(alone[0], whole[7]) and torch.equal(norm[0], norms[7])
    assert parts[3].isnan().all() and not others[5].isfinite()


def test_with_more_threads_than_examples_the_library_is_asked() -> None:
    x, g = _random(2, 5, 3, seed=1), _random(2, 5, 4, seed=2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert _fused_products.outer_gradients(x, g, 2, 2) is None
        assert _fused_products.outer_gradients(x, g, 64, 2) is not None  # by a public number, not by this one
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_left_to_torch() -> None:
    a, b = _random(4, 6, seed=1).t(), _random(4, 3, seed=2)
    assert not _fused_products.add_product(a.contiguous(), b, torch.empty(6, 3), fresh=True)
    assert not _fused_products.add_product(a, b[:3], torch.empty(6, 3), fresh=True)
    assert not _fused_products.add_product(a, b, torch.empty(3, 6), fresh=True)
    assert not _fused_products.add_product(a.double(), b.double(), torch.empty(6, 3).double(), fresh=True)
    assert torch.equal(product(a.double(), b.double()), a.double() @ b.double())
