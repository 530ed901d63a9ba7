"""Examples of different lengths: packed sequences, their rows and padded outputs are attributed, in every layer that takes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, HushgradError

WIDTH = 4
LENGTHS = [(3, 2, 5, 1, 4), (2, 5, 2, 3, 1), (4, 4, 4, 4, 4), (5, 4, 4, 4, 3), (1, 1, 1, 1, 1)]


def _in_turn(out: PackedSequence) -> Tensor:
    padded, lengths = pad_packed_sequence(out, batch_first=True)
    return torch.cat([padded[i, :n] for i, n in enumerate(lengths)])


FORMS: dict[str, Callable[[PackedSequence], Any]] = {
    "rows": lambda out: out.data,
    "packed": lambda out: out,
    "in turn": _in_turn,
    "padded": lambda out: pad_packed_sequence(out, batch_first=True)[0],
    "time first": lambda out: pad_packed_sequence(out)[0],
    "sum": lambda out: pad_packed_sequence(out, batch_first=True)[0].sum(1),
}


class Reader(nn.Module):
    """A recurrent layer and a head on each row; packs by itself if it is told the lengths."""

    def __init__(self, layer: nn.Module, form: str, between: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        super().__init__()
        self.layer, self.form, self.between = layer, form, between
        size = (getattr(layer, "proj_size", 0) or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(size, 3)

    def forward(self, x: Any, lengths: Tensor | None = None) -> Any:
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.layer(x)
        return FORMS[self.form](out._replace(data=self.head(self.between(out.data)).tanh()))


def _batch(xs: list[Tensor], *, inside: bool) -> tuple[Any, ...]:
    if inside:
        return pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs])
    return (pack_sequence(xs, enforce_sorted=False),)


def _loss(model: Reader, xs: list[Tensor], *, inside: bool) -> Tensor:
    out = model(*_batch(xs, inside=inside))
    out = out.data if isinstance(out, PackedSequence) else out
    if model.form in ("padded", "time first"):
        lengths = torch.tensor([len(x) for x in xs])
        out = out if model.form == "padded" else out.transpose(0, 1)
        out = out * (torch.arange(out.shape[1]) < lengths[:, None]).unsqueeze(-1)
    return (out + 0.5).square().sum() if model.form not in ("padded", "time first") else (out.square() + out).sum()


def _alone(model: Reader, xs: list[Tensor], *, inside: bool) -> list[list[Tensor]]:
    return [list(torch.autograd.grad(_loss(model, [x], inside=inside), list(model.parameters()))) for x in xs]


def _clipped(gradients: list[list[Tensor]]) -> tuple[float, list[Tensor], Tensor]:
    norms = torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in gradients])
    bound = float(norms.median())
    weights = (bound / norms).clamp(max=1.0)
    return bound, [sum(w * g for w, g in zip(weights, column, strict=True)) for column in zip(*gradients, strict=True)], norms


def _compare(model: Reader, *, inside: bool, heavy: float = 1.0) -> None:
    """Steps of different lengths, each against passes over one example at a time; of ``heavy``, one record is so much larger."""
    capture, draw = Capture(model, loss_reduction="sum"), torch.Generator().manual_seed(3)
    for lengths in LENGTHS:
        xs = [torch.randn(n, WIDTH, dtype=torch.float64, generator=draw) for n in lengths]
        xs[1] *= heavy
        bound, wanted, norms = _clipped(_alone(model, xs, inside=inside))
        capture.attach()
        capture.examples(len(xs))
        _loss(model, xs, inside=inside).backward()
        found = capture.collect(Flat(bound))
        capture.detach()
        torch.testing.assert_close(found.raw_norms, norms, rtol=1e-9, atol=0.0)
        for (name, _), want in zip(model.named_parameters(), wanted, strict=True):
            assert float((found.raw_sums[name] - want).norm()) <= 1e-9 * bound, (name, lengths)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RNN": partial(nn.RNN, WIDTH, 3, batch_first=True),
    "GRU, both directions": partial(nn.GRU, WIDTH, 3, batch_first=True, bidirectional=True),
    "LSTM, two layers, projected": partial(nn.LSTM, WIDTH, 5, num_layers=2, proj_size=3, batch_first=True),
    "LSTM, time first, both": partial(nn.LSTM, WIDTH, 3, num_layers=2, bidirectional=True),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_of_packed_sequences_are_attributed(layer: str) -> None:
    torch.manual_seed(0)
    _compare(Reader(LAYERS[layer](), "rows").double(), inside=False)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_every_form_are_attributed(form: str, inside: bool) -> None:
    torch.manual_seed(0)
    _compare(Reader(nn.GRU(WIDTH, 3, batch_first=True), form).double(), inside=inside)


@pytest.mark.parametrize("form", ["rows", "padded"])
def test_a_heavy_record_is_clipped_by_its_own_norm(form: str) -> None:
    torch.manual_seed(0)
    _compare(Reader(nn.GRU(WIDTH, 3, batch_first=True), form).double(), inside=False, heavy=1e4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["rows", "packed", "sum"])
def test_a_record_that_is_no_number_moves_nobody_else(form: str, value: float) -> None:
    torch.manual_seed(0)
    model, draw = Reader(nn.GRU(WIDTH, 3, batch_first=True), form).double(), torch.Generator().manual_seed(4)
    xs = [torch.randn(n, WIDTH, dtype=torch.float64, generator=draw) for n in (3, 2, 5, 1)]
    sums = []
    for bad in (False, True):
        capture = Capture(model, loss_reduction="sum")
        capture.attach()
        for step in range(2):  # the first proves
            now = [x.clone() for x in xs]
            if step and bad:
                now[2][1] = value
            capture.examples(len(now))
            _loss(model, now, inside=False).backward()
            found = capture.collect(Flat(0.1))
        capture.detach()
        sums.append(torch.cat([found.raw_sums[name].flatten() for name, _ in model.named_parameters()]))
    assert bool(sums[1].isfinite().all())
    assert float((sums[0] - sums[1]).norm()) <= 0.1 * 1.0001


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "centred over all rows": lambda rows: rows - rows.mean(0).detach(),
    "divided by the number of rows": lambda rows: rows / len(rows),
    "divided by the largest": lambda rows: rows / rows.detach().abs().max(),
    "rows in another order": lambda rows: rows.flip(0),
    "moved by one row": lambda rows: rows.roll(1, 0),
}


@pytest.mark.parametrize("how", MIXING)
@pytest.mark.parametrize("form", ["rows", "padded"])
def test_rows_that_influence_each_other_are_refused(form: str, how: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(HushgradError):
        _compare(Reader(nn.GRU(WIDTH, 3, batch_first=True), form, MIXING[how]).double(), inside=False)


def test_a_loss_at_positions_that_only_another_example_has_is_refused() -> None:
    """The head's bias is there: without the longer example it would not be."""
    torch.manual_seed(0)
    layer, head = nn.GRU(WIDTH, 3, batch_first=True), nn.Linear(3, 2)

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer, head

        def forward(self, x: PackedSequence) -> Tensor:
            return self.head(pad_packed_sequence(self.layer(x)[0], batch_first=True)[0])

    model = Padded()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    capture.examples(3)
    with pytest.raises(CaptureError, match="Mask"):
        model(pack_sequence([torch.randn(n, WIDTH) for n in (2, 4, 1)], enforce_sorted=False)).square().sum().backward()
    capture.detach()


def test_equal_lengths_prove_nothing_of_uneven_ones() -> None:
    """As many rows, as many examples: where each has as many, rows come in turns; where not, they do not."""
    torch.manual_seed(0)
    model = Reader(nn.GRU(WIDTH, 3, batch_first=True), "rows").double()
    capture, draw = Capture(model, loss_reduction="sum"), torch.Generator().manual_seed(5)
    for lengths in ((4, 4, 4, 4), (5, 3, 4, 4), (7, 3, 3, 3)):
        xs = [torch.randn(n, WIDTH, dtype=torch.float64, generator=draw) * (k + 1) for k, n in enumerate(lengths)]
        bound, _, norms = _clipped(_alone(model, xs, inside=False))
        capture.attach()
        capture.examples(len(xs))
        _loss(model, xs, inside=False).backward()
        found = capture.collect(Flat(bound))
        capture.detach()
        torch.testing.assert_close(found.raw_norms, norms, rtol=1e-9, atol=0.0)
