"""Losses of transformers as clipping needs them: the mean over examples of terms that depend on one example each.

Models of transformers average over all labels of a batch that are not -100, whatever example they belong to. Then the number of
labels in one example scales the gradient of every other one, and clipping per example bounds nothing. What a model's own loss does is
not inferred from its name but tested on one or two examples of the first batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.train.trial_passes import aside

_IGNORED = -100  # transformers' mark for a label that does not count
_OWN_LOSS = "Override compute_loss with the mean over the examples of what depends on one example alone."
OWN_MEAN = (
    "It is that of compute_loss. Leave compute_loss out, or return the mean over the examples of what depends on one alone: of texts "
    "token_loss(model(**inputs).logits, inputs['labels'], shift=True), of classes cross_entropy(..., reduction='none').mean()."
)
MODELS_MEAN = (
    "It is the model's own loss, of all labels together. Override compute_loss with the mean over the examples of what depends on one "
    "alone: of texts token_loss(model(**inputs).logits, inputs['labels'], shift=True), of classes "
    "cross_entropy(..., reduction='none').mean()."
)
_TOKENIZER = "Use the model's own tokenizer, with truncation=True, or resize_token_embeddings before the run."
_SAME = 1e-4  # relative: far above rounding
_ROUNDED = 2e-2  # of scores in half precision
_HALF = (torch.float16, torch.bfloat16)
_TOLD = 1e-5  # relative: what the two readings of a loss must be apart


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


class ExampleLoss:
    """The model's own loss if an example has one label, :func:`token_loss` if each token has one."""

    def __init__(self) -> None:
        self._is_mean = False  # over examples: the model's own loss was tried
        self._shift: bool | None = None  # of the model's own loss; None: not tried yet

    def __call__(self, model: nn.Module, inputs: Any, *, filled: int = 0) -> tuple[Tensor, Any]:
        """(loss, outputs); the last ``filled`` examples are copies of the first, which show nothing of the model's own loss."""
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, Tensor):
            _check.fail("inputs", sorted(inputs), "to hold labels", _OWN_LOSS)
        if labels.dim() == 1 or (labels.is_floating_point() and labels.dim() == 2):
            return self._of_examples(model, inputs, labels, len(labels) - filled)
        if labels.dim() == 2:
            return self._of_tokens(model, inputs, labels)
        return _refuse(f"labels of shape {tuple(labels.shape)}")

    def _of_examples(self, model: nn.Module, inputs: Any, labels: Tensor, counted: int) -> tuple[Tensor, Any]:
        if not labels.is_floating_point() and bool(labels.eq(_IGNORED).any()):
            _check.fail("labels", _IGNORED, "to be a class", "Leave examples without a label out of the data set.")
        if not self._is_mean and counted > 1:
            _require_mean(model, inputs, labels)
            self._is_mean = True
        outputs = model(**inputs)
        return _own(outputs), outputs

    def _of_tokens(self, model: nn.Module, inputs: Any, labels: Tensor) -> tuple[Tensor, Any]:
        if self._shift is None:
            self._shift = _own_shift(model, inputs, labels, trial=not torch.is_grad_enabled())
        # An encoder-decoder reads the labels, too: its decoder's inputs are made from them. Adapters (peft) have their model inside.
        transformer = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        keeps = transformer is not None and transformer.config.is_encoder_decoder
        outputs = model(**(inputs if keeps else {name: value for name, value in inputs.items() if name != "labels"}))
        # There attention_mask is that of other texts, whose lengths may happen to be those of the labels.
        logits, mask = outputs["logits"], inputs.get("decoder_attention_mask" if keeps else "attention_mask")
        behind = _behind_prompt(_read(labels, mask, shift=bool(self._shift)), logits)
        if behind.shape != labels.shape and isinstance(mask, Tensor) and bool((mask[:, :1] < mask.amax(1, True)).any()):
            _refuse(
                "those of texts that are padded on the left, behind a trained prompt which scores the first token of the longest alone"
            )
        return token_loss(logits, behind, shift=bool(self._shift)), outputs


