r"""Exposure: how much better than chance a language model knows a secret that was in its training data (Secret Sharer).

Random token sequences are inserted into the data; afterwards the model's loss on each is ranked among the losses of other random
sequences, which it has never seen. A secret of rank 1 among |R| has exposure log2 |R|: it can be extracted by trying them in order.
It is a measurement of one attack, not a proof of privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from hushgrad import _check


def secret_sequences(count: int, *, length: int, vocabulary: int, prefix: Sequence[int] = (), seed: int = 0) -> Tensor:
    """``count`` distinct sequences of token ids: the ``prefix`` ("my number is"), then ``length`` random tokens.

    Args:
        count: how many sequences.
        length: of the random part, in tokens.
        vocabulary: number of token ids.
        prefix: ids that every sequence begins with.
        seed: of the random tokens.

    >>> secret_sequences(2, length=3, vocabulary=10, prefix=[7, 7]).shape
    torch.Size([2, 5])
    """
    count, length = _check.positive_int(count=count), _check.positive_int(length=length)
    vocabulary = _check.integer(2, vocabulary=vocabulary)
    if count > vocabulary**length:
        _check.fail("count", count, f"to be at most the {vocabulary**length} sequences that there are")
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found.update(dict.fromkeys(map(tuple, rng.integers(vocabulary, size=(count, length)).tolist())))
    body = torch.tensor(list(found)[:count])
    return torch.cat([torch.tensor(list(prefix), dtype=torch.long).expand(count, -1), body], dim=1)


def sequence_losses(model: nn.Module, sequences: Tensor, *, start: int = 1) -> Tensor:
    """Minus the log-probability that ``model`` (token ids to logits of the next token) gives to the tokens from ``start`` on.

    Args:
        model: from token ids to logits of the next token.
        sequences: token ids, one sequence in each row.
        start: the first token whose probability counts.
    """
    start = _check.integer(1, start=start, remedy="The first token has no prediction.")
    with torch.no_grad():
        logits = model(sequences[:, :-1])
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), sequences[:, 1:], reduction="none")
    return losses[:, start - 1 :].sum(dim=1)


def exposure(secret_losses: ArrayLike, reference_losses: ArrayLike) -> np.ndarray:
    r"""log2 |R| - log2 rank for each secret, ranked by loss among the reference sequences (ties count half).

        >>> exposure([0.0, 2.5], [1.0, 2.0, 3.0]).round(3).tolist()  # first of 4; third of 4
        [2.0, 0.415]

    A secret that the model does not know has a uniform rank, hence an expected exposure of about 1 / ln 2 = 1.44 bits.
    Reference: Carlini et al. 2019, "The Secret Sharer", definition 3, with the rank among a random sample of the space.
    """
    secrets, references = np.atleast_1d(np.asarray(secret_losses, float)), np.asarray(reference_losses, float)
    if references.ndim != 1 or not references.size:
        _check.fail("reference_losses", reference_losses, "to be a row of at least one loss")
    if np.isnan(secrets).any() or np.isnan(references).any():
        _check.fail("losses", np.nan, "to be numbers", "A model whose losses are NaN has diverged.")
    ordered = np.sort(references)
    below, upto = np.searchsorted(ordered, secrets, "left"), np.searchsorted(ordered, secrets, "right")
    rank = 1.0 + below + 0.5 * (upto - below)
    return np.asarray(math.log2(len(ordered) + 1) - np.log2(rank))
