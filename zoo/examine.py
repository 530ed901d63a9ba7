"""One specimen, one private step, and the verdict: is the released sum that of the clipped single-example gradients?"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn

from hushgrad.clipping import Capture, Flat, replace_batchnorm
from hushgrad.errors import HushgradError
from zoo.specimen import RELATIONS, Specimen
from zoo.truth import Truth, apart

__all__ = ["Finding", "Verdict", "examine"]

# Relative: rounding is below 1e-9 and 1e-5, one wrong row above 1e-3. Some models make float32 tensors of their own and run in that.
_SAME = {torch.float64: 1e-6, torch.float32: 1e-4}


class Verdict(str, Enum):
    """What a private run did with a model."""

    EXACT = "exact"
    RIGHTLY = "refused rightly"  # its examples influence one another, or it keeps statistics of them
    ATTRIBUTABLE = "refused though attributable"
    WRONG = "wrong"
    FOREIGN = "foreign exception"
    SLOW = "too slow"
    SKIPPED = "skipped"  # cannot be built or run here without any privacy either


@dataclass(frozen=True)
class Finding:
    """The verdict on one specimen at one relation of sizes."""

    name: str
    relation: str
    verdict: Verdict
    error: float = float("nan")  # relative, of the clipped sum
    message: str = ""
    ratio: float = float("nan")  # CPU time of a later private step to that of a plain one
    seconds: float = 0.0


class _Timeout(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def examine(specimen: Specimen, relation: str = "usual", *, limit: int = 60, reraise: bool = False) -> Finding:
    """Build, compare and judge, within ``limit`` seconds of CPU time; ``reraise`` shows where an error comes from."""
    began = time.monotonic()
    try:
        with _deadline(limit):
            finding = _judged(specimen, relation, reraise)
    except _Timeout:
        finding = Finding(specimen.name, relation, Verdict.SLOW, message=f"more than {limit} s")
    return replace(finding, seconds=round(time.monotonic() - began, 2))


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _Timeout

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: other programs on the machine do not count
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _judged(specimen: Specimen, relation: str, reraise: bool) -> Finding:
    finding = Finding(specimen.name, relation, Verdict.SKIPPED)
    try:
        truth = None if specimen.empty else _runs(specimen, relation)
    except HushgradError as refusal:  # replace_batchnorm does not know a layer
        return replace(finding, verdict=Verdict.ATTRIBUTABLE, message=_told(refusal))
    except Exception as error:  # noqa: BLE001  a model that does not run by itself says nothing about the library
        return replace(finding, message=_told(error))
    try:
        error, ratio = _of_nothing(specimen) if truth is None else truth.compare()
    except HushgradError as refusal:
        rightly = specimen.refusal or (truth is not None and truth.mixing)
        if reraise:
            raise
        return replace(finding, verdict=Verdict.RIGHTLY if rightly else Verdict.ATTRIBUTABLE, message=_told(refusal))
    except Exception as foreign:
        if reraise:
            raise
        return replace(finding, verdict=Verdict.FOREIGN, message=_told(foreign))
    right = error <= _SAME[torch.float64 if truth is None else truth.dtype] and not specimen.refusal
    return replace(finding, verdict=Verdict.EXACT if right else Verdict.WRONG, error=error, ratio=ratio)


def _runs(specimen: Specimen, relation: str) -> Truth:
    """The truth in float64; in float32 where the model cannot run, or has no finite gradients, in float64."""
    try:
        truth = _truth(specimen, relation, torch.float64)
        if truth.finite:
            return truth
    except (RuntimeError, TypeError):
        pass
    truth = _truth(specimen, relation, torch.float32)
    if not truth.finite:
        raise ArithmeticError("its own gradients are not finite")
    return truth


def _truth(specimen: Specimen, relation: str, dtype: torch.dtype) -> Truth:
    return Truth(_model(specimen, dtype), specimen, specimen.records(RELATIONS[relation]), dtype)


def _model(specimen: Specimen, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = _without_chance(specimen.build()).to(dtype).train()
    return replace_batchnorm(model) if specimen.batchnorm else model


def _of_nothing(specimen: Specimen) -> tuple[float, float]:
    """An empty batch: its clipped sum is 0."""
    model = _model(specimen, torch.float64)
    capture = Capture(model, loss_reduction=specimen.reduction)
    capture.attach()
    capture.examples(0)
    assert specimen.empty is not None
    specimen.loss(model, specimen.empty()).backward()
    sums = list(capture.collect(Flat(1.0)).raw_sums.values())
    return apart(sums, [torch.zeros_like(s) for s in sums]), 1.0


_CHANCE = (
    "dropout",
    "dropout_prob",
    "attention_dropout",
    "attn_dropout",
    "activation_dropout",
    "drop_prob",
    "dropout_p",
    "layerdrop",
    "p",
)


def _without_chance(model: nn.Module) -> nn.Module:
    """Dropout and stochastic depth at 0: a single-example pass must draw the same as the batch's."""
    for module in model.modules():
        for name in _CHANCE:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
