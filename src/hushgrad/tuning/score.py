r"""Scores of trials. What the theorem needs: the score is part of the trial's private output.

A trial may look at private records only in ways that its event covers. So there are two kinds of scores:

* **public**: the accuracy or loss of the trained model on data that the guarantee does not have to cover. It is a function of
  the released model and of public data, hence free (post-processing).
* **private**: each private record is held out independently, the model is trained on the others, and the number of hits on
  the held-out records is released with Gaussian noise of ``score_noise``. One record changes the number by at most 1, so the
  event is ``Gaussian(score_noise)``. A record is either trained on or scored on, so the trial costs at most the larger of the two
  events; charged is their composition, which is simpler and never less.

The plain accuracy on held-out *private* records, as used without privacy, is not covered by anything.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hushgrad import _check
from hushgrad.events import Compose, Event, Gaussian
from hushgrad.noise import Source
from hushgrad.recipes.dataset import AugmentedImages, Data
from hushgrad.recipes.metrics import evaluate
from hushgrad.tuning.space import Settings


def trial_event(training: Event, settings: Settings) -> Event:
    """What one trial costs: the training and, if the score uses private records, the score."""
    return training if settings.score == "public" else Compose((training, Gaussian(settings.score_noise)))


def held_out(data: Data, settings: Settings, key: bytes) -> tuple[Data, TensorDataset]:
    """Split the data into records to train on and records to score on; each private record is assigned independently."""
    if data.groups is not None:
        _check.fail("score", "private", "to be 'public' where users are protected", "A user may have many held-out records.")
    coins = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    scored = torch.from_numpy(coins.random(len(data.train)) < settings.holdout)
    rest = data.train.part(~scored) if isinstance(data.train, AugmentedImages) else _part(data.train, ~scored)
    return replace(data, train=rest), _part(data.train, scored)


def _part(records: TensorDataset, chosen: Tensor) -> TensorDataset:
    return TensorDataset(*(t[chosen] for t in records.tensors))


def private_score(model: nn.Module, records: TensorDataset, settings: Settings, key: bytes) -> float:
    """The number of hits on held-out private records, plus N(0, score_noise²). Never divided by their number: that is private."""
    hits = 0.0
    if len(records):
        targets = records.tensors[1]
        if targets.dim() != 1:
            _check.fail("score", "private", "to be 'public' where a record has several targets")
        hits = evaluate(model, records)["test_accuracy"] * len(records)
    noise = Source(key=key).z(0, 0, torch.zeros(1, dtype=torch.float64))
    return float(round(hits)) + settings.score_noise * float(noise)
