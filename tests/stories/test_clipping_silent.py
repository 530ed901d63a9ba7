"""A layer to which no gradient came back in some pass: that says nothing of whose its rows are, and nothing of it is read twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture, Flat, base, rule
from hushgrad.clipping.proof import shares
from hushgrad.clipping.rules import VmapTree
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.testing.rules import one_by_one

B, D = 9, 6
FEW = [0, B // 2, B - 1]  # the examples that the second survey of a proof runs alone


class _Modality(nn.Module):
    """A branch that counts for examples that have it only."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.out = nn.Linear(D, D), nn.Linear(D, 2)
        self.branch = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Linear(D, D))

    def forward(self, x: Tensor, has: Tensor) -> Tensor:
        return self.out(self.main(x) + self.branch(x) * has)


class _Experts(nn.Module):
    """Each row to one of three experts by its first number, which is called without rows, too; ``room`` for so many."""

    def __init__(self, room: int | None = None) -> None:
        super().__init__()
        self.experts, self.out, self.room = nn.ModuleList(_expert() for _ in range(3)), nn.Linear(D, 2), room

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (x[:, 0].long() == k).nonzero().flatten()[: self.room]
            made = made.index_add(0, rows, expert(x[rows]))
        return self.out(x + made)


def _expert() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


def _inputs(model: nn.Module) -> tuple[Tensor, ...]:
    x = torch.rand(B, D, dtype=torch.float64)
    if isinstance(model, _Experts):
        x[:, 0] = torch.tensor([0.0, 1, 2, 1, 0, 1, 2, 0, 0]) + 0.5  # of the few, none goes to experts 1 and 2
        return (x,)
    has = torch.ones(B, 1, dtype=torch.float64)
    has[FEW] = 0
    return x, has


@pytest.mark.parametrize("make", [_Modality, _Experts])
def test_layers_that_are_idle_for_the_few_are_read_once(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    inputs = _inputs(model)
    alone = one_by_one(model, inputs, lambda y: y.square().sum())
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    model(*inputs).square().sum().backward()
    clipped = capture.collect(Flat(1e9))
    for name, g in alone.items():
        torch.testing.assert_close(clipped.raw_sums[name], g.sum(0))
    norms = torch.stack([g.flatten(1).square().sum(1) for g in alone.values()]).sum(0).sqrt()
    torch.testing.assert_close(clipped.raw_norms, norms)


@pytest.mark.parametrize("room", [20, 35])
def test_a_capacity_that_the_largest_batch_of_a_proof_reaches(room: int) -> None:
    """A structure that is proved for batches of so many examples has seen as many of them alike."""
    model = _Experts(room)
    capture = Capture(model)
    capture.attach()
    with pytest.raises(NotIsolated, match="among copies"):
        model(_inputs(model)[0].float())


# No size says whose a row is ---------------------------------------------------------------------------------------------------


class _Keys(nn.Module):
    """The second input, whose rows are the examples' own, is used for all of them: negatives within a batch, a memory, a mean."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.query, self.key, self.use = nn.Linear(D, D), nn.Linear(D, D), use

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        q, k = self.query(x), self.key(keys)
        return {"product": lambda: q @ k.t(), "mean": lambda: q + k.mean(0), "spread": lambda: q * (1 + k.std())}[self.use]()


@pytest.mark.parametrize("use", ["product", "mean", "spread"])
def test_an_input_with_a_row_for_each_example_is_not_taken_for_a_shared_one(use: str) -> None:
    model = _Keys(use)
    capture = Capture(model)
    capture.attach()
    with pytest.raises(NotIsolated, match=rf"an input of the shape \({B}, {D}\) for all {B} examples"):
        model(torch.randn(B, D), torch.randn(B, D))


def test_one_that_was_shared_by_another_number_of_examples_is() -> None:
    """A mask over T positions is one in a batch of T examples, too."""
    model = _Keys("mean")
    capture = Capture(model)
    capture.attach()
    keys = torch.randn(B, D)
    for n in (B - 1, B):
        model(torch.randn(n, D), keys).square().mean().backward()
        assert len(capture.collect(Flat(1.0)).raw_norms) == n


@pytest.mark.parametrize("together", [lambda a, b: torch.cat([a, b]), lambda a, b: torch.stack([a, b], 1).flatten(0, 1)])
def test_two_rows_of_each_example_are_not_put_in_an_order_by_a_guess(together: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = nn.Linear(D, 2), torch.randn(B, D)
    capture = Capture(model)
    capture.attach()
    capture.examples(B, dim=0)
    with pytest.raises(CaptureError, match="a dimension of their own"):
        model(together(x, x.flip(1)))


# Experts in one product ----------------------------------------------------------------------------------------------------------


class _Grouped(nn.Module):
    """All experts in one grouped product, rows sorted by expert, some of which get none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(4, 16, 16) / 4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        expert = (rows[:, 0].abs() * 2).long().clamp(max=2)
        order = expert.argsort(stable=True)
        ends = torch.bincount(expert, minlength=4).cumsum(0).int()
        made = torch.nn.functional.grouped_mm(rows[order], self.weight, offs=ends)
        return self.out(torch.zeros_like(made).index_copy(0, order, made).view_as(x).tanh().mean(1))


def test_the_shares_of_a_grouped_product_come_from_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = _Grouped(), torch.randn(5, 7, 16)
    alone = one_by_one(model, (x,), lambda y: y.square().sum())
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    monkeypatch.setattr(shares, "_one_by_one", lambda *_: pytest.fail("one example after the other"))
    model(x).square().sum().backward()
    clipped = capture.collect(Flat(1e9))
    for name, g in alone.items():
        torch.testing.assert_close(clipped.raw_sums[name], g.sum(0), rtol=1e-4, atol=1e-6)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in alone.values()]).sum(0).sqrt()
    torch.testing.assert_close(clipped.raw_norms, norms, rtol=1e-4, atol=1e-6)


def test_a_model_that_takes_so_many_examples_only_is_refused_in_a_sentence() -> None:
    """A table with a row for each place in the batch ends: what the model raises then is no answer."""

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(B + 1, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + 0 * self.table(torch.arange(len(x))).sum()

    capture = Capture(Ends())
    capture.attach()
    with pytest.raises(CaptureError, match="cannot be run for fewer or more examples"):
        capture.model(torch.randn(B, D))


class _Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(self.second)(self.first(x))


def test_a_layer_under_vmap_is_refused_with_a_remedy_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Mapped(), torch.randn(6, 7)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    with pytest.raises(CaptureError, match=r"second was called inside of torch\.func"):
        model(x)
    capture.detach()

    monkeypatch.setattr(base, "_RULES", dict(base._RULES))
    rule(_Mapped)(VmapTree)
    alone = one_by_one(model, (x,), lambda y: y.square().sum())
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    model(x).square().sum().backward()
    norms = torch.stack([g.flatten(1).square().sum(1) for g in alone.values()]).sum(0).sqrt()
    torch.testing.assert_close(capture.collect(Flat(1e9)).raw_norms, norms, rtol=1e-4, atol=1e-6)
