"""Losses of transformers as clipping needs them: the mean over the examples of what depends on one example alone.

Models of transformers average over all labels of a batch that are not -100, whatever example they belong to. Then the number of
labels in one example scales the gradient of every other one, and clipping per example bounds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from hushgrad import _check

__all__ = ["loss_of", "token_loss"]

_IGNORED = -100  # transformers' mark for a label that does not count
_OWN_LOSS = "Override compute_loss with the mean over the examples of what depends on one example alone."


def token_loss(logits: Tensor, labels: Tensor, *, shift: bool) -> Tensor:
    r"""Mean over the examples of the mean over each example's own tokens that count.

    (1/B) sum_i (1/n_i) sum_t -log p(label_it), with n_i the number of example i's labels that are not -100 (at least 1, so an
    example without any has loss 0). ``shift``: the score at t is for the label at t + 1, as in a causal language model.

        >>> import torch
        >>> token_loss(torch.zeros(2, 3, 5), torch.tensor([[1, 2, -100], [4, -100, -100]]), shift=False)
        tensor(1.6094)
    """
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none", ignore_index=_IGNORED)
    counted = labels.ne(_IGNORED)
    return (losses.view_as(labels).sum(1) / counted.sum(1).clamp(min=1)).mean()


def loss_of(model: nn.Module, inputs: Any) -> tuple[Tensor, Any]:
    """(loss, outputs): the model's own loss where an example has one label, :func:`token_loss` where each token has one."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor):
        _check.fail("inputs", sorted(inputs), "to hold labels", _OWN_LOSS)
    if labels.is_floating_point() and labels.dim() <= 2:
        return _own(model(**inputs))
    if labels.dim() == 1:
        if bool(labels.eq(_IGNORED).any()):
            _check.fail("labels", _IGNORED, "to be a class", "Leave examples without a label out of the data set.")
        return _own(model(**inputs))
    if labels.dim() == 2:
        return _of_tokens(model, inputs, labels)
    return _refuse(f"labels of shape {tuple(labels.shape)}")


def _own(outputs: Any) -> tuple[Tensor, Any]:
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0], outputs


def _of_tokens(model: nn.Module, inputs: Any, labels: Tensor) -> tuple[Tensor, Any]:
    transformer = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    name = type(transformer).__name__  # adapters (peft) have their model inside; what comes first is the whole of it
    if name in _ALIGNED:
        # An encoder-decoder reads the labels, too: its decoder's inputs are made from them.
        keeps = transformer is not None and transformer.config.is_encoder_decoder
        outputs = model(**(inputs if keeps else _without_labels(inputs)))
        return token_loss(outputs["logits"], labels, shift=False), outputs
    if name in _CAUSAL:
        outputs = model(**_without_labels(inputs))
        return token_loss(outputs["logits"], labels, shift=True), outputs
    return _refuse(f"one label per token for a {name}, of which it is not known which score belongs to which label")


def _without_labels(inputs: Any) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"}


def _refuse(what: str) -> NoReturn:
    _check.fail("labels", what, "to be one per example, or one per token of a known kind of model", _OWN_LOSS)


# The tables by which transformers' own AutoModels and Trainer know the kinds of models. A name in both is of neither kind.
_SHIFTED = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
_UNSHIFTED = {
    *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
    *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
    *auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(),
}
_CAUSAL, _ALIGNED = _SHIFTED - _UNSHIFTED, _UNSHIFTED - _SHIFTED
