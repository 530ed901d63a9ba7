"""Clipped sums of tables as sparse rows are the dense sums, for every kind of batch."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hushgrad.clipping import Capture, Flat, PerLayer, _fused, _fused_products
from hushgrad.clipping.rules.embedding import Rows, rows_sq_norm
from hushgrad.clipping.sums import RowSum, Sum

ROWS, WIDTH = 12, 3


class Model(nn.Module):
    def __init__(self, table: nn.Module, twice: bool = False) -> None:
        super().__init__()
        self.table, self.out, self.twice = table, nn.Linear(WIDTH, 1), twice

    def forward(self, ids: Tensor) -> Tensor:
        read = self.table(ids)
        if self.twice:
            read = read * self.table(ids.flip(1))
        return self.out(read.mean(1) if read.dim() == 3 else read).tanh()


TABLES = {
    "embedding": lambda: nn.Embedding(ROWS, WIDTH),
    "padding": lambda: nn.Embedding(ROWS, WIDTH, padding_idx=1),
    "bags": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=1),
}


def _collected(model: nn.Module, batches: list[Tensor], *, rows: bool, fold: bool, units: Tensor | None, clipper):
    capture = Capture(model)
    capture.attach()
    if rows:
        capture.keep_rows(["table.weight"])
        assert capture.by_rows == {"table.weight"} and not capture.scattered
    capture.fold_with(clipper if fold else None)
    start = 0
    for ids in batches:
        if not len(ids):
            continue
        if units is not None:
            capture.units(units[start : start + len(ids)])
            start += len(ids)
        model(ids).mean().backward()
    clipped = capture.collect(clipper, scale=0.25)
    capture.detach()
    return clipped


def _same(model: nn.Module, batches: list[Tensor], *, fold=False, units=None, clipper=None) -> Tensor:
    clipper = clipper or Flat(0.3)
    options = {"fold": fold, "units": units, "clipper": clipper}
    dense = _collected(copy.deepcopy(model), batches, rows=False, **options)
    sparse = _collected(model, batches, rows=True, **options)
    assert sparse.raw_sums["table.weight"].is_sparse
    for name, total in dense.raw_sums.items():
        torch.testing.assert_close(sparse.raw_sums[name].to_dense(), total, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sparse.raw_norms, dense.raw_norms, rtol=0, atol=0, equal_nan=True)
    assert sparse.rejected == dense.rejected
    return sparse.raw_sums["table.weight"]


@settings(max_examples=40, deadline=None)
@given(
    table=st.sampled_from(sorted(TABLES)),
    sizes=st.lists(st.integers(0, 5), max_size=4),
    length=st.integers(2, 5),
    twice=st.booleans(),
    fold=st.booleans(),
    by_unit=st.booleans(),
    per_layer=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sparse_rows_add_up_to_the_dense_sum(table, sizes, length, twice, fold, by_unit, per_layer, seed):
    torch.manual_seed(seed)
    model = Model(TABLES[table](), twice).double()
    batches = [torch.randint(ROWS, (size, length)) for size in sizes]
    # a unit of a folded batch is clipped with it, so that no other batch may have it
    first = [3 * k if fold else 0 for k, size in enumerate(sizes) for _ in range(size)]
    units = torch.randint(3, (sum(sizes),)) + torch.tensor(first, dtype=torch.int64) if by_unit else None
    _same(model, batches, fold=fold, units=units, clipper=PerLayer(0.3) if per_layer else None)


@pytest.mark.parametrize("fold", [False, True])
def test_an_example_without_a_finite_gradient_adds_no_row(fold):
    torch.manual_seed(0)
    model = Model(nn.Embedding(ROWS, WIDTH)).double()
    with torch.no_grad():
        model.table.weight[7] = float("nan")
    batches = [torch.tensor([[1, 2], [7, 3], [4, 2]]), torch.tensor([[5, 5], [7, 8]])]
    total = _same(model, batches, fold=fold).coalesce()
    assert set(total.indices().flatten().tolist()) <= {1, 2, 4, 5} and bool(total.values().isfinite().all())


def test_many_micro_batches_never_keep_more_rows_than_the_table_has():
    total, dense = RowSum(torch.empty(5, 2), torch.float64), torch.zeros(5, 2, dtype=torch.float64)
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        ids, values = torch.randint(5, (4,), generator=g), torch.randn(4, 2, generator=g).double()
        weights = torch.rand(4, generator=g, dtype=torch.float64)
        total.add_rows(ids, values, weights)
        dense.index_add_(0, ids, values * weights.unsqueeze(1))
        assert total.buffer._nnz() <= 5
    torch.testing.assert_close(total.buffer.to_dense(), dense)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("K", [0, 1, 300])
def test_a_row_that_the_table_does_not_have_is_refused_before_anything_is_added(K, threads):
    table, before = torch.zeros(50, 40), torch.get_num_threads()
    ids, values, weights = torch.randint(50, (K + 1,)), torch.ones(K + 1, 40), torch.ones(K + 1)
    torch.set_num_threads(threads)
    try:
        for wrong in (-1, 50, 2**40):
            ids[K] = wrong
            assert not _fused_products.add_rows(ids, values, weights, table) and not table.any()
            with pytest.raises((IndexError, RuntimeError)):  # torch says so
                Sum(table, torch.float32, torch.zeros(50, 40)).add_rows(ids, values, weights)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_norms_of_rows_do_not_depend_on_how_threads_share_them(threads, monkeypatch):
    monkeypatch.setattr(_fused, "_SHARE", 64)
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    example = torch.randint(9, (700,), generator=generator).sort()[0]
    rows = Rows(torch.randint(5, (700,), generator=generator), example, torch.randn(700, 6, generator=generator), 11)
    wanted = torch.zeros(11, 5, 6, dtype=torch.float64).index_put_((example, rows.ids), rows.values.double(), accumulate=True)
    torch.set_num_threads(threads)
    try:
        norms, mass = rows_sq_norm(rows, 5)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(norms, wanted.square().sum((1, 2)))
    counts = torch.zeros(11, 5, dtype=torch.int64).index_put_((example, rows.ids), torch.tensor(1), accumulate=True)
    assert mass is not None and mass.parts == int(counts.max()) and bool((mass.rows >= norms.sqrt() * 0.999).all())


def test_an_empty_sum_is_a_table_without_rows():
    total = RowSum(torch.empty(5, 2), torch.float32)
    assert total.buffer.coalesce().values().shape == (0, 2) and total.buffer.shape == (5, 2)
    assert Sum(torch.empty(5, 2), torch.float32).buffer.shape == (5, 2)


def test_rows_that_a_rule_cannot_name_are_all_rows():
    assert nn.Embedding in {type(site.module) for site in _owners()} and _owners()[0].rule.reads((torch.tensor([3]),), {}) == 3
    linear = Capture(Model(nn.Embedding(ROWS, WIDTH)))
    linear.attach()
    assert linear.owners("out.weight")[0].rule.reads((torch.ones(1),), {}) is None
    linear.keep_rows(["out.weight", "no such name"])  # only what scatters
    assert linear.by_rows == frozenset() and linear.scattered == {"table.weight"}


def _owners():
    capture = Capture(Model(nn.Embedding(ROWS, WIDTH)))
    capture.attach()
    return capture.owners("table.weight")
