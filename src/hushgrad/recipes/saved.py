"""Self-contained model files: the weights, the network that they belong to, and how its inputs are made.

``model.safetensors`` of a run has one JSON text in its header, under the key ``hushgrad``. So anyone with the file can load the
model in plain PyTorch and predict with it; neither recipe nor training data are needed. The hash of the file, which a privacy card
signs, covers all of it.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import nn

from hushgrad import _check
from hushgrad._printed import reason
from hushgrad.budget.file_digests import require_own_model
from hushgrad.errors import ArgumentError
from hushgrad.recipes.calls import imported
from hushgrad.recipes.dataset import Data
from hushgrad.recipes.encoders import Encoder
from hushgrad.recipes.models import MODELS

_KEY, _FORM = "hushgrad", 1
_LARGEST = 1 << 28  # numbers in one input: more than any encoder here makes


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a model file says about its model, including the ``shape``, ``classes`` and ``vocabulary`` that the model is built from."""

    model: Mapping[str, Any]
    shape: tuple[int, ...]
    classes: int
    vocabulary: int = 0
    names: tuple[str, ...] = ()
    encoder: Encoder | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        encoder = None if self.encoder is None else self.encoder.to_json()
        facts = {"shape": list(self.shape), "classes": self.classes, "vocabulary": self.vocabulary, "names": list(self.names)}
        return {"form": _FORM, "model": dict(self.model), **facts, "encoder": encoder}

    @classmethod
    def from_json(cls, content: object) -> Description:
        """From a JSON object; anything unknown is refused."""
        if not isinstance(content, dict) or content.get("form") != _FORM or not isinstance(content.get("model"), dict):
            raise ArgumentError("Expected the model file to describe its model in a form that this version knows.")
        known = ("form", "model", "shape", "classes", "vocabulary", "names", "encoder")
        for key in content:
            _check.one_of(known, field=key)
        names = tuple(_check.instance(str, name=name) for name in _check.instance(list, names=content.get("names", [])))
        shape = tuple(_check.positive_int(shape=size) for size in _check.instance(list, shape=content.get("shape")))
        if math.prod(shape) > _LARGEST:
            _check.fail("shape", shape, f"to have at most {_LARGEST} numbers")
        return cls(
            model=content["model"],
            shape=shape,
            classes=_check.positive_int(classes=content.get("classes")),
            vocabulary=_check.integer(0, vocabulary=content.get("vocabulary", 0)),
            names=names,
            encoder=None if content.get("encoder") is None else Encoder.from_json(content["encoder"]),
        )


def describe(model: Mapping[str, Any], data: Data) -> Description:
    """The description for a model file.

    Args:
        model: the table ``[model]`` of the recipe.
        data: what it was trained on; only public facts are taken from it.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from hushgrad.recipes import Data
    >>> people = TensorDataset(torch.randn(10, 3), torch.randint(2, (10,)))
    >>> found = describe({"name": "logistic"}, Data(train=people, test=people, classes=2))
    >>> found.shape, found.classes
    ((3,), 2)
    """
    facts = {"shape": data.shape, "classes": data.classes, "vocabulary": data.vocabulary}
    return Description(model=dict(model), **facts, names=data.names, encoder=data.encoder)  # type: ignore[arg-type]


def save_model(model: nn.Module, path: str | Path, description: Description) -> None:
    """Write the weights and their description into one file.

    Args:
        model: the trained network.
        path: of the new file, ``model.safetensors`` by custom.
        description: from :func:`describe`.
    """
    text = json.dumps(description.to_json(), sort_keys=True)
    save_weights(model, str(path), metadata={_KEY: text})


def read_description(path: str | Path) -> Description:
    """What a model file, or the one in the folder of a run, says about its model.

    Args:
        path: of the file or of the folder. It is data: nothing in it is run.

    Raises:
        ArgumentError: where it is no model file, or one without a description.
    """
    file = model_file(path)
    with _opened(file) as stored:
        text = (stored.metadata() or {}).get(_KEY)
    if text is None:
        remedy = "Build the network yourself and pass it as model=, or train again with this version."
        _check.fail("model", str(file), "to say which network its weights belong to", remedy)
    return Description.from_json(_check.parsed(text))


