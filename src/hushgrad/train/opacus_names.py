"""Names of arguments in Opacus, and what each is called here: for error messages."""

from __future__ import annotations

_PLAN = "The plan says it: Plan.dpsgd({}=...)."
OPACUS: dict[str, str] = {
    "module": "The model is the first argument, model.",
    "data_loader": "The run deals its own batches: for x, y in private.loader(dataset).",
    "target_epsilon": _PLAN.format("epsilon"),
    "target_delta": _PLAN.format("delta"),
    "noise_multiplier": _PLAN.format("noise_multiplier"),
    "max_grad_norm": _PLAN.format("max_grad_norm"),
    "max_per_sample_grad_norm": _PLAN.format("max_grad_norm"),
    "epochs": _PLAN.format("epochs"),
    "sample_rate": "The plan says it: Plan.dpsgd(batch_size=..., dataset_size=...).",
    "sample_size": "The plan says it: Plan.dpsgd(dataset_size=...).",
    "poisson_sampling": 'The plan says it: Plan.dpsgd(sampling="poisson").',
    "clipping": "The plan says it: Plan.dpsgd(clip=hushgrad.clipping.PerLayer(...)).",
    "grad_sample_mode": "There is one way to clip; it is chosen for each layer. Leave it out.",
    "batch_first": "Where the examples are is found out. Leave it out.",
    "noise_generator": "Noise comes from a secret key: make_private(..., key=...), or seed=... for experiments.",
    "secure_mode": "Noise comes from a secret key always; Plan.dpsgd(secure=True) also rounds it correctly.",
    "accountant": 'The plan is calibrated with it: Plan.dpsgd(accountant="rdp").',
    "max_physical_batch_size": "Say max_physical_batch.",
    "criterion": "The loss is called loss_fn.",
}
"""Arguments of other libraries, and what to say instead."""
ENGINE: dict[str, str] = {
    "get_epsilon": "private.spent(), a guarantee at the plan's delta",
    "accountant": "private.ledger, and hushgrad.epsilon(private.ledger.event(), delta=...)",
    "save_checkpoint": "hushgrad.Checkpoint(folder, private)",
    "load_checkpoint": "hushgrad.Checkpoint(folder, private)",
    "is_compatible": "replace_batchnorm(model); what mixes examples is refused on the first batch",
    "make_private": "hushgrad.make_private(model, optimizer, plan)",
    "original_optimizer": "private.optimizer, which is your own",
}
"""What an engine of Opacus is asked for, and where it is in a run."""