def checked(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """A user's own ``compute_loss``; refused with one sentence if its arguments or its result are not those of a loss.

    Trainer's ``num_items_in_batch`` is passed as None, and not at all to a function that does not take it.
    """
    named = inspect.signature(compute_loss).parameters
    takes = "num_items_in_batch" in named or any(p.kind is p.VAR_KEYWORD for p in named.values())

    @wraps(compute_loss)
    def loss_of(*given: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
        try:
            made = compute_loss(*given, **options, **({"num_items_in_batch": num_items_in_batch} if takes else {}))
        except (TypeError, AttributeError) as error:
            if num_items_in_batch is not None or "NoneType" not in str(error):
                raise
            raise ArgumentError(
                "Expected compute_loss not to use num_items_in_batch, which is None here: the labels of a whole batch are counted there, "
                "so one text would scale the gradients of all others. Return the mean over the examples of what depends on one alone, "
                "such as token_loss(model(**inputs).logits, inputs['labels'], shift=True)."
            ) from error
        loss = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(loss, Tensor) or loss.dim():
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            remedy = (
                "Return the mean over the examples, one number; and the model's outputs behind it where return_outputs is set."
            )
            _check.fail("compute_loss", shown, "to give a tensor without dimensions", remedy)
        return made

    return loss_of


def _own(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else _refuse("labels of which the model makes no loss")


# What the model's own loss does -----------------------------------------------------------------------------------------------


def _require_mean(model: nn.Module, inputs: Any, labels: Tensor) -> None:
    """Require that the loss of two examples is the mean of their own losses, also for different labels (which detects class weights)."""
    other = next((i for i in range(1, len(labels)) if not torch.equal(labels[i], labels[0])), 1)
    with aside(model):
        losses = [_own(model(**_rows(inputs, labels, rows))) for rows in ([0, other], [0], [other])]
    half = torch.is_autocast_enabled(losses[0].device.type) or any(p.dtype in _HALF for p in model.parameters())
    both, *each = map(float, losses)
    same = _ROUNDED if half else _SAME
    if abs(both - sum(each) / 2) > same * max(map(abs, each)):
        _refuse("one per example, with a loss that is no mean over the examples")


def _own_shift(model: nn.Module, inputs: Any, labels: Tensor, *, trial: bool) -> bool | None:
    """Whether the model's own loss of one example compares the score at t with the label at t + 1; None if no label counts.

    ``trial``: nothing is trained, so None as well if both ways give the same (a text that repeats one word).
    """
    told = None
    for i in labels[:, 1:].ne(_IGNORED).any(1).nonzero().flatten().tolist():
        one = _rows(inputs, labels, [i])
        with aside(model):
            try:
                outputs = model(**one)
            except IndexError:  # whose sentence quotes the record
                outputs = None
            except (RuntimeError, ValueError) as error:  # a classifier of whole texts, say
                _refuse(f"one label per token, where the model's own loss fails ({error})")
        if outputs is None:
            constraint = "to be tokens of the model, in texts no longer than it has positions"
            _check.fail("input_ids and labels", "numbers beyond its tables", constraint, _TOKENIZER)
        logits: Any = outputs["logits"] if isinstance(outputs, Mapping) else None
        own = float(_own(outputs))
        behind = _behind_prompt(one["labels"], logits)
        far = {shift: abs(float(token_loss(logits, behind, shift=shift)) - own) for shift in (True, False)}
        near = min(far, key=lambda shift: far[shift])
        if not far[near] <= _SAME * abs(own):
            _refuse("one label per token for a model whose own loss is no mean over tokens")
        if far[not near] > 10 * far[near] + _TOLD * abs(own):
            return near
        told = "one label per token for a model whose scores do not tell which of them belongs to which label"
    return None if told is None or trial else _refuse(told)


def _read(labels: Tensor, mask: Any, *, shift: bool) -> Tensor:
    """Labels of tokens that are read, scored by tokens that are read: how much padding there is depends on the other examples."""
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return labels
    seen = mask.bool()
    if shift:
        seen = seen & F.pad(seen[:, :-1], (1, 0), value=True)  # the first one is scored by a trained prompt, if by anything
    return labels.masked_fill(~seen, _IGNORED)


def _behind_prompt(labels: Tensor, logits: Any) -> Tensor:
    """Labels for all scores: a trained prompt (peft) stands before an example's own tokens, and has none that count."""
    if not isinstance(logits, Tensor) or logits.dim() != 3 or len(logits) != len(labels) or logits.shape[1] < labels.shape[1]:
        _refuse("one label per token for a model that does not return one score per token")
    return F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=_IGNORED)


def _rows(inputs: Any, labels: Tensor, rows: list[int]) -> dict[str, Any]:
    strange = [n for n, v in inputs.items() if isinstance(v, Tensor) and (v.dim() == 0 or len(v) != len(labels))]
    if strange:
        _check.fail("inputs", min(strange), "to have one row for each label's example", _OWN_LOSS)
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _refuse(what: str) -> NoReturn:
    raise ArgumentError(
        f"Expected labels to be one per example, or one per token, with a loss that is their mean, not {what}. {_OWN_LOSS}"
    )
