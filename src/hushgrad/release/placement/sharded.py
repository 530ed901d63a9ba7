"""FSDP2 placement: which part of each parameter is in this process.

``torch.distributed.fsdp.fully_shard`` cuts every parameter by rows: of n rows, process r of W holds ceil(n/W), from row
r ceil(n/W) on; the last processes may hold fewer, or none. A shard is therefore one range of the flattened parameter, and
that is all that noise needs: the source and the streams draw any range of a tensor by its offset, bit for bit as in the whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hushgrad import _check
from hushgrad.clipping._torch_compile import Gathering, returned_to_shards
from hushgrad.clipping.site import Site
from hushgrad.clipping.sums import Form, Sum
from hushgrad.denoise.base import Denoiser, NoiseInfo
from hushgrad.release.placement.lockstep import split_evenly
from hushgrad.release.placement.sharded_sums import ShardedSite, ShardedSums
from hushgrad.release.placement.whole import Whole
from hushgrad.release.placement.world import World, answered, part_of
from hushgrad.sampling.batch import Batch

if TYPE_CHECKING:
    from hushgrad.clipping.clipper import Clipper
    from hushgrad.clipping.parameter_placement import Added
    from hushgrad.clipping.reduce import Part
    from hushgrad.train.plan import Plan

_REMEDY = "Use fully_shard(module) with its defaults, on one mesh of all processes, and on the root module as well."


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and no DTensor exists before it is
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True)
class Shard:
    """Rows [first, first + rows) of a parameter of this ``shape``; every process has room for ``chunk`` rows.

    >>> [Shard.of((5, 3), rank, 4).rows for rank in range(4)], Shard.of((5, 3), 2, 4).offset
    ([2, 2, 1, 0], 12)
    """

    shape: tuple[int, ...]
    chunk: int
    first: int
    rows: int

    @classmethod
    def of(cls, shape: tuple[int, ...], rank: int, size: int) -> Shard:
        """The shard of process ``rank`` among ``size``."""
        chunk, first, rows = part_of(shape[0], rank, size)
        return cls(tuple(shape), chunk, first, rows)

    @property
    def row_size(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape[1:])

    @property
    def offset(self) -> int:
        """Position of its first number in the flattened parameter."""
        return self.first * self.row_size

    @property
    def count(self) -> int:
        """How many numbers it holds; may be 0."""
        return self.rows * self.row_size


class Sharded(Whole):
    """Each process holds its rows of every trainable parameter, and of its sum, its noise and its state.

    All processes must make the same passes, even over no examples: every pass and every collect communicates.
    """

    in_parts = True
    whole = False

    def __init__(self, params: dict[str, Any], world: World) -> None:
        super().__init__(params, world)
        some = next(iter(params.values()))
        self.mesh = some.device_mesh
        self.placements = some.placements
        self.shards = {name: Shard.of(tuple(p.shape), world.rank, world.size) for name, p in params.items()}
        for name, p in params.items():
            self._require_rows(name, p)

    @classmethod
    def checked(cls, params: dict[str, Tensor], world: World, plan: Plan) -> Sharded:
        """The placement, if all parameters are sharded and the plan needs no whole ones."""
        whole = sorted(name for name, p in params.items() if not is_sharded(p))
        if whole:
            _check.fail("model", whole[:5], "to be sharded like its other parameters", _REMEDY)
        if plan.denoise is not None and plan.denoise.needs_all_tensors:
            remedy = 'Denoise each tensor by itself (scope= or per= "tensor"), or run data parallel without fully_shard.'
            _check.fail("plan.denoise", plan.denoise, "not to need all of a sharded model's tensors at once", remedy)
        if plan.projection is not None and plan.projection.needs_all_tensors:
            remedy = "Use Box, or run data parallel without fully_shard."
            _check.fail("plan.projection", plan.projection, "not to need the norm of a sharded model", remedy)
        return cls(params, world)

    def _require_rows(self, name: str, p: Any) -> None:
        from torch.distributed.tensor import Shard as Rows

        if p.device_mesh.ndim != 1 or p.device_mesh.size() != self.world.size or p.placements != (Rows(0),):
            _check.fail(name, (p.device_mesh.shape, p.placements), "to be sharded by rows over all processes", _REMEDY)
        shard = self.shards[name]
        if tuple(p.to_local().shape) != (shard.rows, *shard.shape[1:]):
            _check.fail(name, tuple(p.to_local().shape), f"to hold {shard.rows} of the rows of {shard.shape}", _REMEDY)

    # Parameters and sums -----------------------------------------------------------------------------------------------

    def likes(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor | Form]:
        """This process's rows."""
        return {name: Form(rows.shape, rows.device) for name in params for rows in [self.here(name)]}

    def here(self, name: str) -> Tensor:
        """This process's rows of the parameter, as a plain tensor that shares memory, whether or not it is gathered now."""
        return self.params[name].detach().to_local()  # type: ignore[attr-defined, no-any-return]

    def site(self, model: nn.Module, site: Site) -> Site:
        """A site that finds shards or whole tensors, and measures while they are whole."""
        return ShardedSite.of(model, site)

    def reducing(self, added: Added, sites: list[Site]) -> Added:
        """Send sums of whole parameters while further ones are filled; then send and receive the rest."""
        together = [frozenset(site.full.values()) for site in sites]

        def reduced(clipper: Clipper, sums: dict[str, Sum], scale: float) -> list[Part]:
            whole = ShardedSums(self.shards, self.world, sums, together)
            parts = added(clipper, whole, scale)
            whole.flush()
            return parts

        return reduced

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process's rows as gradients that are sharded like the parameters."""
        return {name: self.wrap(g, self.params[name].shape) for name, g in super().gradients(sums).items()}

    def wrap(self, rows: Tensor, shape: Any) -> Tensor:
        """A tensor of the whole ``shape`` of which ``rows`` are this process's; nothing is sent."""
        from torch.distributed.tensor import DTensor

        whole = torch.Size(shape)
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(rows, self.mesh, self.placements, run_check=False, shape=whole, stride=stride)

    def moved(self, model: nn.Module) -> None:
        """Return every unit to its shards; after an evaluation, and after an interrupted pass, FSDP leaves some of them whole."""
        returned_to_shards(model)

    def gathering(self, model: nn.Module) -> Gathering:
        """From now on, weights are waited for as long as no process has left an error instead; a handle that ends that."""
        return Gathering(model, lambda work: self.world.wait(work, "a pass gathered its weights", torch.device("cpu")))

    # Noise -----------------------------------------------------------------------------------------------------------

    def own(self, buffers: Mapping[str, Tensor]) -> list[tuple[str, Tensor, int]]:
        """All rows that are here."""
        return [(name, buffer, self.shards[name].offset) for name, buffer in buffers.items()]

    def early(self, scattered: frozenset[str]) -> list[str]:
        """All: what other processes send is added to the noise as it arrives."""
        return list(self.params)

    # Denoisers -------------------------------------------------------------------------------------------------------

    def denoised(self, denoiser: Denoiser, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        """On the rows if the denoiser allows it, otherwise tensor by tensor."""
        return denoiser.on_shards(grads, info, state, self)

    def join(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor of which ``part`` is this process's rows; all processes take part."""
        with answered("the processes denoised a step"):
            return self.wrap(part, self.params[name].shape).full_tensor()  # type: ignore[attr-defined, no-any-return]

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This process's rows of a whole tensor, in memory of their own."""
        shard = self.shards[name]
        return whole[shard.first : shard.first + shard.rows].clone()

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """A denoiser's state, its tensors sharded like the parameters that they belong to (see ``Denoiser.__call__``)."""
        return {key: self._saved(key, value) if isinstance(value, Tensor) else value for key, value in state.items()}

    def loaded(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same with this process's rows; a tensor that is whole is cut."""
        return {
            key: value.to_local() if is_sharded(value) else self.cut(_owner(key), value) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    def _saved(self, key: str, value: Tensor) -> Tensor:
        name = _owner(key)
        if name not in self.shards or value.shape != self.here(name).shape:
            _check.fail(key, tuple(value.shape), 'to have the shape of a parameter and to be named "what.parameter"')
        return self.wrap(value, self.params[name].shape)

    # Passes ----------------------------------------------------------------------------------------------------------

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """As many micro-batches as the process that needs most; the last ones may be empty."""
        return split_evenly(batch, size, self.world)


def _owner(key: str) -> str:
    """The parameter to which a tensor of a denoiser's state belongs."""
    return key.partition(".")[2]
