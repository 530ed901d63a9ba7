"""Bounds on the data: given by the user, never read off the data.

A data-dependent maximum would leak exactly the record that a guarantee is meant to hide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from hushgrad import _check
from hushgrad.errors import ArgumentError

# Rows that a user normalised to the bound, in single precision too, may exceed it by rounding. They are scaled to the bound itself, so it
# holds whatever this is; it only says which rows are a mistake to be told.
_ROUNDING = 1e-5


_QUOTING = re.compile("complex data|could not convert|unable to convert", re.IGNORECASE)  # and then what could not be converted
_SIZES = (1e-50, 1e50)  # of norms and bounds: their squares, and products with a regulariser, are numbers, too
_TOO_FAR = (
    "Expected epsilon, delta, l2 and bounds on the data for which the noise is a number that double precision holds; these lead out of "
    "it. Scale the data, or choose less extreme values; nothing was released."
)


def validated(estimator: Any, *data: Any, **options: Any) -> Any:
    """scikit-learn's validation in double precision, without warnings about finite but large numbers.

    Its sums overflow if one record is huge, and a warning would reveal a record that is then scaled to the bound.
    """
    with unquoted():
        return validate_data(estimator, *data, dtype=np.float64, **options)


@contextmanager
def unquoted() -> Iterator[None]:
    """Suppress numpy's warnings, and remove quoted rows and words from validation errors, because errors end up in logs and mail."""
    try:
        with np.errstate(all="ignore"):
            yield
    except ValueError as problem:
        if not _QUOTING.match(str(problem)):
            raise problem from None  # which may quote them, too
        said = str(problem).splitlines()[0].split(":")[0].split("'")[0].rstrip()
        raise ArgumentError(f"{said}. Give rows of real numbers.") from None


@contextmanager
def representable() -> Iterator[None]:
    """Refuse arithmetic that leaves the range of double precision: infinite noise or NaN coefficients protect nothing.

    Underflow to zero is ignored, whatever numpy was told before, because it depends on the data which numbers are that small.
    """
    try:
        with np.errstate(all="raise", under="ignore"):
            yield
    except (ArithmeticError, np.linalg.LinAlgError):
        raise ArgumentError(_TOO_FAR) from None


def finite(**results: np.ndarray) -> None:
    """Refuse results that are not finite, for computations in which numpy raises no error."""
    if not all(np.isfinite(result).all() for result in results.values()):
        raise ArgumentError(_TOO_FAR)


def regulariser(l2: float | str, *, zero: bool = False) -> float | None:
    """The regulariser λ as a number, or None for "auto"."""
    if l2 == "auto":
        return None
    remedy = 'Use l2="auto" to have it chosen.'
    if zero and _check.non_negative(remedy, l2=l2) == 0:
        return 0.0
    return _check.between(*_SIZES, closed="both", remedy=remedy, l2=_check.positive(remedy, l2=l2))


class RowTooLong(ArgumentError):
    """A row is longer than the bound that the user promised."""


def bounded_rows(X: np.ndarray, data_norm: float | None, *, out_of_bounds: str) -> np.ndarray:
    """``X`` with rows of L2 norm at most ``data_norm``: longer rows are refused, or scaled down if asked for."""
    if data_norm is None:
        raise ArgumentError(
            "Expected data_norm=None to be a number. Give a bound on the L2 norm of a row that you know without looking at the "
            "data (after scaling rows to length 1 it is 1.0); a bound computed from the data would leak."
        )
    bound = _check.between(*_SIZES, closed="both", remedy="Scale the data.", data_norm=_check.positive(data_norm=data_norm))
    _check.one_of(("raise", "clip"), out_of_bounds=out_of_bounds)
    with np.errstate(all="ignore"):  # a square that leaves double precision is longer than any bound, or as short as zero
        norms = np.sqrt(np.einsum("ij,ij->i", X, X))
    if out_of_bounds == "raise" and bool((norms > bound * (1 + _ROUNDING)).any()):
        raise RowTooLong(  # how many rows, and by how much, is a matter of the data
            f"Expected data_norm={bound:g} to bound the L2 norm of every row; it does not. "
            'Scale the rows, give a larger data_norm, or set out_of_bounds="clip".'
        )
    if norms.max(initial=0.0) <= bound:
        return X
    with np.errstate(all="ignore"):
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
    if not (max(abs(low), abs(high)) <= _SIZES[1] and high - low >= max(_SIZES[0], 2.0**-20 * max(abs(low), abs(high)))):
        _check.fail(name, bounds, "to be of a size and a distance that double precision resolves", "Scale and shift the data.")
    return np.clip(y, low, high)


def with_intercept(X: np.ndarray, data_norm: float, constant: float) -> tuple[np.ndarray, float]:
    """``X`` with a constant column, and the bound on the norm of its rows."""
    if constant == 0:
        return X, data_norm
    return np.hstack([X, np.full((len(X), 1), constant)]), float(np.hypot(data_norm, constant))
