"""Records and losses that several families share: each loss is the mean over the examples of one that needs that example alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.specimen import Sizes

__all__ = ["VOCABULARY", "causal", "class_of", "classes", "draw", "images", "masked", "spans", "texts", "to_text", "tokens"]

VOCABULARY = 40
_PAD = 1


def draw(seed: int) -> torch.Generator:
    """A generator of its own for each record: one example's numbers do not depend on how many there are."""
    return torch.Generator().manual_seed(seed)


def texts(sizes: Sizes) -> list[dict[str, Tensor]]:
    """Token ids, a mask with padding of different lengths, and a class."""
    records = []
    for i in range(sizes.batch):
        ids = torch.randint(5, VOCABULARY - 3, (sizes.length,), generator=draw(i))
        mask = torch.ones(sizes.length, dtype=torch.long)
        padding = i % min(4, sizes.length)
        if padding:
            ids[-padding:], mask[-padding:] = _PAD, 0
        records.append({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(i % 2)})
    return records


def images(side: int, *, channels: int = 3, classes: int = 2, key: str = "") -> Any:
    """A maker of random pictures with a class: pairs, or dicts with the picture under ``key``."""

    def records(sizes: Sizes) -> list[Any]:
        made = []
        for i in range(sizes.batch):
            picture = torch.randn(channels, side, side, dtype=torch.float64, generator=draw(i))
            label = torch.tensor(i % classes)
            made.append({key: picture, "labels": label} if key else (picture, label))
        return made

    return records


def _read(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


def _own_mean(losses: Tensor, counts: Tensor) -> Tensor:
    return ((losses * counts).sum(1) / counts.sum(1).clamp(min=1)).mean()


def classes(model: nn.Module, batch: Any) -> Tensor:
    """One class for each text."""
    return F.cross_entropy(_read(model, batch).logits, batch["labels"])


def causal(model: nn.Module, batch: Any) -> Tensor:
    """The next token; a text of one token predicts itself."""
    scores, ids, mask = _read(model, batch).logits, batch["input_ids"], batch["attention_mask"].double()
    if ids.shape[1] > 1:
        scores, ids, mask = scores[:, :-1], ids[:, 1:], mask[:, 1:]
    return _own_mean(F.cross_entropy(scores.transpose(1, 2), ids, reduction="none"), mask)


def masked(model: nn.Module, batch: Any) -> Tensor:
    """Each token itself."""
    losses = F.cross_entropy(_read(model, batch).logits.transpose(1, 2), batch["input_ids"], reduction="none")
    return _own_mean(losses, batch["attention_mask"].double())


def tokens(model: nn.Module, batch: Any) -> Tensor:
    """A class for each token."""
    return F.cross_entropy(_read(model, batch).logits.transpose(1, 2), batch["input_ids"] % 2, reduction="none").mean(1).mean()


def spans(model: nn.Module, batch: Any) -> Tensor:
    """Where an answer begins and ends."""
    out, place = _read(model, batch), batch["labels"] % batch["input_ids"].shape[1]
    return F.cross_entropy(out.start_logits, place) + F.cross_entropy(out.end_logits, place)


def to_text(model: nn.Module, batch: Any) -> Tensor:
    """Encoder and decoder: the text from itself."""
    ids = batch["input_ids"]
    scores = model(input_ids=ids, attention_mask=batch["attention_mask"], decoder_input_ids=ids).logits
    return F.cross_entropy(scores.transpose(1, 2), ids, reduction="none").mean(1).mean()


def class_of(model: nn.Module, batch: Any) -> Tensor:
    """One class for each picture, of a model that is given the picture alone."""
    picture, label = batch
    out = model(picture)
    if isinstance(out, dict):
        out = out["out"]
    elif not isinstance(out, Tensor):
        out = out.logits if hasattr(out, "logits") else out[0]
    return F.cross_entropy(out, label)
