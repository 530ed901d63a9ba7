"""Example canaries for a user's own data: mislabelled and out-of-distribution examples, each in the training set by a fair coin.

They go through the user's own model and loop. Their gradients are not under our control, so bounds from them are weaker than those
from gradient canaries; what they show is the whole pipeline, data loading included. Score them by minus their loss after training
and bound epsilon with :func:`~hushgrad.audit.epsilon_one_run`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from hushgrad import _check


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleCanaries:
    """Examples made for an audit; ``members[j]`` says whether example j goes into the training set."""

    inputs: Tensor
    labels: Tensor
    members: np.ndarray

    def injected_into(self, dataset: Dataset) -> Dataset:
        """``dataset`` with the member canaries appended; its examples must be pairs (input, label)."""
        chosen = torch.from_numpy(np.flatnonzero(self.members))
        return ConcatDataset([dataset, TensorDataset(self.inputs[chosen], self.labels[chosen])])

    def __len__(self) -> int:
        return len(self.members)


def mislabelled(inputs: Tensor, labels: Tensor, *, classes: int, count: int, seed: int = 0) -> ExampleCanaries:
    """``count`` of the given examples, each with a wrong label drawn uniformly from the other classes.

    Take them from data that is *not* trained on otherwise: the right label of the same input would teach the model the opposite.

    Args:
        inputs: examples that are not trained on otherwise.
        labels: their right labels.
        classes: number of classes.
        count: how many canaries.
        seed: of the choice and of the wrong labels.

        >>> found = mislabelled(torch.zeros(10, 2), torch.zeros(10, dtype=torch.long), classes=3, count=5)
        >>> len(found), bool((found.labels == 0).any())
        (5, False)
    """
    rng = np.random.default_rng(seed)
    classes = _check.integer(2, classes=classes)
    if _check.positive_int(count=count) > len(inputs):
        _check.fail("count", count, f"to be at most the {len(inputs)} examples given")
    chosen = torch.from_numpy(rng.choice(len(inputs), size=count, replace=False))
    shift = torch.from_numpy(rng.integers(1, classes, size=count))
    return ExampleCanaries(
        inputs=inputs[chosen].clone(), labels=(labels[chosen] + shift) % classes, members=rng.random(count) < 0.5
    )


def out_of_distribution(inputs: Tensor, *, classes: int, count: int, seed: int = 0) -> ExampleCanaries:
    """``count`` inputs of independent uniform noise over the range of ``inputs``, with uniform labels: only memory can fit them.

    Args:
        inputs: examples whose shape and range are taken.
        classes: number of classes.
        count: how many canaries.
        seed: of the noise and the labels.

    >>> out_of_distribution(torch.rand(4, 1, 8, 8), classes=10, count=3).inputs.shape
    torch.Size([3, 1, 8, 8])
    """
    rng = np.random.default_rng(seed)
    count, classes = _check.positive_int(count=count), _check.integer(2, classes=classes)
    low, high = float(inputs.min()), float(inputs.max())
    noise = torch.from_numpy(rng.uniform(low, high, size=(count, *inputs.shape[1:]))).to(inputs.dtype)
    labels = torch.from_numpy(rng.integers(classes, size=count))
    return ExampleCanaries(inputs=noise, labels=labels, members=rng.random(count) < 0.5)
