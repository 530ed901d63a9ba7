"""Shapes of transformers: the number of parameters and where they are, from a model's name or config, without its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hushgrad import _check


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder of L layers of width h: attention (queries h x h, keys and values h x g, output h x h), and a block of width f.

    | field | meaning |
    |---|---|
    | ``hidden``, ``layers`` | h, L |
    | ``inner`` | f, of the block that follows attention |
    | ``heads`` | of attention: each makes a number for every pair of tokens |
    | ``keys`` | g: key heads times their width; h where every head has its own |
    | ``vocabulary`` | tokens |
    | ``positions`` | rows of a learned table of positions; 0: positions are rotated in |
    | ``gated`` | the block has three matrices (Llama), not two (GPT-2) |
    | ``tied`` | the head is the embedding |
    | ``biases`` | of one layer, in numbers |
    | ``norm`` | numbers of one normalisation: h, or 2 h with its bias |

    >>> Shape(hidden=768, layers=12, inner=3072, heads=12, keys=768, vocabulary=50257, positions=1024, biases=6912, norm=1536).parameters
    124439808
    """

    hidden: int
    layers: int
    inner: int
    heads: int
    keys: int
    vocabulary: int
    positions: int = 0
    gated: bool = False
    tied: bool = True
    biases: int = 0
    norm: int = 0

    @property
    def multiplied(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.keys
        return attention + (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def parameters(self) -> int:
        """The number of parameters: tables, layers and norms."""
        tables = (self.vocabulary * (1 if self.tied else 2) + self.positions) * self.hidden
        return tables + self.layers * (self.multiplied + self.biases + 2 * self.norm) + self.norm

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA beside every matrix of the layers: ``rank`` times rows and columns of each."""
        attention = 2 * 2 * self.hidden + 2 * (self.hidden + self.keys)
        return self.layers * rank * (attention + (3 if self.gated else 2) * (self.hidden + self.inner))


def _llama(config: Mapping[str, Any], *, biased: bool) -> Shape:
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    width = _whole(config, "head_dim") if config.get("head_dim") else hidden // heads
    if width * heads != hidden:
        _check.fail(
            "head_dim", width, f"to be hidden_size / num_attention_heads = {hidden / heads:g}", "Other shapes are not modelled."
        )
    keys = width * (_whole(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads)
    return Shape(
        hidden=hidden,
        layers=_whole(config, "num_hidden_layers"),
        inner=_whole(config, "intermediate_size"),
        heads=heads,
        keys=keys,
        vocabulary=_whole(config, "vocab_size"),
        gated=True,
        tied=bool(config.get("tie_word_embeddings", False)),
        biases=hidden + 2 * keys if biased else 0,
        norm=hidden,
    )


def _gpt2(config: Mapping[str, Any]) -> Shape:
    hidden = _whole(config, "n_embd")
    inner = config.get("n_inner") or 4 * hidden
    return Shape(
        hidden=hidden,
        layers=_whole(config, "n_layer"),
        inner=inner,
        heads=_whole(config, "n_head"),
        keys=hidden,
        vocabulary=_whole(config, "vocab_size"),
        positions=_whole(config, "n_positions"),
        tied=bool(config.get("tie_word_embeddings", True)),
        biases=5 * hidden + inner,
        norm=2 * hidden,
    )


_FAMILIES = {
    "gpt2": _gpt2,
    "llama": lambda config: _llama(config, biased=bool(config.get("attention_bias", False))),
    "mistral": lambda config: _llama(config, biased=False),
    "qwen2": lambda config: _llama(config, biased=True),
}


def _whole(config: Mapping[str, Any], name: str) -> int:
    return _check.positive_int(**{name: config.get(name)}, remedy="Give a config.json as transformers saves it.")


def _gpt(hidden: int, layers: int) -> dict[str, Any]:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": hidden // 64}
    return {"model_type": "gpt2", **sizes, "n_positions": 1024, "vocab_size": 50257}


def _decoder(
    kind: str, hidden: int, inner: int, layers: int, heads: int, keys: int, tokens: int, *, tied: bool
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": kind, **sizes, "num_key_value_heads": keys, "vocab_size": tokens, "tie_word_embeddings": tied}


# What the models' own config.json say.
NAMES: dict[str, dict[str, Any]] = {
    "gpt2": _gpt(768, 12),
    "gpt2-medium": _gpt(1024, 24),
    "gpt2-large": _gpt(1280, 36),
    "gpt2-xl": _gpt(1600, 48),
    "smollm2-135m": _decoder("llama", 576, 1536, 30, 9, 3, 49152, tied=True),
    "smollm2-360m": _decoder("llama", 960, 2560, 32, 15, 5, 49152, tied=True),
    "smollm2-1.7b": _decoder("llama", 2048, 8192, 24, 32, 32, 49152, tied=True),
    "tinyllama-1.1b": _decoder("llama", 2048, 5632, 22, 32, 4, 32000, tied=False),
    "llama-3.2-1b": _decoder("llama", 2048, 8192, 16, 32, 8, 128256, tied=True),
    "llama-3.2-3b": _decoder("llama", 3072, 8192, 28, 24, 8, 128256, tied=True),
    "llama-3.1-8b": _decoder("llama", 4096, 14336, 32, 32, 8, 128256, tied=False),
    "mistral-7b": _decoder("mistral", 4096, 14336, 32, 32, 8, 32000, tied=False),
    "qwen2.5-0.5b": _decoder("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True),
}


def shape_of(model: str | Mapping[str, Any]) -> Shape:
    """The shape of a model by its name, by the path of a ``config.json`` (or of the folder that holds it), or by such a config itself.

    >>> shape_of("smollm2-135m").parameters
    134515008

    Raises:
        ArgumentError: for a name that is not known, a file that is no config, or a family that is not modelled.
    """
    config = model if isinstance(model, Mapping) else NAMES.get(model.rsplit("/", 1)[-1].lower().removesuffix("-instruct"))
    if config is None:
        config = _read(str(model))
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        _check.fail("model_type", kind, f"to be one of {', '.join(_FAMILIES)}", "Other families are not modelled.")
    return _FAMILIES[kind](config)


def _read(model: str) -> dict[str, Any]:
    path = Path(model, "config.json") if Path(model).is_dir() else Path(model)
    if not path.is_file():
        close = get_close_matches(model.lower(), NAMES, n=1, cutoff=0.5)
        meant = f"Did you mean {close[0]}? " if close else ""
        _check.fail("model", model, "to be a known name or the path of a config.json", f"{meant}Known are {', '.join(NAMES)}.")
    config = _check.parsed(path.read_bytes())
    if not isinstance(config, dict):
        _check.fail("model", model, "to be a config.json as transformers saves it", "It holds no object.")
    return config


def human(count: float) -> str:
    """A count in three digits.

    >>> human(134515008)
    '135M'
    """
    power = min(4, max(0, int(math.log10(max(count, 1)) + 1e-12) // 3))
    return f"{count / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"
