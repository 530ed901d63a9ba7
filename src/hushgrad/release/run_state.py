"""The state between two steps: noise stream, clip norm and denoiser, and how they are restored after a restart."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hushgrad._universal_hash import Witness
from hushgrad.clipping.adaptive import Adaptive, AdaptiveOnDevice
from hushgrad.clipping.clipper import Clipper
from hushgrad.denoise.base import NoiseInfo, Probe
from hushgrad.events import Relation
from hushgrad.noise.source import Source
from hushgrad.release.keys import RunKey

if TYPE_CHECKING:
    from hushgrad.release.core import Noised
    from hushgrad.release.placement.whole import Whole
    from hushgrad.train.plan import Plan


class RunState:
    """One run's noise, clip norm and denoiser."""

    def __init__(self, plan: Plan, placement: Whole, key: RunKey, *, witnessed: bool = False) -> None:
        self._plan, self.placement = plan, placement
        self.lazy: frozenset[str] = frozenset()  # tables whose noise is added when they are read
        self._hashes = witnessed and placement.finishes  # whether releases are hashed as soon as they have their noise
        self.noted: Callable[[], bytes] | None = None  # a digest of what else was released since the last step
        self._first: list[str] | None = None  # sums whose noise is drawn first; None: not yet known
        self._filter_state: dict[str, Any] = {}
        self.use_clip(plan.clip)
        self.use_key(key)

    @abstractmethod
    def _fresh(self, step: int, names: Iterable[str]) -> dict[str, Tensor]:
        """This process's part of row ``step`` in new tensors."""

    def use_key(self, key: RunKey) -> None:
        """Start the noise of another key, from its first row."""
        self._key = key
        self._start()
        self._ahead = False

    def _start(self) -> None:
        key, self.source = self._key, Source(key=self._key.secret, secure=self._plan.secure, cipher=self._plan.drawn_by)
        self.stream = self.placement.streamed(self._plan.noise.stream(self.source, steps=self._plan.steps))
        self._witness = Witness(key.witness)
        self.source.hashed = self._witness.hashed if self._hashes else None

    def use_clip(self, clip: Clipper) -> None:
        """Clip the next step with ``clip``: the plan's clipper, or what adaptive clipping has moved it to."""
        multiplier = self._plan.noise_multiplier or 0.0
        adaptive = clip.options if isinstance(clip, AdaptiveOnDevice) else clip
        if isinstance(adaptive, Adaptive):
            multiplier = adaptive.gradient_noise(multiplier)  # the count gets the rest of the budget
        self._adapts = isinstance(adaptive, Adaptive)
        self.live_clip, self.clip_norm = clip, clip.sensitivity(Relation.ADD_REMOVE)
        self._scale = multiplier * self.clip_norm / self._plan.batch_size

    @property
    def clip(self) -> Clipper:
        """The clipper of the next step, as a value."""
        if isinstance(self.live_clip, AdaptiveOnDevice):
            self.use_clip(self.live_clip.fetched)
        return self.live_clip

    @property
    def filter_state(self) -> dict[str, Any]:
        """The denoiser's state, as it is saved."""
        return self.placement.saved(self._filter_state)

    @filter_state.setter
    def filter_state(self, state: dict[str, Any]) -> None:
        self._filter_state = self.placement.loaded(state)

    def probes(self) -> list[Probe]:
        """The points at which the denoiser needs the gradients of the next step."""
        if self._plan.denoise is None:
            return [Probe()]
        here = {name: self.placement.here(name) for name in self.placement.params}
        with torch.no_grad():
            return self._plan.denoise.probes(here, self._filter_state)

    def scales(self) -> dict[str, Tensor] | None:
        """The denoiser's factors for every example's gradient before it is clipped in the next step."""
        with torch.no_grad():
            return None if self._plan.denoise is None else self._plan.denoise.scales(self._filter_state)

    def _denoised(self, noised: Noised, learning_rate: float | None) -> dict[str, Tensor]:
        plan, step = self._plan, noised.step
        assert plan.denoise is not None
        std = float(noised.std) * plan.noise.row_std(step, steps=plan.steps)
        info = NoiseInfo(std=std, step=step, max_grad_norm=float(self.clip_norm), learning_rate=learning_rate)
        with torch.no_grad():
            return self.placement.denoised(plan.denoise, noised.sums, info, self._filter_state)

    def _moved_clip(self, step: int, norms: Tensor) -> Adaptive | AdaptiveOnDevice:
        """The next adaptive clip norm: it follows a noisy count of the norms below the present one."""
        clip = self.live_clip
        assert isinstance(clip, (Adaptive, AdaptiveOnDevice))
        options, norm = (clip.options, clip.norm) if isinstance(clip, AdaptiveOnDevice) else (clip, None)
        index = len(self.placement.params)  # no tensor has this number

        def noise(count: Tensor) -> None:
            self.source.z(step, index, count, out=count, scale=options.count_noise or 0.0)

        if norm is not None or not self.placement.waited_for:  # keep it on the device
            return options.counted_there(norms, noise, norm)
        count = torch.tensor([options.raw_count(norms)], dtype=torch.float64)
        self.placement.world.add_up([count])
        noise(count)
        return options.moved(float(count))

    # Restarts --------------------------------------------------------------------------------------------------------

    def load_noise(self, state: dict[str, Any] | None, steps: int) -> None:
        """Advance the stream of a fresh key to row ``steps``: from its saved state, or by drawing the rows before it again."""
        if state is not None and self.stream.takes(state, [self.placement.like(name) for name in self.placement.params]):
            self.stream.load_state_dict(state)
        else:
            self.replay(steps)

    def settle(self, step: int) -> None:
        """After a refused step: return the stream to row ``step``. Nothing was released, so its row may be drawn again."""
        if self._ahead:
            self._start()
            self.replay(step)
            self._ahead = False  # last: after an interrupt this is repeated

    def replay(self, steps: int) -> None:
        """Draw the first ``steps`` rows again and drop them: the stream's state is a function of its key."""
        for step in range(steps):
            self._fresh(step, [name for name in self.placement.params if name not in self.lazy])
