"""The base class of private estimators: papers, released attributes with reasons, and small instances for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from sklearn.base import BaseEstimator

from hushgrad._papers import Paper
from hushgrad.events import Relation

PUBLIC = "a function of the arguments and of the shape of X"
LABELS = "given, or taken from the data and noted in the guarantee"


class DPEstimator(BaseEstimator):
    """A scikit-learn estimator whose ``fit`` is differentially private; the guarantee is in ``guarantee_``.

    **Formal guarantee.** A fitted estimator, whether printed, pickled or read attribute by attribute, reveals its arguments and what
    ``released`` lists, and nothing else. Conformance tests check this for every estimator.

        >>> import numpy as np
        >>> from hushgrad.estimators import DPLogisticRegression
        >>> x = np.random.default_rng(0).normal(size=(200, 2)) / 10
        >>> fitted = DPLogisticRegression(epsilon=1.0, delta=1e-6, data_norm=1.0).fit(x, x[:, 0] > 0)
        >>> fitted.coef_.shape, sorted(fitted.released)
        ((1, 2), ['classes_', 'coef_', 'guarantee_', 'intercept_', 'l2_', 'n_features_in_', 'n_iter_', 'noise_scale_'])
    """

    papers: ClassVar[tuple[Paper, ...]] = ()
    """Where its mechanism is described and proved."""
    released: ClassVar[Mapping[str, str]] = {"guarantee_": PUBLIC, "n_features_in_": PUBLIC}
    """Each fitted attribute, and the theorem or the public facts that let it out."""

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """Small instances with a large epsilon and a seed: what the conformance tests run over."""
        return (cls(epsilon=1e4, data_norm=10.0, out_of_bounds="clip", random_state=0),)


@dataclass(eq=False, repr=False)
class OnBoundedRows(DPEstimator):
    """An estimator of rows whose L2 norm is at most ``data_norm``, and the arguments that all of these have."""

    epsilon: float = 1.0
    _: KW_ONLY
    delta: float = 1e-6
    data_norm: float | None = None
    relation: str | Relation = "add_remove"
    out_of_bounds: str = "raise"
    random_state: Any = None
