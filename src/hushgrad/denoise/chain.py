"""Denoisers one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hushgrad import _check, _papers
from hushgrad.denoise.base import Denoiser, NoiseInfo, Probe, Seams
from hushgrad.denoise.kalman import ExponentialAverage, Kalman
from hushgrad.denoise.laplacian import Laplacian
from hushgrad.denoise.lowpass import LowPass
from hushgrad.denoise.second_moment import DebiasedSecondMoment
from hushgrad.denoise.svrg import SVRG
from hushgrad.errors import ArgumentError


@dataclass(frozen=True)
class Chain(Denoiser):
    """Several denoisers, applied from left to right; ``Chain(())`` is the identity.

    | refused | why |
    |---|---|
    | two members that probe | a step has one query |
    | a member that uses the noise's std, or rescales, other than first | the one before it has changed the noise, or its scale |

    **Formal guarantee.** Post-processing of post-processing: no privacy is spent.

    >>> from hushgrad.denoise import Kalman, Laplacian
    >>> Chain([Kalman(0.7), Laplacian(1.0)]).needs_closure
    True

    Reference: Dwork and Roth, "The algorithmic foundations of differential privacy", 2014, Proposition 2.1.
    """

    papers = (_papers.DWORK_2014_FOUNDATIONS,)

    members: Sequence[Denoiser] = ()

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (
            cls([Kalman(0.8), Laplacian(1.0)]),
            cls([DebiasedSecondMoment(), LowPass()]),
            cls([SVRG(period=3), ExponentialAverage(0.5)]),
        )

    @property
    def never_grows(self) -> bool:
        return all(member.never_grows for member in self.members)

    @classmethod
    def idle(cls) -> tuple[Denoiser, ...]:
        return (cls(()), cls([Kalman(1.0), Laplacian(0.0)]))

    def __post_init__(self) -> None:
        members: tuple[Denoiser, ...] = tuple(
            _check.instance((tuple, list), members=self.members, remedy="Write Chain([first, second]).")
        )
        object.__setattr__(self, "members", members)
        for member in members:
            _check.instance(Denoiser, members=member)
        if sum(member.needs_closure for member in members) > 1:
            _check.fail("members", members, "to hold at most one that probes", "A step has one query: keep one of them.")
        if any(member.rescales for member in members[1:]):
            remedy = "Put it first: it is handed the gradient in the measure that it has chosen."
            _check.fail("members", members, "to rescale in the first place only", remedy)
        if any(member.needs_noise_std for member in members[1:]):
            remedy = "Put it first: the noise that the others leave is not the noise that it is told of."
            _check.fail("members", members, "to use the noise's standard deviation in the first place only", remedy)

    @property
    def rescales(self) -> bool:
        return any(member.rescales for member in self.members)

    @property
    def needs_closure(self) -> bool:
        return any(member.needs_closure for member in self.members)

    @property
    def needs_whole_tensor(self) -> bool:
        return any(member.needs_whole_tensor for member in self.members)

    @property
    def needs_all_tensors(self) -> bool:
        return any(member.needs_all_tensors for member in self.members)

    @property
    def needs_noise_std(self) -> bool:
        return any(member.needs_noise_std for member in self.members)

    def probes(self, params: dict[str, Tensor], state: dict[str, Any]) -> list[Probe]:
        """The probes of the one member that probes, else the parameters themselves. All members are called: some record state."""
        asked = [Probe()]
        for member, own in self._each(state):
            points = member.probes(params, own)
            if points != [Probe()]:
                if asked != [Probe()]:
                    raise ArgumentError("Two members of a Chain ask for gradients elsewhere, but a step has one query. Keep one.")
                asked = points
        return asked

    def scales(self, state: dict[str, Any]) -> dict[str, Tensor] | None:
        return self.members[0].scales(_own(state, 0)) if self.members else None

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        if not self.members:
            return {name: grad.clone() for name, grad in grads.items()}
        for member, own in self._each(state):
            grads = member(grads, info, own)
        return grads

    def on_shards(self, shards: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any], seams: Seams) -> dict[str, Tensor]:
        """Apply the members in order; tensors are gathered only for those that need them whole."""
        if not self.members:
            return self(shards, info, state)
        for member, own in self._each(state):
            shards = member.on_shards(shards, info, own, seams)
        return shards

    def _each(self, state: dict[str, Any]) -> Iterator[tuple[Denoiser, dict[str, Any]]]:
        """Each member with its part of the state, which is written back before the next member."""
        for place, member in enumerate(self.members):
            own = _own(state, place)
            yield member, own
            _keep(state, place, own)


def _own(state: dict[str, Any], place: int) -> dict[str, Any]:
    """What belongs to member ``place``: the keys that start with "place/", so that the whole stays one flat dict."""
    prefix = f"{place}/"
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def _keep(state: dict[str, Any], place: int, own: dict[str, Any]) -> None:
    prefix = f"{place}/"
    for key in [key for key in state if key.startswith(prefix) and key[len(prefix) :] not in own]:
        del state[key]
    state.update({prefix + key: value for key, value in own.items()})
