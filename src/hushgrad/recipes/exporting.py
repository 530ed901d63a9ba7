"""Networks for other programs: torch.export's .pt2 files, and ONNX."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.recipes.predict import Predictor
from hushgrad.release.atomic import written


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
