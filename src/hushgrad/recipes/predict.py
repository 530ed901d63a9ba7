"""Predictions from a model file alone, and the network for other programs: torch.export's .pt2 files, and ONNX.

Using a released model is post-processing: it costs no privacy for the training records.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.recipes.dataset import label_numbers
from hushgrad.recipes.encoders import ByteEncoder, Encoder
from hushgrad.recipes.files import utf8
from hushgrad.recipes.saved import Description, load_model, read_description
from hushgrad.recipes.table_file import Records
from hushgrad.release.atomic import written

_BATCH = 1000


@dataclass(frozen=True)
class Predictor:
    """A trained network with its encoder and its classes: from raw records to answers.

    ``model`` is a plain PyTorch module; ``description`` is what its file says about it.
    """

    model: nn.Module
    description: Description

    @property
    def encoder(self) -> Encoder:
        """From raw records to inputs.

        Raises:
            ArgumentError: if the file has none, because the user's own program made the data.
        """
        if self.description.encoder is None:
            _check.fail("model", self.description.model.get("name"), "to have an encoder in its file", "Call load_model instead.")
        return self.description.encoder

    @property
    def names(self) -> tuple[str, ...]:
        """The classes, in the order of the model's outputs."""
        return self.description.names or tuple(str(number) for number in range(self.description.classes))

    @torch.no_grad()
    def probabilities(self, rows: Sequence[Any]) -> Tensor:
        """A row of class probabilities for each raw record, as the encoder takes them."""
        device = next(self.model.parameters()).device
        parts = [self.model(self.encoder(rows[i : i + _BATCH]).to(device)) for i in range(0, len(rows), _BATCH)]
        return torch.cat([part.softmax(dim=1).cpu() for part in parts]) if parts else torch.zeros(0, self.description.classes)

    def __call__(self, rows: Sequence[Any]) -> list[str]:
        """The most probable class of each raw record; for a language model, the text that follows it."""
        if isinstance(self.encoder, ByteEncoder):
            return [self._continued(row) for row in rows]
        return [self.names[int(number)] for number in self.probabilities(rows).argmax(dim=1)]

    @torch.no_grad()
    def _continued(self, prompt: str, length: int = 80) -> str:
        """The most probable next bytes, one by one."""
        content = utf8(prompt) or b"\n"
        start = len(content)
        for _ in range(length):
            scores = self.model(self.encoder([content]))
            content += bytes([int(scores[0, :, -1].argmax())])
        return content[start:].decode("utf-8", errors="replace")

    def labelled(self, path: str | Path) -> TensorDataset:
        """The records of a file with their labels, encoded, ready for :func:`~hushgrad.recipes.evaluate`."""
        if isinstance(self.encoder, ByteEncoder):
            return TensorDataset(*self.encoder.windows(Path(path)))
        records = self.encoder.read(_there(path), self.names)
        return TensorDataset(self.encoder(records.rows), label_numbers(records, self.names, path))

    def records(self, path: str | Path) -> Records:
        """The raw records of a file, with labels or without, and the file of each where there is one."""
        return self.encoder.read(_there(path), self.names)

    def rows(self, path: str | Path) -> list[Any]:
        """The raw records of a file alone."""
        return self.records(path).rows


def load_predictor(path: str | Path, *, allow_code: bool = False) -> Predictor:
    """The model of a run, ready for raw records.

    Args:
        path: the folder of a run, or its ``model.safetensors``.
        allow_code: whether a network that is named as ``module:function`` may be imported.
    """
    return Predictor(load_model(path, allow_code=allow_code), read_description(path))


def _there(path: str | Path) -> Path:
    if not Path(path).exists():
        _check.fail("file", str(path), "to be there", "Give a file of records, as the model was trained on.")
    return Path(path)


def export(predictor: Predictor, path: str | Path) -> None:
    """Write a trained network as a .pt2 file (``torch.export.load``) or as a .onnx file; batches of any size.

    Args:
        predictor: from :func:`~hushgrad.recipes.load_predictor`.
        path: its ending says which form is meant.

    Raises:
        ArgumentError: for another ending, or where the packages for ONNX are not installed.
    """
    about = predictor.description
    kind = torch.int64 if about.vocabulary else torch.float32
    example = torch.zeros((2, *about.shape), dtype=kind)
    shapes = ({0: torch.export.Dim("batch", min=1, max=1 << 20)},)
    ending = Path(path).suffix
    _check.one_of((".pt2", ".onnx"), ending=ending)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own advice about its own classes
        if ending == ".pt2":
            program = torch.export.export(predictor.model, (example,), dynamic_shapes=shapes)
            written(path, lambda buffer: torch.export.save(program, buffer))  # into memory: torch ends the process on a full disk
            return
        _onnx(predictor, example, path)


def _onnx(predictor: Predictor, example: torch.Tensor, path: str | Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ArgumentError("ONNX files need onnx and onnxscript. Install them with pip install 'hushgrad[onnx]'.") from None
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.onnx.export(
        predictor.model,
        (example,),
        input_names=["inputs"],
        output_names=["scores"],
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # as dynamo=True promises
    written(path, lambda buffer: buffer.write(program.model_proto.SerializeToString()))
