"""All experiments: one file and one entry here make one."""

from __future__ import annotations

from hushgrad import _check
from hushgrad.experiments.base import Experiment

SOURCES = {
    "000": "Razaviyayn, lecture 12: DP-FTRL and denoising DP-SGD",
    "001": "Pillutla, slides: correlated noise provably beats independent noise (ICLR 2024, arXiv:2310.06771)",
    "002": "handwritten notes: DP-(S)GD",
    "003": "Wang et al., DP-LSSGD (MSML 2020)",
    "004": "Razaviyayn, lecture 9: approximate differential privacy and composition",
}

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment("composition", "000, 004", "how loose each composition theorem is on one mechanism", "composition:run"),
    Experiment("tree", "000", "tree aggregation as drawn, and against the best correlated noise", "tree:run"),
    Experiment(
        "mean-estimation",
        "001",
        "correlated noise gives error eta² log²(1/eta) where independent gives eta",
        "mean_estimation:run",
    ),
    Experiment("linear-regression", "001", "error grows with the effective dimension, not with d", "linear_regression:run"),
    Experiment(
        "laplacian-signals",
        "003",
        "Laplacian smoothing removes noise from smooth signals (figure 2)",
        "laplacian_signals:experiment",
    ),
    Experiment("laplacian-tables", "003", "gamma and beta of tables 3 and 4, and their limits", "laplacian_tables:run"),
    Experiment(
        "lecture-dpgd",
        "000, 002, 004",
        "the lecture's noise and risk bounds against tight noise and measured risk",
        "lecture_dpgd:run",
    ),
    Experiment("dp-rates", "001", "with clipping: 1/(rho T) + 1/T against 1/(rho T²) + 1/T", "dp_rates:run"),
    Experiment(
        "mnist-logistic",
        "003",
        "table 2 and figure 4 re-run under a valid guarantee, and what a better recipe reaches",
        "mnist_logistic:run",
        heavy=True,
    ),
    Experiment(
        "mnist-cnn", "001, 003", "six private methods on a small convolutional net (figures 5 and 7)", "mnist_cnn:run", heavy=True
    ),
    Experiment(
        "mnist-cnn-again",
        "003",
        "what the convolutional net left undecided, on fresh seeds whose number was fixed beforehand",
        "mnist_cnn:again",
        heavy=True,
        again="mnist-cnn",
    ),
    Experiment(
        "memorisation",
        "001",
        "secrets planted in the training text: exposure with and without privacy",
        "memorisation:run",
        heavy=True,
    ),
    Experiment(
        "cifar10",
        "000, 001, 003",
        "independent, correlated and denoised noise over epsilon: their order",
        "cifar10:run",
        heavy=True,
    ),
    Experiment(
        "cifar10-again",
        "001",
        "correlated noise at epsilon 16, left undecided, on fresh seeds whose number was fixed beforehand",
        "cifar10:again",
        heavy=True,
        again="cifar10",
    ),
    Experiment(
        "language-model",
        "001",
        "next character, privacy per speaker: DP-FTRL against DP-SGD without amplification",
        "language_model:run",
        heavy=True,
    ),
    Experiment(
        "language-model-again",
        "001",
        "what the language model left undecided, on fresh seeds whose number was fixed beforehand",
        "language_model:again",
        heavy=True,
        again="language-model",
    ),
)
"""All experiments, in the order of the results page."""


def find(name: str) -> Experiment:
    """The experiment of that name; a misspelt one is answered with the closest.

    >>> find("tree").source
    '000'
    """
    return {experiment.name: experiment for experiment in EXPERIMENTS}[_check.one_of([e.name for e in EXPERIMENTS], name=name)]
