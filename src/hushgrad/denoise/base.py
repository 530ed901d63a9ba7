"""Denoisers: post-processing of privatised gradients. It costs no privacy budget.

| symbol | name | meaning |
|---|---|---|
| g_t | ``grads`` | the privatised gradient of step t, after division by the public batch size |
| s_t | ``info.std`` | the standard deviation of its noise, per coordinate |
| x_t | ``params`` | the parameters at step t, which are private releases already |
| κ, γ | ``kappa``, ``gamma`` | gain and probe distance of :class:`Kalman` |
| σ, A_σ | ``sigma`` | strength and matrix I - σ L of :class:`Laplacian` |
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hushgrad import _check
from hushgrad._value import Value
from hushgrad.errors import ArgumentError

if TYPE_CHECKING:  # a plan has a denoiser, and is read and priced without torch
    import torch
    from torch import Tensor


class Probe(NamedTuple):
    """One point at which the gradient is asked: ``coefficient`` x gradient at (parameters + ``shift``).

    A step's query is the sum over its probes, combined per example *before* clipping, so its sensitivity stays that of one
    clipped query. ``shift`` is a dict by parameter name, or None for the parameters themselves.

        >>> import torch
        >>> [probe.coefficient for probe in (Probe(), Probe(-1.0, {"weight": torch.ones(2)}))]
        [1.0, -1.0]
    """

    coefficient: float = 1.0
    shift: dict[str, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class NoiseInfo:
    """What a denoiser may know of a privatised gradient: public facts only.

    ``std`` is the true per-coordinate standard deviation of the noise in this row (correlated noise included), in the units
    of the gradient that is handed over, that is after division by the public batch size.

        >>> NoiseInfo(std=0.01, step=3, max_grad_norm=1.0).std
        0.01
    """

    std: float
    step: int
    max_grad_norm: float
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        _check.non_negative(std=self.std)


class Seams(Protocol):
    """Gathers a tensor from the shards of several processes, and cuts it again; all processes must call together."""

    def join(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor of parameter ``name``, of which ``part`` is this process's."""

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of it, in memory of its own."""


class Denoiser(Value, family="denoiser"):
    """A frozen, public description of a filter; its live state is a plain dict that the caller keeps and saves.

    **Formal guarantee.** A denoiser sees privatised gradients, the parameters (functions of earlier privatised gradients) and
    public facts, so whatever it computes is post-processing: every (epsilon, delta) of the run stays as it was. A denoiser that
    probes chooses *where* the next query is evaluated, from the same released values, and the query is clipped after its probes are
    combined: its sensitivity is still one clip norm, which is adaptive composition as in plain DP-SGD. One that ``rescales`` chooses
    the scale in which the next query is clipped, from the same values: clip_C(s ⊙ g_i) has norm at most C whatever s is, and the noise
    is added to a sum of these, so again nothing changes.

        >>> from hushgrad.denoise import Laplacian
        >>> Laplacian(1.0)
        Laplacian(sigma=1.0, scope='tensor', boundary='periodic', grid=None, skip_1d=True)
    """

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        """Small instances for the conformance tests."""
        return (cls(),)

    @classmethod
    def idle(cls) -> tuple[Denoiser, ...]:
        """Instances set to do nothing: their output is their input, bit for bit."""
        return ()

    @property
    def never_grows(self) -> bool:
        """Whether no output is longer than the longest input so far: true of averages and shrinkage, not of preconditioners."""
        return True

    @property
    def needs_closure(self) -> bool:
        """Whether ``probes`` may leave the parameters, so that gradients are asked through ``optimizer.step(closure)``."""
        return type(self).probes is not Denoiser.probes

    @property
    def rescales(self) -> bool:
        """Whether ``scales`` may return scales, so that gradients are multiplied by them before clipping."""
        return type(self).scales is not Denoiser.scales

    @property
    def needs_whole_tensor(self) -> bool:
        """Whether a shard of a parameter is not enough: ``on_shards`` then gathers the tensor, denoises it and keeps the shard."""
        return False

    @property
    def needs_all_tensors(self) -> bool:
        """Whether tensors cannot be denoised one at a time. Sharded models, whose tensors are never all gathered, are then refused."""
        return self.rescales  # each example's whole gradient is formed

    @property
    def needs_noise_std(self) -> bool:
        """Whether ``info.std`` is used, so that no other denoiser may change the noise before this one."""
        return False

    def probes(self, params: dict[str, Tensor], state: dict[str, Any]) -> list[Probe]:
        """The points at which this step evaluates gradients; by default one, the parameters."""
        return [Probe()]

    def scales(self, state: dict[str, Any]) -> dict[str, Tensor] | None:
        """What every example's gradient of this step is multiplied by, coordinate by coordinate, before it is clipped; None: nothing.

        Tensors by parameter name, each of its parameter's shape, positive, and made of ``state`` alone, that is of earlier releases.
        ``grads`` of the step are then privatised in the scaled space, and ``__call__`` may scale them back.
        """
        return None

    @abstractmethod
    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        """The denoised gradients: fresh tensors, never an alias of ``state`` or of the input.

        ``grads`` are privatised, by parameter name. ``state`` starts empty and belongs to this denoiser alone; it holds numbers
        and tensors only, so that it can be written to a checkpoint. A tensor has the shape of a parameter and stands under
        "what.parameter", where "what" has no dot, so that it can be cut like the parameter.
        """

    def on_shards(self, shards: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any], seams: Seams) -> dict[str, Tensor]:
        """``__call__`` where each process holds a part of every tensor: on the parts if they are enough, else tensor by tensor.

        A denoiser of whole tensors must not keep state: there is no place where it would be whole.

        Args:
            shards: this process's part of every noisy gradient, by name.
            info: what is known of the noise in them.
            state: what the denoiser keeps between steps.
            seams: how the parts lie in the whole tensors, and how whole ones are gathered.
        """
        if not self.needs_whole_tensor:
            return self(shards, info, state)
        out = {}
        for name, shard in shards.items():
            out[name] = seams.cut(name, self({name: seams.join(name, shard)}, info, state)[name])
        if state:
            raise ArgumentError(
                f"{type(self).__name__} keeps state for whole tensors, which a sharded model has no place for. "
                "Run data parallel without fully_shard."
            )
        return out


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The precision to compute and to keep state in: float64 stays, everything narrower works in float32.

    A running mean kept in bfloat16 loses every update smaller than 1/256 of itself, so state is never narrower than float32.
    """
    import torch

    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
