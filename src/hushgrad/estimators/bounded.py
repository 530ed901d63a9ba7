"""Bounds on the data: given by the user, never read off the data.

A data-dependent maximum would leak exactly the record that a guarantee is meant to hide.
"""

from __future__ import annotations

import numpy as np

from hushgrad import _check
from hushgrad.errors import ArgumentError

__all__ = ["RowTooLong", "bounded_rows", "bounded_values", "with_intercept"]

_ROUNDING = 1e-9  # rows that a user normalised to the bound may exceed it by rounding


class RowTooLong(ArgumentError):
    """What the user promised about the data does not hold."""


def bounded_rows(X: np.ndarray, data_norm: float | None, *, out_of_bounds: str) -> np.ndarray:
    """``X`` with rows of L2 norm at most ``data_norm``: longer rows are refused, or scaled down if asked for."""
    if data_norm is None:
        raise ArgumentError(
            "Expected data_norm=None to be a number. Give a bound on the L2 norm of a row that you know without looking at the "
            "data (after scaling rows to length 1 it is 1.0); a bound computed from the data would leak."
        )
    bound = _check.positive(data_norm=data_norm)
    _check.one_of(("raise", "clip"), out_of_bounds=out_of_bounds)
    norms = np.sqrt(np.einsum("ij,ij->i", X, X))
    longer = int((norms > bound * (1 + _ROUNDING)).sum())
    if longer and out_of_bounds == "raise":
        raise RowTooLong(
            f"Expected data_norm={bound:g} to bound the L2 norm of every row, but {longer} rows are longer. "
            'Scale the rows, give a larger data_norm, or set out_of_bounds="clip".'
        )
    if norms.max(initial=0.0) <= bound:
        return X
    return X * np.minimum(1.0, bound / np.maximum(norms, bound))[:, None]


def bounded_values(y: np.ndarray, bounds: tuple[float, float] | None, name: str = "bounds") -> np.ndarray:
    """``y`` clipped to an interval that the user knows without looking at the data."""
    if bounds is None:
        raise ArgumentError(
            f"Expected {name}=None to be (low, high). Give limits of the values that you know without looking at the data."
        )
    if np.shape(bounds) != (2,):
        _check.fail(name, bounds, "to be (low, high)", "Give two numbers that you know without looking at the data.")
    low, high = (_check.number("", **{name: end}) for end in bounds)
    if not low < high:
        _check.fail(name, bounds, "to be (low, high) with low < high")
    return np.clip(y, low, high)


def with_intercept(X: np.ndarray, data_norm: float, constant: float) -> tuple[np.ndarray, float]:
    """``X`` with a constant column, and the bound on the norm of its rows."""
    if constant == 0:
        return X, data_norm
    return np.hstack([X, np.full((len(X), 1), constant)]), float(np.hypot(data_norm, constant))
