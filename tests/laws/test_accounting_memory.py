"""Accounting leaves nothing large behind: what it computed with is given back."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

import hushgrad
from hushgrad.accounting.pld.bounds.fft_powers import Spectrum
from hushgrad.noise.power_series import convolved


class _Held(ctypes.Structure):  # glibc's struct mallinfo2
    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _held() -> int:
    """Bytes that this process has from the C library at this moment, freed ones left out."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("this C library does not say what it holds")
    ask.restype = _Held
    found = ask()
    return int(found.hblkhd + found.uordblks)


def _composed(n: int) -> None:
    spectrum = Spectrum(n)
    spectrum.multiply(np.full(8, 1 / 8), np.arange(8), 3)
    spectrum.inverse()


def _series(n: int) -> None:
    convolved(np.ones(n // 2), np.ones(n // 2))


@pytest.mark.parametrize("compute", [_composed, _series])
def test_a_large_transform_is_given_back(compute):
    compute(64)
    before = _held()
    for n in (3 << 18, 1 << 20, 5 << 17):
        compute(n)
    assert _held() - before < 1 << 20  # scipy's tables of these three hold 19 MB


def test_no_transform_keeps_its_tables():
    source = Path(hushgrad.__file__).parent
    taken = [
        line for file in source.rglob("*.py") for line in file.read_text().splitlines() if "import" in line and "scipy" in line
    ]
    assert [line for line in taken if "fft" in line and line != "from scipy.fft import next_fast_len"] == []
