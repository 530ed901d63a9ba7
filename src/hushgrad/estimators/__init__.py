"""Estimators: convex differentially private learning with scikit-learn's conventions."""

from __future__ import annotations

try:
    import sklearn.base  # noqa: F401
except ModuleNotFoundError as error:
    if error.name is not None and error.name.split(".")[0] == "sklearn":
        raise ModuleNotFoundError(
            "hushgrad.estimators needs scikit-learn; install it with: pip install 'hushgrad[sklearn]'", name="sklearn"
        ) from None
    raise

from hushgrad.estimators import bounds
from hushgrad.estimators.base import DPEstimator
from hushgrad.estimators.exponential import quantile, select
from hushgrad.estimators.linear_svc import DPLinearSVC
from hushgrad.estimators.logistic_regression import DPLogisticRegression
from hushgrad.estimators.regressors import DPLinearRegression, DPRidge
from hushgrad.estimators.search import DPGridSearch
from hushgrad.estimators.simple import DPMean, DPMedian

__all__ = [
    "DPEstimator",
    "DPGridSearch",
    "DPLinearRegression",
    "DPLinearSVC",
    "DPLogisticRegression",
    "DPMean",
    "DPMedian",
    "DPRidge",
    "bounds",
    "quantile",
    "select",
]
