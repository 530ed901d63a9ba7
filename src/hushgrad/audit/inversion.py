"""Model inversion, a demonstration: finds the input that a classifier takes for the most typical example of a class.

Gradient ascent on the input. Where a class is one person's data, the result resembles it; a demonstration of what a model gives away,
no measure of privacy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hushgrad import _check


def invert(
    model: nn.Module, label: int, *, shape: tuple[int, ...], steps: int = 200, learning_rate: float = 0.1, penalty: float = 0.01
) -> Tensor:
    """An input of ``shape`` in [0, 1] with the greatest log-probability of ``label``, minus ``penalty`` times its squared norm.

    Args:
        model: from an input to class scores.
        label: the class whose typical input is looked for.
        shape: of one input.
        steps: of gradient ascent.
        learning_rate: of each step.
        penalty: of the squared norm, against inputs that are all bright.

    >>> model = nn.Linear(4, 2)
    >>> _ = nn.init.zeros_(model.bias), model.weight.data.copy_(torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]]))
    >>> invert(model, 0, shape=(4,)).round().tolist()
    [1.0, 1.0, 0.0, 0.0]

    Reference: Fredrikson, Jha and Ristenpart 2015, "Model inversion attacks that exploit confidence information", algorithm 1.
    """
    x = torch.full((1, *shape), 0.5, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=_check.positive(learning_rate=learning_rate))
    target = torch.tensor([_check.integer(0, label=label)])
    for _ in range(_check.positive_int(steps=steps)):
        loss = nn.functional.cross_entropy(model(x), target) + penalty * x.square().sum()
        (x.grad,) = torch.autograd.grad(loss, [x])
        optimizer.step()
        with torch.no_grad():
            x.clamp_(0.0, 1.0)
    return x.detach()[0]


def likeness(image: Tensor, other: Tensor) -> float:
    """The correlation of two inputs: 1 for the same picture up to brightness and contrast."""
    pair = torch.stack([image.flatten().double(), other.flatten().double()])
    return float(torch.corrcoef(pair)[0, 1])
