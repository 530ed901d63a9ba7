"""Scattered rows of a table's noise are the rows of the table's noise, bit for bit, whatever draws them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.errors import ArgumentError
from hushgrad.noise import _kernel
from hushgrad.noise.source import Source
from hushgrad.noise.table_rows import rows_of

KERNELS = {"numpy": _kernel.NumpyKernel()}
if isinstance(_kernel.KERNEL, _kernel.CKernel):
    KERNELS |= {"c": _kernel.KERNEL, "c without a cipher": copy.copy(_kernel.KERNEL)}
    KERNELS["c without a cipher"].cipher = 0  # as on a processor without AES instructions


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    monkeypatch.setattr(_kernel, "KERNEL", KERNELS[request.param])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 60), max_size=40),
    width=st.sampled_from([1, 2, 7, 128, 255, 256, 300]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    step=st.integers(0, 2**48 - 1),
    index=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("drawn_by", KERNELS)
def test_any_rows_in_any_order_are_those_of_the_whole_table(drawn_by, rows, width, dtype, step, index):
    source, before = Source(seed=2), _kernel.KERNEL
    whole = source.z(step, index, torch.empty(61, width, dtype=dtype))
    _kernel.KERNEL = KERNELS[drawn_by]
    try:
        drawn = rows_of(source, step, index, torch.tensor(rows, dtype=torch.int64), width, dtype=dtype)
    finally:
        _kernel.KERNEL = before
    assert drawn.shape == (len(rows), width) and torch.equal(drawn, whole[rows])


def test_each_row_is_the_draw_at_its_own_offset(kernel):
    source, like = Source(seed=2), torch.empty(5)
    drawn = rows_of(source, 3, 1, torch.tensor([10**9, 4], dtype=torch.int32), 5)
    assert torch.equal(drawn[0], source.z(3, 1, like, offset=5 * 10**9))
    assert torch.equal(drawn[1], source.z(3, 1, like, offset=20))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads, kernel):
    source, before = Source(seed=2), torch.get_num_threads()
    rows = torch.arange(4000).flip(0)[::2].contiguous()
    whole = source.z(0, 0, torch.empty(4000, 150))
    torch.set_num_threads(threads)
    try:
        assert torch.equal(rows_of(source, 0, 0, rows, 150), whole[rows])
        assert torch.equal(rows_of(source, 0, 0, torch.arange(4000), 150), whole)
    finally:
        torch.set_num_threads(before)


def test_what_has_no_address_is_refused(kernel):
    source, rows = Source(seed=2), torch.tensor([1])
    with pytest.raises(ArgumentError, match="secure"):
        rows_of(Source(seed=2, secure=True), 0, 0, rows, 4)
    with pytest.raises(ArgumentError, match="row=-1"):
        rows_of(source, 0, 0, torch.tensor([3, -1]), 4)
    with pytest.raises(ArgumentError, match="offset"):
        rows_of(source, 0, 0, torch.tensor([2**48]), 4)
    with pytest.raises(ArgumentError, match="step"):
        rows_of(source, 2**48, 0, rows, 4)
    with pytest.raises(ArgumentError, match="dtype"):
        rows_of(source, 0, 0, rows, 4, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="width"):
        rows_of(source, 0, 0, rows, 0)
