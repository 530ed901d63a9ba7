"""TRL: an ``SFTTrainer`` whose steps are those of a plan."""

from __future__ import annotations

from typing import Any

try:
    from trl import SFTTrainer
except ImportError as error:  # pragma: no cover
    raise ImportError("hushgrad.integrations.trl needs trl: pip install 'hushgrad[trl]'.") from error

from hushgrad import _check
from hushgrad.integrations.huggingface import PrivateTrainer


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):  # type: ignore[misc]
    """TRL's ``SFTTrainer`` with a plan: it prepares the texts (templates, masks of what counts), the steps are private.

    **Formal guarantee.** As :class:`~hushgrad.integrations.huggingface.PrivateTrainer`, whose arguments these are: a row of the prepared
    data is one example, so packing is refused. The loss is the mean over each example's own tokens that count.

    Args:
        model: the model; wrap it (``get_peft_model``) before.
        args: an ``SFTConfig`` without ``packing`` and ``padding_free``, with ``loss_type="nll"`` and ``save_strategy="no"``.
        options: those of ``PrivateTrainer``: ``plan``, ``train_dataset``, ``processing_class``, ``groups``, ``checkpoint`` and so on.
    """

    def __init__(self, model: Any, args: Any, *options: Any, **named: Any) -> None:
        for name, wanted in (("packing", False), ("padding_free", False), ("loss_type", "nll")):
            found = getattr(args, name, wanted)
            if found != wanted:
                _check.fail(name, found, f"to be {wanted!r}", "A row is one example, and its loss the mean over its own tokens.")
        super().__init__(model, args, *options, **named)