def load_model(path: str | Path, *, model: nn.Module | None = None, allow_code: bool = False) -> nn.Module:
    """The trained network of a run as a plain PyTorch module, in evaluation mode; no training data are needed.

    Using a model is post-processing: it costs no privacy for the records that it was trained on.

    Args:
        path: the folder of a run, or its ``model.safetensors``.
        model: a network of your own to load the weights into, instead of the one that the file names.
        allow_code: whether a network that is named as ``module:function`` may be imported, which runs that module.

    Raises:
        ArgumentError: where the file is damaged, names no network that is known, or holds weights of another one.

        >>> import tempfile
        >>> from hushgrad.recipes import DATA, MODELS
        >>> data, place = DATA["digits"](), tempfile.mkdtemp() + "/model.safetensors"
        >>> save_model(MODELS["logistic"](data), place, describe({"name": "logistic"}, data))
        >>> load_model(place)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """
    file = model_file(path)
    if model is None:
        model = _built(read_description(file), _shapes(file), allow_code)
    put_weights(model, file)
    return model.eval()


def put_weights(model: nn.Module, file: Path) -> None:
    """Load the weights in ``file`` into an existing network.

    Raises:
        ArgumentError: where the file is damaged, or holds weights of another network.
    """
    try:
        load_weights(model, str(file))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise ArgumentError(
            f"Expected {file.name} to hold the weights of this network: {reason(error).splitlines()[0]}"
        ) from None


def model_file(path: str | Path) -> Path:
    """The model file that ``path`` is, or the one in its folder; in a folder it must be the one that the run's report names."""
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        _check.fail("model", str(path), "to be a model file, or the folder of a finished run", "hushgrad train writes one.")
    report = path / "report.json"
    if report.is_file():
        require_own_model(file, _report(report))
    return file


def _report(path: Path) -> dict[str, Any]:
    try:
        return _check.instance(dict, report=_check.parsed(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # what is wrong in it is the card's business
        raise ArgumentError(
            f"Expected a readable {path.name}: it says which model is the run's. Give the model file itself."
        ) from None


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), "pt")
    except (SafetensorError, OSError) as error:
        raise ArgumentError(
            f"Expected {str(file)!r} to be a model file ({reason(error)}). Give the --out of hushgrad train, or its model.safetensors."
        ) from None


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with _opened(file) as stored:
        return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118  (no dict)


def _built(description: Description, shapes: Mapping[str, tuple[int, ...]], allow_code: bool) -> nn.Module:
    """The network, first built without memory: a crafted file must not request more than it has weights for."""
    table = description.model
    name = str(table.get("name"))
    options = {key: value for key, value in table.items() if key != "name"}
    if ":" in name:
        return _check.instance(nn.Module, model=imported(name, "model", allow_code)(description, **options))
    make = MODELS[_check.one_of(MODELS, model=name)]
    held = sum(math.prod(shape) for shape in shapes.values())
    numbers = [value for value in (*options.values(), description.classes, description.vocabulary) if isinstance(value, int)]
    if max(numbers, default=0) > held:
        raise ArgumentError("Expected the model file to hold the weights of the network that it describes; it is too small.")
    try:
        inspect.signature(make).bind(description, **options)
        with torch.device("meta"):
            empty = make(description, **options)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"Expected the model file to describe a {name!r}: {error}.") from None
    expected = {key: tuple(tensor.shape) for key, tensor in empty.state_dict().items()}
    if any(expected.get(key) != shape for key, shape in shapes.items()):
        raise ArgumentError(f"Expected the model file to hold the weights of the {name!r} that it describes; it holds others.")
    with torch.random.fork_rng(devices=[]):
        return make(description, **options)  # type: ignore[arg-type]
