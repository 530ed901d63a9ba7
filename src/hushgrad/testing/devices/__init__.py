"""A simulated accelerator in main memory: counts what a private step would do on a real one.

Tensors on it hold ordinary numbers and, like a GPU's, refuse to meet tensors in main memory. Every launch, wait, copy and byte is
counted by the line that caused it. So a machine without an accelerator can show that a step runs on one, that it never waits, and how
many launches it takes; it cannot show how long they take.

    with pretend() as device:
        model = device.put(model)
        ...
        with device.counting() as meter:
            step(x.to("pretend"))
        print(meter)

One call of ATen that is not a view counts as one launch. Real libraries launch more for some calls (a sort, a convolution).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.backend_registration import _DummyBackendModule, _DummyPrivateUse1Hook, _setup_privateuseone_for_python_backend

from hushgrad._precision import widest_dtype
from hushgrad.noise._chacha import ChaChaStream
from hushgrad.noise.device_noise import DeviceKernel, Target, Turn, reference_row, register
from hushgrad.testing.devices import tensors
from hushgrad.testing.devices.tensors import NAME, Dispatch, Functions, Meter, OnDevice, WrongDevice, meters, on_host

__all__ = ["Meter", "PretendDevice", "WrongDevice", "on_host", "pretend"]

M = TypeVar("M", bound=nn.Module)


class _Kernel(DeviceKernel):
    """Noise in one launch, as a kernel on a real device makes it; here by the reference."""

    def row(self, stream: ChaChaStream, turn: Turn, targets: Sequence[Target], scale: float | Tensor, *, fresh: bool) -> None:
        for _ in dict.fromkeys(target.out.dtype for target in targets):
            for meter in meters[-1:]:
                meter.launched("noise_row", [target.out for target in targets])
        by = float(on_host(scale)) if isinstance(scale, Tensor) else scale
        for out, state, index, offset in targets:
            into = on_host(out.detach())
            real = torch.float64 if into.dtype is torch.float64 else torch.float32
            made = into if into.dtype is real else into.to(real)
            kept = None if state is None else on_host(state).numpy()
            reference_row(stream, turn, made.numpy().reshape(-1), kept, (index, offset), by, fresh=fresh)
            if made is not into:
                into.copy_(made)


register(NAME, _Kernel())


class PretendDevice:
    """The device of a :func:`pretend` block."""

    def put(self, model: M) -> M:
        """``model`` with its parameters and buffers on the device, tied ones still tied."""
        seen: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, p in list(module._parameters.items()):
                if p is not None:
                    moved = seen.setdefault(id(p), nn.Parameter(OnDevice(p.detach().clone()), requires_grad=p.requires_grad))
                    module._parameters[name] = moved
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = OnDevice(buffer.detach().clone())
        return model

    @contextmanager
    def counting(self) -> Iterator[Meter]:
        """Count what happens inside."""
        meter = Meter()
        meters.append(meter)
        try:
            yield meter
        finally:
            meters.remove(meter)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count what happens inside; for tests that inspect tensors."""
        with self.counting():
            yield


class _Quiet(_DummyPrivateUse1Hook):
    """An accelerator that torch does not find by searching for one: its default device stays the same."""

    def is_available(self) -> bool:
        return False


class _Module(_DummyBackendModule):
    def is_available(self) -> bool:
        return False

    # torch.random.fork_rng asks every accelerator that it knows. This one draws with the host's generator and has no state.
    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        pass


# When this module is imported, because autograd makes its threads at the first backward, one for each device that there is by then.
_setup_privateuseone_for_python_backend(rename=NAME, hook=_Quiet(), backend_module=_Module())


# New memory where somebody has switched all modes off, which catch it otherwise.
@torch.library.impl("aten::empty_strided", "PrivateUse1")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


@torch.library.impl("aten::empty.memory_format", "PrivateUse1")
def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty(size, dtype=dtype, device="cpu"))


def _require_autograd() -> None:
    try:
        OnDevice(torch.ones(1)).requires_grad_().sum().backward()
    except RuntimeError:
        raise WrongDevice(
            "A backward pass has run in this process before the pretend device was known. Import hushgrad.testing.devices first."
        ) from None


@contextmanager
def pretend(*, double: bool = True) -> Iterator[PretendDevice]:
    """Inside, ``"pretend"`` is a device: ``tensor.to("pretend")``, ``torch.zeros(3, device="pretend")``.

    ``double`` False: it has no double precision, as Apple's devices have none.

    >>> with pretend() as device:
    ...     x = torch.arange(3.0).to("pretend")
    ...     with device.counting() as meter:
    ...         total = float((x + x).sum())
    >>> total, str(meter)
    (6.0, 'launches 2, syncs 1, copies 0, bytes 0')
    """
    tensors.double.append(double)
    widest_dtype.cache_clear()
    try:
        with Functions(), Dispatch():
            _require_autograd()
            yield PretendDevice()
    finally:
        tensors.double.pop()
        widest_dtype.cache_clear()
