"""hushgrad: train PyTorch models on sensitive data with a differential-privacy guarantee that can be believed.

    import hushgrad
    plan = hushgrad.Plan.dpsgd(epsilon=3, delta=1e-5, max_grad_norm=1.0, batch_size=256, dataset_size=60_000, epochs=10)
    private = hushgrad.make_private(model, optimizer, plan)
    for x, y in private.loader(train_set):
        optimizer.zero_grad(); loss_fn(model(x), y).backward(); optimizer.step()
    print(private.spent())

Names are imported on first use, so that asking for an epsilon does not wait for torch.
"""

from __future__ import annotations

from hushgrad._lazy_import import later

TYPE_CHECKING = False  # as in typing, whose import takes 17 ms: an interrupt before ``cli.entry`` would print a traceback
if TYPE_CHECKING:
    from hushgrad import (
        accounting,
        audit,
        clipping,
        denoise,
        errors,
        estimators,
        events,
        noise,
        planner,
        recipes,
        report,
        sampling,
        testing,
        train,
    )
    from hushgrad.accounting import calibrate, delta, epsilon
    from hushgrad.clipping import replace_batchnorm
    from hushgrad.guarantee import Guarantee, Ledger
    from hushgrad.planner import plan_for
    from hushgrad.recipes import load_model
    from hushgrad.report import citation
    from hushgrad.train import Checkpoint, Plan, make_private
    from hushgrad.train.fitting import fit

__version__ = "0.2.0"

_OPACUS = {
    "PrivacyEngine": "plan = Plan.dpsgd(...), then private = make_private(model, optimizer, plan)",
    "make_private_with_epsilon": "Plan.dpsgd(epsilon=..., delta=...), then make_private(model, optimizer, plan)",
    "GradSampleModule": "hushgrad.clipping.Capture; make_private attaches it",
    "ModuleValidator": "replace_batchnorm(model); other layers need no replacement",
    "BatchMemoryManager": "fit(..., max_physical_batch=n), or batch.split(n) in a loop of yours",
    "DPDataLoader": "private.loader(dataset)",
    "DPOptimizer": "torch's own optimizer, after make_private(model, optimizer, plan)",
}

__all__ = [
    "Checkpoint",
    "Guarantee",
    "Ledger",
    "Plan",
    "accounting",
    "audit",
    "calibrate",
    "citation",
    "clipping",
    "delta",
    "denoise",
    "epsilon",
    "errors",
    "estimators",
    "events",
    "fit",
    "load_model",
    "make_private",
    "noise",
    "plan_for",
    "planner",
    "recipes",
    "replace_batchnorm",
    "report",
    "sampling",
    "testing",
    "train",
]


def _instead(name: str) -> str:
    """A hint for a name that does not exist: its equivalent if it is Opacus's, or the closest spelling."""
    if name in _OPACUS:
        return f". Opacus' {name} is here: {_OPACUS[name]}"
    if name.startswith("_"):
        return ""
    import difflib

    close = difflib.get_close_matches(name, __all__, n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


__getattr__, __dir__ = later(__name__, _instead)
