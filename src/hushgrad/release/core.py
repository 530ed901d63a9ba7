"""The release of one step: from captured passes to a privatised gradient. The only place where the noise is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping import Capture, ClippedSum
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.clipping.base import Clipper
from hushgrad.denoise.base import NoiseInfo, Probe
from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.events import Relation
from hushgrad.noise.source import Source
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.sharded import Sharding
from hushgrad.release.placement.world import World

if TYPE_CHECKING:
    from hushgrad.train.plan import Plan

__all__ = ["Release", "Released"]

Closure = Callable[[], Any]


class Released(NamedTuple):
    """The gradient of a step by parameter, what is known of its examples, and the standard deviation of its noise.

    ``clipped.raw_sums`` holds what is *not* free to be released: the sums of lazy tables, whose noise is added later.
    """

    grads: dict[str, Tensor]
    clipped: ClippedSum
    std: float


class Release:
    """Turns what the capture saw into (sum_i w_i g_i + noise_multiplier C row(t)) / batch_size, denoised.

    Each sum is written once and its noise added to it in one pass. Where a sum has few rows in a large table (embeddings) the
    noise is written first and the rows are added to it, so that no table of zeros is made.
    """

    def __init__(
        self,
        plan: Plan,
        capture: Capture,
        params: dict[str, Tensor],
        key: RunKey,
        world: World,
        sharding: Sharding | None = None,
    ) -> None:
        self._plan, self._capture, self._params, self._world, self._sharding = plan, capture, params, world, sharding
        self._index = {name: i for i, name in enumerate(params)}  # of the parameter's noise
        self._filter_state: dict[str, Any] = {}
        self.use_clip(plan.clip)
        self.use_key(key)

    def use_key(self, key: RunKey) -> None:
        """Start the noise of another key, from its first row."""
        self._key, self.source = key, Source(key=key.secret)
        self.stream = self._plan.noise.stream(self.source, steps=self._plan.steps)
        self._ahead = False

    def use_clip(self, clip: Clipper) -> None:
        """Clip the next step with ``clip``: the plan's, or what adaptive clipping has moved it to."""
        multiplier = self._plan.noise_multiplier or 0.0
        if isinstance(clip, Adaptive):
            multiplier = clip.gradient_noise(multiplier)  # the rest of the budget goes to the count
        self.clip = clip
        self._max_grad_norm = clip.sensitivity(Relation.ADD_REMOVE)
        self._scale = multiplier * self._max_grad_norm / self._plan.batch_size

    @property
    def filter_state(self) -> dict[str, Any]:
        """What the denoiser keeps; sharded like the parameters."""
        return dict(self._filter_state) if self._sharding is None else self._sharding.wrapped(self._filter_state)

    @filter_state.setter
    def filter_state(self, state: dict[str, Any]) -> None:
        self._filter_state = dict(state) if self._sharding is None else self._sharding.unwrapped(state)

    def run(self, closure: Closure | None, announce: Callable[[], None]) -> Any:
        """Let ``closure`` do this step's passes, once for each point that the denoiser asks for; return its first result.

        The parameters are moved to each point and restored bit for bit. ``announce`` tells the capture what a pass is over.
        """
        if closure is None and self._plan.denoise is None:
            return None
        probes = self._probes()
        if closure is None:
            if probes != [Probe()]:
                raise ArgumentError(
                    f"{type(self._plan.denoise).__name__} asks for gradients at {len(probes)} points. Put zero_grad, forward and "
                    "backward into a function and call optimizer.step(closure)."
                )
            return None
        self._capture.discard()  # a closure does all of the step's passes; what was run before it is not part of them
        if probes == [Probe()]:
            announce()
            with torch.enable_grad():
                return closure()
        first, *_ = [self._run_probe(probe, closure, announce) for probe in probes]
        return first

    def privatise(self, step: int, learning_rate: float | None, contributions: int | None) -> Released:
        """The gradient of ``step``, free to be released, and the clipped sum's norms and weights.

        ``contributions`` is how many examples or units the issued batch has; None for a batch from elsewhere.
        """
        begun = self._begun(step, contributions)
        clipped = self._capture.collect(self.clip, out=begun, scale=1.0 / self._plan.batch_size)
        _require_contributions(step, clipped.raw_norms.shape[0], contributions)
        buffers = self._noised(step, clipped.raw_sums, begun)
        if self._sharding is None and self._world.size > 1:  # sharded sums were added up as they were formed
            self._world.add_up(buffers.values())
        used = self._scale, self._max_grad_norm  # of this step, before an adaptive clip norm moves on
        grads = self._denoised(buffers, step, learning_rate, *used)
        self._adapt(step, clipped)  # last: a step that fails before it is charged must not have moved anything
        self._ahead = False
        if self._sharding is not None:
            grads = {name: self._sharding.gradient(name, rows) for name, rows in grads.items()}
        else:
            grads = {name: _in_type_of(self._params[name], g) for name, g in grads.items()}
        lazy = {name: clipped.raw_sums[name] for name in self._capture.by_rows}
        return Released(grads, ClippedSum(lazy, *clipped[1:]), used[0])

    def _begun(self, step: int, contributions: int | None) -> dict[str, Tensor] | None:
        """The noise that the sums are added to: of tables and of shards. Most models have neither, and draw after they collect."""
        if self._sharding is None and not self._capture.scattered:
            return None
        _require_contributions(step, self._capture.check(), contributions)  # a step is refused before its noise is drawn
        self._begin(step)
        return self._noise(step) if self._sharding is not None else self._rows(step, self._tables())

    def _tables(self) -> dict[str, Tensor]:
        return {name: self._params[name].detach() for name in self._params if name in self._capture.scattered}

    def _begin(self, step: int) -> None:
        """From here to the end of ``privatise`` a row of the step is drawn but not released."""
        self.settle(step)
        self._ahead = True

    def _noise(self, step: int) -> dict[str, Tensor]:
        if self._sharding is not None:
            return self._sharding.noise(self.stream, step, self._scale)
        return self._rows(step, {name: p.detach() for name, p in self._params.items() if name not in self._capture.by_rows})

    def _rows(self, step: int, likes: dict[str, Tensor], *, add: bool = False) -> dict[str, Tensor]:
        """Row ``step`` of the noise for some parameters: fresh, or added to ``likes`` in place; of W processes, one part in each."""
        if not likes:
            return {}
        if self._world.size > 1:
            return self._parts(step, likes if add else {name: _zeros(like) for name, like in likes.items()})
        tensors, indices = list(likes.values()), [self._index[name] for name in likes]
        rows = self.stream.rows(step, tensors, indices=indices, out=tensors if add else None, scale=self._scale)
        return dict(zip(likes, rows, strict=True))

    def _parts(self, step: int, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """``sums`` with this process's part of row ``step`` added; the other processes' parts come with their sums."""
        held = {name: self._world.part(total.numel()) for name, total in sums.items()}
        held = {name: part for name, part in held.items() if part[1]}
        out = [sums[name].view(-1).narrow(0, *part) for name, part in held.items()]  # a view, or an error: never a copy
        indices, offsets = [self._index[name] for name in held], [offset for offset, _ in held.values()]
        self.stream.rows(step, out, indices=indices, offsets=offsets, out=out, scale=self._scale)
        return sums

    def _noised(self, step: int, sums: dict[str, Tensor], begun: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The sums, each with its noise: those in ``begun`` have it already, if they are what the capture was given.

        Lazy tables are left out: the noise is added where they are read.
        """
        if begun is None:
            self._begin(step)
            begun = {}
        if sums.keys() != self._params.keys() or any(sums[name] is not buffer for name, buffer in begun.items()):
            raise CaptureError(
                "The clipped sum was not added to the noise. This is a defect of the capture; nothing was released."
            )
        done = begun.keys() | self._capture.by_rows
        return begun | self._rows(step, {name: total for name, total in sums.items() if name not in done}, add=True)

    def _adapt(self, step: int, clipped: ClippedSum) -> None:
        """Release how many norms lie below the clip norm, with its own noise, and move the clip norm accordingly."""
        clip = self.clip
        if not isinstance(clip, Adaptive):
            return
        count = torch.tensor([clip.raw_count(clipped.raw_norms)], dtype=torch.float64)
        self._world.add_up([count])
        noise = self.source.z(step, len(self._params), count, scale=clip.count_noise or 0.0)  # an index that no tensor has
        self.use_clip(clip.moved(float(count + noise)))

    def settle(self, step: int) -> None:
        """After a refused step: bring the stream back to row ``step``. Nothing was released, so its row may be drawn again."""
        if self._ahead:
            self.use_key(self._key)
            self.replay(step)

    def replay(self, steps: int) -> None:
        """Draw the first ``steps`` rows once more and drop them: what a stream keeps follows from its key."""
        for step in range(steps):
            self._noise(step)

    def _denoised(
        self, grads: dict[str, Tensor], step: int, learning_rate: float | None, scale: float, max_grad_norm: float
    ) -> dict[str, Tensor]:
        plan = self._plan
        if plan.denoise is None:
            return grads
        info = NoiseInfo(
            std=scale * plan.noise.row_std(step, steps=plan.steps),
            step=step,
            max_grad_norm=max_grad_norm,
            learning_rate=learning_rate,
        )
        with torch.no_grad():
            if self._sharding is None:
                return plan.denoise(grads, info, self._filter_state)
            return plan.denoise.on_shards(grads, info, self._filter_state, self._sharding)

    def _probes(self) -> list[Probe]:
        if self._plan.denoise is None:
            return [Probe()]
        with torch.no_grad():
            return self._plan.denoise.probes({name: self._here(name) for name in self._params}, self._filter_state)

    def _here(self, name: str) -> Tensor:
        """What this process holds of a parameter, sharing its memory."""
        return self._params[name].detach() if self._sharding is None else self._sharding.local(name)

    def _run_probe(self, probe: Probe, closure: Closure, announce: Callable[[], None]) -> Any:
        kept: dict[str, Tensor] = {}
        try:
            with torch.no_grad():
                for name, shift in (probe.shift or {}).items():
                    kept[name] = self._here(name).clone()
                    self._here(name).add_(shift)
                self._reshard()
            with self._capture.probe(probe.coefficient), torch.enable_grad():
                announce()
                return closure()
        finally:
            with torch.no_grad():
                for name, value in kept.items():  # copied back: w + s - s is not w in floating point
                    self._here(name).copy_(value)
                self._reshard()

    def _reshard(self) -> None:
        """Have the next pass gather the parameters as they are now."""
        if self._sharding is not None:
            self._sharding.settle(self._capture.model)


def _zeros(like: Tensor) -> Tensor:
    """Contiguous, whatever ``like`` is."""
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _in_type_of(p: Tensor, g: Tensor) -> Tensor:
    """Sums and noise are float32 for parameters of lower precision."""
    return g if g.dtype is p.dtype else g.to(p.dtype)


def _require_contributions(step: int, captured: int, contributions: int | None) -> None:
    if contributions is not None and captured != contributions:
        raise CaptureError(
            f"The batch of step {step} has {contributions} contributions, but {captured} were captured. Run each "
            "example forward and backward exactly once per step; cut a batch with batch.split(size)."
        )
