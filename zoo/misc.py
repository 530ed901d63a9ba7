"""Networks of tutorials and papers in plain torch, as people write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.losses import class_of, draw, images
from zoo.specimen import Sizes, Specimen

__all__ = ["specimens"]


class _TextNet(nn.Module):
    """Embedding, mean over the words, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.first(self.pool(self.table(ids).transpose(1, 2)).squeeze(2)))


class _CharLSTM(nn.Module):
    """Time first, as nn.LSTM has it; the last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.last = nn.Embedding(50, 8), nn.LSTM(8, 12), nn.Linear(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.lstm(self.table(ids.T))[0][-1])


class _Speech(nn.Module):
    """A bidirectional LSTM with a score for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(5, 8, 2, bidirectional=True, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0])


class _Transducer(nn.Module):
    """RNN-T: an encoder of frames, a predictor of symbols, and scores for every pair of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.table = nn.GRU(5, 8, batch_first=True), nn.Embedding(6, 4)
        self.predictor, self.joint = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        frames, symbols = self.encoder(x)[0], self.predictor(self.table(F.pad(y, (1, 0))))[0]
        return self.joint(torch.tanh(frames[:, :, None] + symbols[:, None]))


class _Tabular(nn.Module):
    """FT-Transformer: a token for each column, made by bare parameters, and a class token."""

    def __init__(self, columns: int = 6, width: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(columns, width)), nn.Parameter(torch.randn(columns, width))
        self.token = nn.Parameter(torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.body, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        columns = x[:, :, None] * self.weight + self.bias
        return self.last(self.body(torch.cat([self.token.expand(len(x), -1, -1), columns], 1))[:, 0])


class _Routed(nn.Module):
    """A mixture of three experts; each example goes to the one that it likes best."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(6, width), nn.Linear(width, 3), nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        likes = self.router(x).softmax(-1)
        choice, y = likes.argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = choice == i
            if mine.any():
                y[mine] = expert(x[mine]) * likes[mine, i : i + 1]
        return self.last(x + y)


class _Bags(nn.Module):
    """Words of all texts in one row, with the place where each text begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(30, 8, mode="mean"), nn.Linear(8, 2)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.last(self.bag(ids, offsets))


class _Translator(nn.Module):
    """nn.Transformer as a whole, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(20, 8), nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
        self.last = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.last(self.body(self.table(ids), self.table(ids), tgt_mask=mask))


class _TimeFirst(nn.Module):
    """nn.TransformerEncoder with its defaults: the first dimension is time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.body(self.table(ids.T))).transpose(0, 1)


def _mnist() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def _discriminator() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride, padding in ((1, 8, 2, 1), (8, 16, 2, 1), (16, 32, 2, 1)):
        layers += [nn.Conv2d(before, after, 4, stride, padding, bias=False), nn.GroupNorm(4, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(32, 1, 3, 1, 0, bias=False), nn.Flatten(0))


def specimens() -> Iterator[Specimen]:
    """The examples of other libraries' tutorials among them."""
    pictures = images(28, channels=1, classes=10)
    yield Specimen("misc/CNN for MNIST", _mnist, pictures, class_of, relations=("usual", "B=width"))
    yield Specimen("misc/DCGAN discriminator", _discriminator, pictures, _real, relations=("usual", "B=width"))
    yield Specimen("misc/embedding and mean", _TextNet, _words(50, 2), class_of)
    yield Specimen("misc/LSTM, time first", _CharLSTM, _words(50, 4), class_of)
    yield Specimen("misc/CTC with an LSTM", _Speech, _frames, _transcribed)
    yield Specimen("misc/RNN-T", _Transducer, _frames, _transduced)
    yield Specimen("misc/FT-Transformer", _Tabular, _numbers, class_of)
    yield Specimen("misc/mixture, each example to one expert", _Routed, _numbers, class_of)
    yield Specimen("misc/EmbeddingBag with offsets", _Bags, _words(30, 2, ragged=True), _bagged, collate=_in_a_row)
    yield Specimen("misc/nn.Transformer", _Translator, _words(20, 2), _copied)
    yield Specimen("misc/nn.TransformerEncoder, time first", _TimeFirst, _words(20, 2), _copied)


def _words(vocabulary: int, classes: int, *, ragged: bool = False) -> Any:
    def records(sizes: Sizes) -> list[Any]:
        lengths = [sizes.length + (i % 3 if ragged else 0) for i in range(sizes.batch)]
        return [(torch.randint(1, vocabulary, (n,), generator=draw(i)), torch.tensor(i % classes)) for i, n in enumerate(lengths)]

    return records


def _numbers(sizes: Sizes) -> list[Any]:
    return [(torch.randn(6, dtype=torch.float64, generator=draw(i)), torch.tensor(i % 2)) for i in range(sizes.batch)]


def _frames(sizes: Sizes) -> list[Any]:
    length = sizes.length + 4  # CTC needs more frames than symbols
    return [
        (torch.randn(length, 5, dtype=torch.float64, generator=draw(i)), torch.tensor([1 + i % 3, 2, 3]))
        for i in range(sizes.batch)
    ]


def _real(model: nn.Module, batch: Any) -> Tensor:
    picture, label = batch
    return F.binary_cross_entropy_with_logits(model(picture), (label % 2).double())


def _transcribed(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0]).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((scores.shape[1],), scores.shape[0])
    return F.ctc_loss(scores, batch[1], lengths, torch.full_like(lengths, 3), reduction="none").mean()


def _transduced(model: nn.Module, batch: Any) -> Tensor:
    """Minus the log-probability of the symbols, over all ways to place them among the frames."""
    scores, symbols = model(*batch).log_softmax(-1), batch[1]
    rows: list[list[Tensor]] = []
    for t in range(scores.shape[1]):
        row: list[Tensor] = []
        for u in range(scores.shape[2]):
            ways = [rows[-1][u] + scores[:, t - 1, u, 0]] if t else []
            if u:
                ways.append(row[u - 1] + scores[:, t, u - 1].gather(1, symbols[:, u - 1 : u]).squeeze(1))
            row.append(torch.logsumexp(torch.stack(ways), 0) if ways else scores.new_zeros(len(scores)))
        rows.append(row)
    return -(rows[-1][-1] + scores[:, -1, -1, 0]).mean()


def _in_a_row(records: list[Any]) -> Any:
    offsets = torch.tensor([0, *(len(ids) for ids, _ in records)]).cumsum(0)[:-1]
    return torch.cat([ids for ids, _ in records]), offsets, torch.stack([label for _, label in records])


def _bagged(model: nn.Module, batch: Any) -> Tensor:
    ids, offsets, label = batch
    return F.cross_entropy(model(ids, offsets), label)


def _copied(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[0], reduction="none").mean(1).mean()
