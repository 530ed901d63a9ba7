"""Estimators: convex differentially private learning with scikit-learn's conventions."""

from __future__ import annotations

from hushgrad.estimators import bounds
from hushgrad.estimators.classifiers import DPLinearSVC, DPLogisticRegression
from hushgrad.estimators.exponential import quantile, select
from hushgrad.estimators.regressors import DPLinearRegression, DPRidge
from hushgrad.estimators.search import DPGridSearch
from hushgrad.estimators.simple import DPMean, DPMedian

__all__ = [
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
