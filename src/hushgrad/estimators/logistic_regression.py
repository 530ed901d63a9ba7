"""Differentially private logistic regression with scikit-learn's conventions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, softmax

from hushgrad import _check, _papers
from hushgrad._papers import Paper
from hushgrad.estimators.linear_classifier import LinearClassifier
from hushgrad.estimators.losses import LinearLoss, Logistic, Softmax

CHAUDHURI_2011_ERM = Paper(
    "chaudhuri2011erm",
    "Chaudhuri, Kamalika and Monteleoni, Claire and Sarwate, Anand D.",
    "Differentially Private Empirical Risk Minimization",
    "Journal of Machine Learning Research",
    arxiv="0912.0071",
    kind="article",
)
REDBERG_2023_OBJECTIVE = Paper(
    "redberg2023improving",
    "Redberg, Rachel and Koskela, Antti and Wang, Yu-Xiang",
    "Improving the Privacy and Practicality of Objective Perturbation for Differentially Private Linear Learners",
    "NeurIPS",
)


@dataclass(kw_only=True, eq=False, repr=False)
class DPLogisticRegression(LinearClassifier):
    r"""Differentially private logistic regression.

    Minimises Σ log-loss + l2/2 ‖θ‖² privately. ``method="objective"`` perturbs the objective and is calibrated by the vertex theorem of
    :mod:`hushgrad.estimators.objective`; "output" adds noise to the minimum; "gd" is full-batch noisy gradient descent with tail
    averaging; "auto" is "gd", or "objective" if there are many records for epsilon, see :mod:`hushgrad.estimators.rules`.

    **Formal guarantee.** ``fit`` is (epsilon, delta)-DP under ``relation`` with respect to one row, provided that ``data_norm`` (and
    ``classes``, where given) was chosen without looking at the data. With a ``random_state`` it is reproducible, hence not private
    against anyone who knows the seed; ``guarantee_`` says so.

        >>> from sklearn.datasets import load_breast_cancer
        >>> from sklearn.preprocessing import normalize
        >>> X, y = load_breast_cancer(return_X_y=True)
        >>> X = normalize(X / X.shape[1])                    # rows of length 1: a bound that needs no look at the data
        >>> model = DPLogisticRegression(epsilon=5.0, delta=1e-4, data_norm=1.0, random_state=0).fit(X, y)
        >>> model.guarantee_.epsilon
        5.0

    Args:
        epsilon: The privacy budget.
        delta: The failure probability; 0 for pure differential privacy ("objective" and "output").
        data_norm: A public bound on the L2 norm of a row. Required.
        method: "auto", "objective", "output" or "gd".
        l2: λ of the summed objective, or "auto".
        multi_class: "multinomial" (one joint release) or "ovr" (one per class, the budget divided), for more than two classes.
        fit_intercept: Whether to fit a constant; it is regularised, and costs a little sensitivity.
        classes: The public class labels; taken from ``y`` if None.
        relation: "add_remove", "replace_one" or "zero_out".
        out_of_bounds: What to do with rows longer than ``data_norm``: "raise" or "clip".
        tol: The certified gradient norm of the minimiser, in units of ``data_norm``; its effect is paid for.
        max_iter: The most iterations of the minimiser.
        gd_steps: Steps of method "gd".
        learning_rate: Step size of method "gd"; None for one that suits the row norm and the noise.
        random_state: None draws from the operating system; an int makes the fit reproducible.

    References:
        Chaudhuri, Monteleoni, Sarwate 2011 (objective perturbation); Redberg, Koskela, Wang 2023 (tight profiles).
    """

    papers = (CHAUDHURI_2011_ERM, REDBERG_2023_OBJECTIVE, _papers.BASSILY_2014_PRIVATE)

    multi_class: str = "multinomial"

    @classmethod
    def examples(cls):
        (by_itself,) = super().examples()
        others = ({"method": "output"}, {"method": "gd"}, {"multi_class": "ovr"})
        return (by_itself, *(cls(**by_itself.get_params() | other) for other in others))

    def predict_proba(self, X):
        """The probability of each class, in the order of ``classes_``."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([expit(-scores), expit(scores)])
        if self.multi_class == "multinomial":
            return softmax(scores, axis=1)
        p = expit(scores)
        return p / p.sum(axis=1, keepdims=True)

    def _joint_loss(self, classes: int) -> LinearLoss | None:
        if classes == 2:
            return Logistic()
        return Softmax(classes) if _check.one_of(("multinomial", "ovr"), multi_class=self.multi_class) == "multinomial" else None

    def _binary_loss(self) -> LinearLoss:
        return Logistic()
