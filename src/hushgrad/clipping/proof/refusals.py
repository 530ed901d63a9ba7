"""The end of a proof that fails: who is to blame, and the error."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hushgrad.clipping.isolation_check import culprit
from hushgrad.clipping.proof.fixed_randomness import FixedRandomness, as_it_was
from hushgrad.clipping.proof.inputs import leaves
from hushgrad.clipping.proof.messages import differentiated, disproportionate, exchanged, refusal
from hushgrad.clipping.proof.proof_passes import ProofPasses
from hushgrad.clipping.proof.seal import Broken
from hushgrad.errors import CaptureError, HushgradError, NotIsolated


class Failure(NamedTuple):
    """Why a proof failed: what broke the seal (None: no reading of the inputs explains the outputs), or an exception."""

    problem: Broken | None
    error: HushgradError | None
    drawn: frozenset[str]


class Refusals(ProofPasses):
    """Raises the error of a proof that failed."""

    def _refuse(self, inputs: Any, B: int, failure: Failure) -> NoReturn:
        problem, name = failure.problem, type(self.model).__name__
        mixes = failure.error is None and (problem is None or problem.influence)
        if not mixes and self.differentiates:
            failure = Failure(None, CaptureError(differentiated(name)), failure.drawn)
            found = None
        else:
            hooked = (
                not mixes and self._spares_parameters and self._is_disproportionate(inputs)
            )  # otherwise these passes would write to parameters
            found = disproportionate(name, self._hooked()) if hooked else None
        if failure.error is not None:
            error = failure.error if found is None else CaptureError(found)
            self._tape.failure = str(error)
            raise error
        packed = any(
            isinstance(t, PackedSequence) for t in leaves(inputs)
        )  # its rows are not examples, so no layer can be blamed
        if mixes and not packed:
            with as_it_was(self.model), self._capture.pause():
                found = culprit(self.model, inputs[0], inputs[1], B)
        if mixes and self.differentiates:
            found = found or exchanged(name)
        message = found or refusal(name, B, failure.problem, failure.drawn, packed=packed)
        self._tape.failure = message
        raise NotIsolated(message)

    def _is_disproportionate(self, inputs: Any) -> bool:
        """Whether the gradients do not double exactly when the loss doubles, as they do for all of torch's own operations."""
        params = list(self._capture.trained.values())

        def grads(scale: float) -> list[Tensor | None]:
            outputs = [y for y in self.alone(inputs)[0] if y.requires_grad]
            found = torch.autograd.grad(outputs, params, [torch.full_like(y, scale) for y in outputs], allow_unused=True)
            return [None if g is None else g.to_dense() / scale for g in found]

        try:
            with self._proving(FixedRandomness()), self.paused():
                once, twice = grads(1.0), grads(2.0)
        except Exception:  # noqa: BLE001  the model's own: nothing was shown
            return False
        pairs = zip(once, twice, strict=True)
        return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if a is not None and b is not None)

    def _hooked(self) -> list[str]:
        """Trained parameters and modules whose gradients have hooks."""
        params = [name for name, p in self._capture.trained.items() if p._backward_hooks]
        return params + [path for path, module in self.model.named_modules() if module._backward_hooks]
