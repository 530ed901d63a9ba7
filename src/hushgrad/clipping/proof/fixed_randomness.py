"""Forward and backward passes without randomness, after which the model and all random states are restored.

A proof compares an example that runs alone with the same example in its batch. The two would draw different random numbers, so under
:class:`FixedRandomness` dropout keeps every element and random draws return constants. The model stays in training mode: ``eval()``
would test a different model, and setting every ``p=0`` would miss dropout that is not called dropout.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hushgrad.clipping._torch import equal
from hushgrad.clipping.proof.state import attributes_of, attributes_restored
from hushgrad.clipping.thresholds import HUGE_WEIGHT, LARGE_WEIGHT, MOST_CONSTANTS

Draws = tuple[Any, Any]  # states of Python's and numpy's global generators
aten = torch.ops.aten
_ONES = (aten.bernoulli_, aten.exponential_, aten.uniform_, aten.rand, aten.rand_like, aten.bernoulli)
_MASKS = (aten.bernoulli_, aten.bernoulli)
_ZEROS = (aten.normal_, aten.randn, aten.randn_like, aten.normal)
_COMPARING = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
_BOUNDING = (
    *_COMPARING,
    aten.add,
    aten.sub,
    aten.rsub,
    aten.clamp,
    aten.clamp_min,
    aten.clamp_max,
    aten.hardtanh,
    aten.threshold,
)
_ORDINARY: set[Any] = set()  # operations without anything to record
ALMOST_ONE = 0.9990234375  # in place of uniform numbers: above every dropout probability


class FixedRandomness(TorchDispatchMode):
    """A dispatch mode in which dropout keeps every element, and uniform and normal draws return constants.

    ``drawn`` names operations that still draw, ``casts`` the precisions that were cast to. ``replaced`` is True if a constant stood in
    for a random number: a branch or a factor may depend on it, so the proof must be repeated with other constants. ``masked``: the same
    for a mask, of dropout or of bernoulli.

    Args:
        uniform: in place of uniform numbers.
        normal: in place of normal ones.
        drops: dropout drops every element instead.
        falls: uniform and normal numbers differ along the first dimension instead, so that sorting by them changes the order of rows.
    """

    def __init__(self, *, uniform: float = ALMOST_ONE, normal: float = 0.0, drops: bool = False, falls: bool = False) -> None:
        super().__init__()
        self.drawn: set[str] = set()
        self.casts: set[torch.dtype] = set()
        self.replaced = self.masked = False
        self._drops, self._falls = drops, falls
        self.drew = False  # whether some operation draws, or may
        self.watched: set[str] = set()  # kinds of backward passes that were intercepted
        self.seeds: set[int] = set()  # of the generators that were drawn from
        self.compared: dict[float, None] = {}  # constants that tensors were compared with, the first few
        self.bounds: dict[
            float, None
        ] = {}  # constants that were subtracted from tensors, or clamp them, if larger than a proof tries anyway
        self.listens = False  # whether the model's own forward is running
        self._met: dict[int, weakref.ref[Tensor]] = {}  # tensors without gradient that it has read
        self._uniform, self._normal = uniform, normal

    def __reduce__(self) -> tuple[type[FixedRandomness], tuple[()]]:
        """A copied or pickled model starts with a fresh mode."""
        return FixedRandomness, ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.listens:
            for value in args:
                if isinstance(value, Tensor) and not value.requires_grad:
                    self._met[id(value)] = weakref.ref(value)
        if func in _ORDINARY:
            return func(*args, **kwargs)
        name = func.overloadpacket
        if name is aten._to_copy and getattr(kwargs.get("dtype"), "is_floating_point", False):
            self.casts.add(kwargs["dtype"])
        if self.listens and name in _BOUNDING:
            self._bound(args)
            if name in _COMPARING:
                self._compare(args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew = True
            self.seeds.add((kwargs.get("generator") or torch.default_generator).initial_seed())
        if name is aten.native_dropout:
            self.masked = True
            mask = torch.full_like(args[0], not self._drops, dtype=torch.bool)
            return args[0] * mask, mask
        if name in _ONES or name in _ZEROS:
            made = func(*args, **kwargs)
            uniform = name in (aten.uniform_, aten.rand, aten.rand_like)
            self.replaced = self.replaced or uniform or name in _ZEROS
            self.masked = self.masked or name in _MASKS
            if self._falls and made.dim() and (uniform or name in _ZEROS):
                return made.copy_(_falling(len(made), made.device).view(-1, *[1] * (made.dim() - 1)))
            return made.fill_(self._constant(name, uniform=uniform))
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(
            name
        ):  # with dropout that one is decomposed
            self.drawn.add(str(name).removeprefix("aten."))
        if torch.Tag.nondeterministic_seeded not in func.tags and name is not aten._to_copy and name not in _BOUNDING:
            _ORDINARY.add(func)
        return func(*args, **kwargs)

    def _constant(self, name: Any, *, uniform: bool) -> float:
        if name in _MASKS:
            return float(not self._drops)
        return self._normal if name in _ZEROS else self._uniform if uniform else 1.0

    @property
    def idle(self) -> bool:
        """Whether no pass so far has drawn a number, or compared a tensor with a constant that must be tried."""
        return not (self.drew or self.compared or self.bounds)

    def met(self) -> list[Tensor]:
        """Tensors without gradient that the passes read and that are still alive, because something outside of them holds them."""
        return [t for ref in self._met.values() if (t := ref()) is not None]

    def _bound(self, args: Any) -> None:
        first, *numbers = args
        if isinstance(first, Tensor) and first.is_floating_point():
            usual = (v for v in numbers if isinstance(v, (int, float)) and LARGE_WEIGHT < abs(v) < HUGE_WEIGHT)
            self.bounds.update(dict.fromkeys(float(v) for v in usual if len(self.bounds) < MOST_CONSTANTS))

    def _compare(self, args: Any) -> None:
        value = args[1]
        if isinstance(value, Tensor):
            value = value.item() if value.numel() == 1 else None
        if isinstance(value, (int, float)) and len(self.compared) < MOST_CONSTANTS and math.isfinite(value):
            self.compared[float(value)] = None


def _falling(rows: int, device: torch.device) -> Tensor:
    """Numbers between 0 and 1 that are large and small in turn, and fall among each of these."""
    made = torch.linspace(ALMOST_ONE, 0.75, rows, dtype=torch.float32, device=device)
    made[1::2] -= 0.75 - (1 - ALMOST_ONE)
    return made


_now: list[FixedRandomness] = []


@contextmanager
def fixing_randomness(quiet: FixedRandomness) -> Iterator[None]:
    """Inside, :func:`randomness_fixed` enters this mode. Code outside of it is not intercepted, which costs a tenth."""
    _now.append(quiet)
    try:
        yield
    finally:
        _now.pop()


def randomness_fixed(backward: str = "") -> AbstractContextManager[Any]:
    """A context for everything that runs the model: a forward pass, or a backward pass in which a checkpoint recomputes it.

    The first pass of each kind ``backward`` is intercepted; if nothing has drawn so far, later ones of that kind are not, at half the cost.
    """
    if not _now or (_now[-1].idle and backward in _now[-1].watched):
        return nullcontext()
    if backward:
        _now[-1].watched.add(backward)
    return _now[-1]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def put_back(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Restore all buffers; one that was registered since then stays."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            kept = buffers.get(name)
            if (
                kept is not None and buffer.shape == kept.shape and not equal(buffer, kept)
            ):  # writing would invalidate an open graph
                buffer.copy_(kept)


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, attributes and random states are restored."""
    start, state, host = buffers_of(model), torch.get_rng_state(), host_draws()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        with attributes_restored(attributes_of(model)):
            yield
    finally:
        put_back(model, start)
        torch.set_rng_state(state)
        draw_from(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)


def host_draws() -> Draws:
    """The states of Python's and numpy's global generators, which models use for layer dropout and masks."""
    import numpy as np

    state: Any = np.random.get_state()
    kind, keys, *rest = state
    return random.getstate(), (kind, keys.tobytes(), *rest)


def draw_from(draws: Draws) -> None:
    """Restore both generators."""
    import numpy as np

    kind, keys, *rest = draws[1]
    random.setstate(draws[0])
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
