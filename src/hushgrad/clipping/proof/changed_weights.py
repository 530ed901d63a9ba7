"""Temporary changes of weights while a model is proved; afterwards they are restored bit for bit.

Parameters that are 0 hide what is below them: LoRA's first matrix gets no gradient while its second one is 0. Which rows a layer reads does
not depend on the values of its weights, so during a proof such parameters hold other numbers, as they will after the first step.

A scalar (a gate, a temperature) may block a path that training or a schedule opens later, and so may negative values in front of a ReLU.
So the model is also tried with other scalars, with negated weight matrices and other vectors, and with weights beyond each constant that
the forward subtracts or compares with. Finally, a value may be so close to a kink that rounding decides on which side it lies: moving all
weights by up to 1/256 resolves that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.clipping.thresholds import LARGE_WEIGHT

_SIZE = 0.02  # a typical initial weight
_NUDGE = 2.0**-8  # far above rounding
_FEW = 64  # a vector of at most so many numbers may be gates


@contextmanager
def lifted(params: Iterable[Tensor]) -> Iterator[None]:
    """Inside, parameters that are 0 throughout hold numbers of about 0.02."""
    with _kept([p.data for p in params if _is_nothing(p)]) as every:
        for data in every:
            data.copy_(_numbers(data.shape, 0.5 * _SIZE, 1.5 * _SIZE))
        yield


def is_lifted(params: Iterable[Tensor]) -> bool:
    """Whether :func:`lifted` would change any of them."""
    return any(map(_is_nothing, params))


def switches(model: nn.Module) -> list[Tensor]:
    """Scalar parameters and buffers, and small untrained tensors that are 0 throughout: possible gates."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    every = [t for t in (*model.parameters(), *model.buffers()) if _is_usual(t)]
    return [t for t in every if t.numel() == 1 or (id(t) not in trained and t.numel() <= _FEW and _is_nothing(t))]


@contextmanager
def switched(tensors: list[Tensor], by: float) -> Iterator[None]:
    """Inside, ``by`` is added to these tensors."""
    with _kept([t.data for t in tensors]) as every:
        for data in every:
            data.add_(by)
        yield


@contextmanager
def nudged(params: Iterable[Tensor]) -> Iterator[None]:
    """Inside, each number is multiplied by a factor between 1 - 1/256 and 1 + 1/256."""
    with _kept(list({id(p): p.data for p in params if _is_usual(p)}.values())) as every:
        lot = np.random.default_rng(0)
        for data in every:
            data.mul_(torch.as_tensor(lot.uniform(1 - _NUDGE, 1 + _NUDGE, data.shape)))
        yield


@contextmanager
def overturned(params: Iterable[Tensor]) -> Iterator[None]:
    """Inside, matrices are negated, and vectors hold random numbers of both signs."""
    every = list({id(p): p.data for p in params if _is_usual(p)}.values())
    turned: list[Tensor] = []
    with _kept([data for data in every if data.dim() < 2]) as rows:
        try:
            for data in rows:
                data.copy_(_numbers(data.shape, 0.5, LARGE_WEIGHT))
            for data in every:
                if data.dim() > 1:
                    turned.append(data.neg_())
            yield
        finally:
            for data in turned:
                data.neg_()


@contextmanager
def beyond(params: Iterable[Tensor], bound: float) -> Iterator[None]:
    """Inside, these hold numbers beyond the bound, of both signs; a scalar gets the sign of the bound."""
    size = abs(bound) + 1
    with _kept(list({id(p): p.data for p in params if _is_usual(p)}.values())) as every:
        for data in every:
            if data.numel() == 1:
                data.fill_(math.copysign(size, bound))
            elif data.dim() < 2 or not bool(data.any()):
                data.copy_(_numbers(data.shape, size, 1.1 * size))
            else:
                data.mul_(size / min(size, max(1e-3, float(data.abs().amax()))))
        yield


@contextmanager
def _kept(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the tensors, and restores them bit for bit."""
    kept = [(data, data.clone()) for data in tensors]
    try:
        yield tensors
    finally:
        for data, was in kept:
            data.copy_(was)


def _is_nothing(p: Tensor) -> bool:
    """Whether a tensor is 0 throughout."""
    return _is_usual(p) and not bool(p.data[(0,) * p.dim()]) and not bool(p.data.any())  # the first number nearly always decides


def _is_usual(p: Tensor) -> bool:
    """Whether a tensor can be changed: quantised, sharded and sparse ones are left alone."""
    usual = type(p.data) is Tensor and p.layout is torch.strided and p.dtype.is_floating_point and not p.is_meta
    return usual and p.numel() > 0


def _numbers(shape: torch.Size, low: float, high: float) -> Tensor:
    """Random numbers of both signs with sizes from ``low`` to ``high``, the same in every call and every process."""
    lot = np.random.default_rng(0)  # torch's generator is the model's
    return torch.as_tensor(lot.uniform(low, high, shape) * lot.choice((-1.0, 1.0), shape))
