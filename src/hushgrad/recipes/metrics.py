r"""Test metrics on records that the guarantee does not cover, with those of a constant prediction for comparison.

A model that always predicts the most frequent class can have an accuracy of 88 %. So every evaluation gives the accuracy of that constant
(``test_majority``), the mean of the classes' accuracies (``test_balanced_accuracy``; 1/classes for any constant) and the area under the
ROC curve (``test_auc``; 1/2 for a constant; for more than two classes the mean of one against the rest), and says so if a model is
no better than a constant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp
from torch import nn
from torch.nn import functional as F


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Any, *, batch_size: int = 1000) -> dict[str, float]:
    """Loss, accuracy and figures to compare them with, on a test set that the guarantee does not cover.

    Args:
        model: gives scores (rows, classes, ...).
        dataset: a ``TensorDataset`` of inputs and class numbers.
        batch_size: rows at a time.
    """
    loss, hits, targets, found = 0.0, 0, 0, []
    for scores, y in _answers(model, dataset, batch_size):
        loss += float(F.cross_entropy(scores, y, reduction="sum"))
        hits += int((scores.argmax(dim=1) == y).sum())
        targets += y.numel()
        if y.dim() == 1:
            found.append(scores.double().cpu().numpy())
    metrics = {"test_loss": loss / targets, "test_accuracy": hits / targets}
    if not found:
        return metrics
    return metrics | _compared(np.concatenate(found), dataset.tensors[1].cpu().numpy())


@torch.no_grad()
def confusion(model: nn.Module, dataset: Any, *, batch_size: int = 1000) -> list[list[int]] | None:
    """How often each class (row) was predicted as each class (column); None if a record has several targets.

    Args:
        model: gives scores (rows, classes).
        dataset: a ``TensorDataset`` of inputs and class numbers.
        batch_size: rows at a time.
    """
    if dataset.tensors[1].dim() != 1:
        return None
    counts: np.ndarray | None = None
    for scores, y in _answers(model, dataset, batch_size):
        classes = scores.shape[1]
        counts = np.zeros((classes, classes), np.int64) if counts is None else counts
        np.add.at(counts, (y.cpu().numpy(), scores.argmax(dim=1).cpu().numpy()), 1)
    return None if counts is None else counts.tolist()


def _answers(model: nn.Module, dataset: Any, batch_size: int) -> Any:
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    inputs, labels = dataset.tensors
    for x, y in zip(inputs.split(batch_size), labels.split(batch_size), strict=True):
        yield model(x.to(device)), y.to(device)
    model.train(was_training)


def _compared(scores: np.ndarray, y: np.ndarray) -> dict[str, float]:
    counts = np.bincount(y, minlength=scores.shape[1])
    hits = np.bincount(y[scores.argmax(axis=1) == y], minlength=scores.shape[1])
    there = counts > 0
    metrics = {
        "test_majority": float(counts.max() / len(y)),
        "test_balanced_accuracy": float((hits[there] / counts[there]).mean()),
        "test_records": float(len(y)),
    }
    told: list[int] = np.flatnonzero(there & (counts < len(y))).tolist() if np.isfinite(scores).all() else []
    return metrics | ({"test_auc": float(np.mean([area(_odds(scores, k), y == k) for k in told]))} if told else {})


def _odds(scores: np.ndarray, k: int) -> np.ndarray:
    """The log-odds of a class: ordered like its probabilities, which are all 1 if a model is certain."""
    return np.asarray(scores[:, k] - logsumexp(np.delete(scores, k, axis=1), axis=1))


def area(scores: np.ndarray, positive: np.ndarray) -> float:
    """The area under the ROC curve: how often a positive record has a larger score than another one; equal scores count half.

    >>> area(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True]))
    0.875
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    ones = int(positive.sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * (len(scores) - ones)))


def verdict(test: Mapping[str, float]) -> str:
    """A sentence if the accuracy is no better than that of a constant, within two standard errors of the test records."""
    if "test_majority" not in test:
        return ""
    constant, records = test["test_majority"], max(1.0, test["test_records"])
    spread = math.sqrt(max(constant * (1 - constant), 1 / records) / records)
    if test["test_accuracy"] >= constant + 2 * spread:
        return ""
    ranks = test.get("test_auc", 0.5)
    but = f" It does rank records, though: AUC {ranks:.3f}; another threshold may serve." if ranks > 0.6 else ""
    return (
        f"No better than a constant: always naming the most frequent class would be right in {constant:.2%} of the test records, "
        f"this model is in {test['test_accuracy']:.2%}.{but}"
    )


def compared(test: Mapping[str, float]) -> str:
    """Lines with the figures to compare an accuracy with, and a warning if the model is no better than a constant."""
    if "test_majority" not in test:
        return ""
    auc = f", AUC {test['test_auc']:.4f}" if "test_auc" in test else ""
    mean = f"Mean over the classes: {test['test_balanced_accuracy']:.2%}{auc}."
    said = verdict(test)
    return f"Always the most frequent class: {test['test_majority']:.2%}. {mean}\n" + (f"{said}\n" if said else "")
