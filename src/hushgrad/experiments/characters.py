"""Text for small character models: a fixed alphabet, windows, speakers, and a model of the last few characters."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad.experiments.base import Context
from hushgrad.experiments.training import folder
from hushgrad.recipes.files import find, lines

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # fixed, so that it tells nothing about the data
# Shakespeare, Romeo and Juliet, II.2 (public domain), for the quick forms.
VERSES = Path(__file__).with_name("verses.txt").read_text(encoding="utf-8").splitlines()
_NUMBER = {character: number for number, character in enumerate(ALPHABET)}


def encoded(words: str) -> Tensor:
    """The numbers of the characters; a character outside the alphabet becomes a space.

    >>> encoded("ab é").tolist()
    [66, 67, 1, 1]
    """
    return torch.tensor([_NUMBER.get(character, 1) for character in words], dtype=torch.long)


def windows(words: str, length: int) -> Tensor:
    """Pieces of ``length`` + 1 characters without overlap: a model reads all but the last and predicts all but the first."""
    ids = encoded(words)
    count = len(ids) // (length + 1)
    return ids[: count * (length + 1)].view(count, length + 1)


def text(context: Context) -> str:
    """Tiny Shakespeare, or the embedded verses."""
    if context.quick:
        return "\n".join(VERSES)
    return "\n".join(lines(find(folder(context, "tinyshakespeare"), "input.txt")))


def speeches(context: Context) -> dict[str, str]:
    """The text of each speaker; in the quick version invented speakers who each say some of the embedded verses."""
    if context.quick:
        rng = random.Random(1)
        return {f"speaker {i}": "\n".join(rng.sample(VERSES, 6)) for i in range(300)}
    said: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", text(context)):
        name, colon, words = block.partition(":\n")
        if colon:
            said.setdefault(name, []).append(words)
    return {name: "\n".join(parts) for name, parts in sorted(said.items())}


class Recent(nn.Module):
    """Scores of the next character from the last few: embeddings, side by side, and one linear layer (log-bilinear)."""

    def __init__(self, *, reach: int = 4, width: int = 8) -> None:
        super().__init__()
        self.reach = reach
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.head = nn.Linear(reach * width, len(ALPHABET))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, alphabet, time): the layout that cross_entropy takes."""
        length = ids.shape[1]
        padded = F.pad(self.embedding(ids), (0, 0, self.reach - 1, 0))
        near = torch.cat([padded[:, i : i + length] for i in range(self.reach)], dim=2)
        scores: Tensor = self.head(near)
        return scores.transpose(1, 2)


@torch.no_grad()
def bits(model: nn.Module, pieces: Tensor, *, part: int = 500) -> float:
    """Bits per character that ``model`` needs for the windows ``pieces``: the lower the better."""
    losses = [F.cross_entropy(model(p[:, :-1]), p[:, 1:], reduction="sum") for p in pieces.split(part)]
    return float(torch.stack(losses).sum()) / pieces[:, 1:].numel() / math.log(2)
