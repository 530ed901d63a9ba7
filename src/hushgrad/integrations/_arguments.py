"""Checks of Trainer's arguments: refuses those that would change the plan behind its back."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from transformers import TrainingArguments

from hushgrad import _check
from hushgrad.train.plan import Plan

# Where a launcher says how many processes there are.
_WORLDS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

# Arguments of Trainer and of SFTTrainer that a private one does not take, and what to do instead.
_INSTEAD = {
    "compute_loss_func": "It is given a whole batch, whose examples it may mix. Override compute_loss with a mean over the examples.",
    "model_init": "Make the model before: the run is attached to one model, once.",
    "optimizer_cls_and_kwargs": "Give optimizers=(optimizer, None).",
    "peft_config": "Wrap the model before: get_peft_model(model, config).",
    "formatting_func": "Give the data a column of texts before: dataset.map(...).",
}


def require_known(given: Mapping[str, Any]) -> None:
    """Refuse Trainer's arguments that a private Trainer cannot use, with the remedy, and unknown ones."""
    for name, value in given.items():
        if name != "preprocess_logits_for_metrics" and name not in _INSTEAD:
            raise TypeError(f"PrivateTrainer has no argument {name}.")
        if name in _INSTEAD and value is not None:
            shown = getattr(value, "__name__", type(value).__name__)
            _check.fail(name, shown, "to be left out", _INSTEAD[name])


def refuse_search() -> NoReturn:
    """Refuse Trainer's hyper-parameter search, which would choose among private runs without paying for it."""
    remedy = "Each trial is a run, and choosing among their results has its own cost: use `hushgrad tune`."
    _check.fail("hyperparameter_search", "trials", "not to be called", remedy)


def as_planned(args: TrainingArguments) -> TrainingArguments:
    """A copy of the arguments in which Trainer neither clips nor counts epochs: one loop over the plan's batches is the whole run."""
    own = copy.copy(args)
    own.max_grad_norm, own.num_train_epochs, own.max_steps = 0.0, 1.0, -1
    return own


def require_fitting(args: TrainingArguments, plan: Plan) -> None:
    """Refuse arguments of Trainer that would change the plan behind its back."""
    if args.gradient_accumulation_steps != 1:
        remedy = "per_device_train_batch_size runs a batch in parts of that size; the result is the same."
        _check.fail("gradient_accumulation_steps", args.gradient_accumulation_steps, "to be 1", remedy)
    if args.max_steps not in (-1, plan.steps):
        _check.fail("max_steps", args.max_steps, f"to be left out or {plan.steps}", "The plan says how many steps there are.")
    if args.fp16:
        _check.fail("fp16", True, "to be False", "Its loss scaling changes every norm. bf16=True needs none.")
    if args.label_smoothing_factor:
        remedy = "Its loss is a mean over all tokens of a batch. Override compute_loss with a mean over the examples."
        _check.fail("label_smoothing_factor", args.label_smoothing_factor, "to be 0", remedy)
    if args.use_liger_kernel:
        remedy = "It puts kernels in the place of layers, for which clipping has no rule. Leave it out."
        _check.fail("use_liger_kernel", True, "to be False", remedy)
    if args.neftune_noise_alpha is not None:
        remedy = "Its size follows from the longest text of a batch, so one person changes what all others add."
        _check.fail("neftune_noise_alpha", args.neftune_noise_alpha, "to be left out", remedy)
    if str(args.save_strategy).rsplit(".", 1)[-1].lower() != "no":
        remedy = 'Give save_strategy="no" and checkpoint=FOLDER: Trainer\'s own checkpoints hold neither the books nor the noise.'
        _check.fail("save_strategy", str(args.save_strategy), 'to be "no"', remedy)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        remedy = (
            "It takes its steps inside of the backward pass, from gradients without noise. Choose another, such as adamw_torch."
        )
        _check.fail("optim", optimizer, "to step after the backward pass", remedy)
    _require_random(args)
    if args.n_gpu > 1:
        _check.fail("n_gpu", args.n_gpu, "to be 1 in each process", "Start one process for each device, with torchrun.")
    _require_launched(args)


def _require_launched(args: TrainingArguments) -> None:
    """Refuse launches on a CPU in which accelerate silently runs DDP instead of FSDP, or one process instead of several."""
    sharded = args.fsdp or args.deepspeed or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    if sharded:
        remedy = "Call fully_shard(model) before the Trainer is made, and start it with torchrun: the run shares the work itself."
        _check.fail("fsdp or deepspeed", sharded, "to be left out", remedy)
    several = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if several and not any(name in os.environ for name in _WORLDS):
        remedy = "`accelerate launch --cpu` starts one process, whatever --num_processes says: start several with torchrun."
        _check.fail("number of processes", 1, "to be the number that was asked for", remedy)


def _require_random(args: TrainingArguments) -> None:
    """Refuse batches by length or in the order of the data: they are not those that were accounted for."""
    order = "group_by_length" if getattr(args, "group_by_length", False) else getattr(args, "train_sampling_strategy", "random")
    if str(order) != "random":
        remedy = "Leave it out: the plan draws the batches, and data_collator pads each to its longest text."
        _check.fail("train_sampling_strategy", str(order), 'to be "random"', remedy)
