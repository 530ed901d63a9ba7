"""Parameters with several parts: their joint norms without any gradient that is made for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture, Flat, joint_norms
from hushgrad.clipping.rules import linear
from hushgrad.clipping.rules.embedding import _sq_norm_there, table_sq_norm
from hushgrad.testing.rules import one_by_one, sum_of_sines

B, T, WORDS, D = 5, 3, 11, 4


class Translator(nn.Module):
    """One table, read by two halves, is the head's weight, too."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, D, padding_idx=padding), nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        read = self.table(ids[:, :T]).tanh().mean(1, keepdim=True)
        return self.head((self.table(ids[:, T:]) * read).cumsum(1).tanh())


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("kept", ["gram", "whole", "pieces"])
def test_a_table_that_is_read_twice_and_is_the_head(monkeypatch: pytest.MonkeyPatch, padding: int | None, kept: str) -> None:
    monkeypatch.setattr(joint_norms, "_by_sums", None)  # the general way is not taken
    monkeypatch.setattr(linear, "_prefers_gram", lambda *sizes: kept == "gram")
    monkeypatch.setattr(linear, "_PIECE", 2 * WORDS * D if kept == "pieces" else 1 << 20)
    torch.manual_seed(0)
    model, ids = Translator(padding).double(), torch.randint(WORDS, (B, 2 * T))  # ids occur in both halves
    expected = one_by_one(model, (ids,), sum_of_sines)["table.weight"]
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    sum_of_sines(model(ids)).backward()
    clipped = capture.collect(Flat(1e9))
    capture.detach()
    torch.testing.assert_close(clipped.raw_norms, expected.flatten(1).norm(dim=1), rtol=1e-12, atol=0)
    torch.testing.assert_close(clipped.raw_sums["table.weight"], expected.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("table", [5, 30], ids=["a small table", "a large one"])
def test_squared_norms_of_scattered_rows_are_the_same_here_and_on_a_device(table: int) -> None:
    torch.manual_seed(1)
    ids, g = torch.randint(-1, 5, (B, 3 * T)), torch.randn(B, 3 * T, D, dtype=torch.float64)
    dense = torch.zeros(B, table, D, dtype=torch.float64)
    for i, t in (ids >= 0).nonzero().tolist():
        dense[i, ids[i, t]] += g[i, t]
    expected = dense.flatten(1).square().sum(1)
    here, mass = table_sq_norm(ids, g, table)
    there, bound = _sq_norm_there(ids, g, skips=True)
    torch.testing.assert_close(here, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(there, expected, rtol=1e-12, atol=0)
    assert mass is not None and mass.parts > 1
    torch.testing.assert_close(mass.rows, bound.rows, rtol=1e-12, atol=0)
