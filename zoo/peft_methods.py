"""Adapters of peft around a tiny BERT, and gradient checkpointing of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import peft
from torch import nn

from zoo.losses import classes, texts
from zoo.specimen import Specimen
from zoo.transformers_text import ENCODER, transformer

__all__ = ["specimens"]

_TARGETS = ["query", "value"]

_METHODS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=2, target_modules=_TARGETS, init_lora_weights=False),
    "LoRA with embeddings": lambda: peft.LoraConfig(r=2, target_modules=[*_TARGETS, "word_embeddings"], init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(r=2, target_modules=_TARGETS, use_dora=True, init_lora_weights=False),
    "rsLoRA": lambda: peft.LoraConfig(r=2, target_modules="all-linear", use_rslora=True, init_lora_weights=False),
    "IA3": lambda: peft.IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=_TARGETS, total_step=10),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=_TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=2, target_modules=_TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=_TARGETS),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=_TARGETS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=_TARGETS),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=8, target_modules=_TARGETS),
    "LayerNorm tuning": lambda: peft.LNTuningConfig(target_modules=["LayerNorm"]),
    "HRA": lambda: peft.HRAConfig(r=2, target_modules=_TARGETS),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4),
    "P-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8),
}


def specimens() -> Iterator[Specimen]:
    """All methods; with four virtual tokens, a batch of four (B=T) has as many examples as there are prompts."""
    for name, config in _METHODS.items():
        yield Specimen(f"peft/{name}", partial(_adapted, config), texts, classes)
    for reentrant in (True, False):
        title = f"checkpointing, {'' if reentrant else 'not '}reentrant"
        yield Specimen(f"peft/{title}", partial(_checkpointed, reentrant), texts, classes)


def _bert() -> nn.Module:
    return transformer("BertConfig", "BertForSequenceClassification", ENCODER)


def _adapted(config: Callable[[], Any]) -> nn.Module:
    settings = config()
    settings.task_type = "SEQ_CLS"
    return peft.get_peft_model(_bert(), settings)


def _checkpointed(reentrant: bool) -> nn.Module:
    model = _bert()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model
