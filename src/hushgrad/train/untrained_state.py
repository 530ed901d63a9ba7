"""Checks what a run releases besides its trained parameters (frozen ones, buffers, extra state): the data must not have written to it.

A training run releases its model's ``state_dict``. Noise is added to what the optimizer updates, and to nothing else in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from hushgrad.clipping.fingerprint import fingerprint
from hushgrad.errors import CaptureError
from hushgrad.release.placement.sharded import is_sharded

Home = dict[str, Any]  # a module's own dict of parameters or of buffers


class _Seen(NamedTuple):
    """A tensor that is released with the model, where it is stored, and its state when it was last checked."""

    home: Home
    key: str
    tensor: Tensor
    version: int
    address: int
    mark: Any

    @classmethod
    def now(cls, home: Home, key: str) -> _Seen:
        tensor = home[key]
        return cls(home, key, tensor, tensor._version, _address(tensor), _mark(tensor))

    def is_untouched(self) -> bool:
        """Whether it was not replaced, written to, or given other memory (``.data = ...``, which torch counts as neither)."""
        if self.home.get(self.key) is not self.tensor or self.tensor._version != self.version:
            return False
        return not self.address or self.tensor.data_ptr() == self.address


class Released:
    """Frozen parameters, buffers and extra state of a model's ``state_dict``, as they were when the run began.

    What torch counts (writes, replacements, new memory) is checked before every step at almost no cost. What it does not
    count, a write through ``.data`` and whatever ``get_extra_state`` returns, is compared by value at steps 1, 2, 4, 8 and so on; so
    are the trainable parameters themselves, between handing out a batch and its step.
    """

    def __init__(self, model: nn.Module, trainable: dict[str, Tensor]) -> None:
        self._model, self._trainable = model, trainable
        self.moves = False  # whether something other than a step changes parameters (lazy tables)
        self.renew()

    def renew(self) -> None:
        """Accept the present values (after loading a checkpoint)."""
        self.seen = {name: _Seen.now(home, key) for name, home, key in self._homes()}
        self._extra = self._extra_marks()
        self._before: dict[str, Any] = {}

    def _homes(self) -> Iterator[tuple[str, Home, str]]:
        """Where the ``state_dict`` stores what no optimizer updates. A buffer that is not saved may change."""
        for path, module in self._model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield prefix + key, module._buffers, key
            for key, p in module._parameters.items():
                if p is not None and not p.requires_grad:
                    yield prefix + key, module._parameters, key

    def _extra_marks(self) -> dict[str, Any]:
        own = nn.Module.get_extra_state
        keepers = ((path, m) for path, m in self._model.named_modules() if type(m).get_extra_state is not own)
        return {path: [_mark(leaf) for leaf in tree_flatten(m.get_extra_state())[0]] for path, m in keepers}

    def before(self) -> None:
        """Called when a batch is handed out whose step will compare values."""
        if not self.moves:
            self._before = {name: _mark(p) for name, p in self._trainable.items() if not is_sharded(p)}

    def check(self, *, values: bool) -> None:
        """Raise if the data wrote to anything that is released; with ``values``, values are compared as well.

        Raises:
            CaptureError: with its name; nothing has been released.
        """
        for name, seen in self.seen.items():
            if seen.is_untouched() and not values:
                continue
            now = seen.home.get(seen.key)
            if now is None or _mark(now) != seen.mark:
                raise _kept(name, frozen=isinstance(seen.tensor, nn.Parameter))
            self.seen[name] = seen._replace(tensor=now, version=now._version, address=_address(now))
        if values:
            self._check_values()

    def _check_values(self) -> None:
        if self._extra != self._extra_marks():
            raise CaptureError(
                "What get_extra_state() returns was changed by the forward pass, and is released with the model without any noise. "
                "Keep it out of the state_dict."
            )
        for name, mark in self._before.items():
            if _mark(self._trainable[name]) != mark:
                raise CaptureError(
                    f"Parameter {name} was changed between the batch and its step: what the forward pass writes to it has no noise. "
                    "Change parameters after optimizer.step(), never in the model."
                )
        self._before = {}

    def require_known(self) -> None:
        """Raise if something that is released was registered since."""
        for name, home, key in self._homes():
            if name not in self.seen:
                raise _kept(name, frozen=isinstance(home[key], nn.Parameter))


def _mark(value: Any) -> Any:
    """The fingerprint; for a sharded tensor, that of this process's shard."""
    return fingerprint(value.to_local() if isinstance(value, Tensor) and is_sharded(value) else value)  # type: ignore[attr-defined]


def _address(tensor: Tensor) -> int:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.data_ptr() if plain else 0  # a sparse tensor, or a wrapper of others, has no memory of its own


def _kept(name: str, *, frozen: bool) -> CaptureError:
    if frozen:
        return CaptureError(
            f"Parameter {name} is frozen, but was changed since the run began: by the forward pass, it holds something of the data without "
            "any noise. Use a layer that keeps nothing (Embedding without max_norm, no running mean), keep it out of the state_dict, and "
            "merge adapters after the run, or into a copy."
        )
    path, _, key = name.rpartition(".")
    return CaptureError(
        f"Buffer {name} was changed by the forward pass, and is released with the model without any noise. Where it holds statistics of "
        "the data, use a layer that keeps none (GroupNorm, or track_running_stats=False). A counter, a cache or the vectors of a spectral "
        f"norm may stay if they are not saved: before make_private, call model.get_submodule({path!r}).register_buffer({key!r}, "
        f"model.get_buffer({name!r}), persistent=False)."
    )
