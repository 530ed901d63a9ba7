r"""Lazy noise: a row of a large table gets the noise of all steps in which nobody read it in one draw, when it is next read.

Under plain SGD step t moves a table by -η_t (clipped sum + s_t z_t), and nearly all of this is the noise of rows that no record
touched. A row that is not read between the steps a and b may get that noise later: sum over a ≤ t < b of η_t s_t z_t is one
Gaussian with variance sum_t (η_t s_t)². So the work of a step is in proportion to the rows that its batch reads.

**Formal guarantee.** Everything that a forward pass of the model reads, every ``state_dict()``, and the table's memory after
``settle()``, have jointly the distribution that they have in the run without lazy noise (up to rounding), hence the same
guarantee. *Proof.* Let t₁ < t₂ < ... be the steps before which a row is read. What is read at t_k is the row's first value,
less the clipped sums of the steps before t_k, less Gaussians of the variances sum_{t < t₁}, sum_{t₁ ≤ t < t₂}, ... of (η_t s_t)²:
sums of independent Gaussians over disjoint sets of steps, which is what the eager run has subtracted by then. The clipped sum
of step t, and with it s_t (adaptive clipping), η_t and the choice of later reads, are functions of the batch, of what was read
by then and of independent noise; so induction over the steps gives the joint distribution.

**Every address of the key is used at most once.** Row r of table i is drawn at (last completed step, i, r), and only if it owes
something; then it owes nothing until another step is completed, and steps are numbered upwards. Other tensors have other i.

**The price.** Between a step and the next settling the table's memory holds updates without noise. ``model.emb.weight``, read
directly, is then as sensitive as the data, like everything called ``raw_``. A model whose forward does so is refused
(:mod:`hushgrad.clipping.table_reads`).

**A run that repeats its steps repeats its readings.** Which noise a row gets depends on when it is read. A step reads the rows of
its batch, which the key fixes. In a run that can be resumed, whatever reads outside a step (an evaluation, a saving,
``state_dict()``) settles *all* rows of all tables, and the journal has a line for it, written before the noise is drawn: a resumed
run settles them at the same points by itself, and is stopped before it reads at another one.

Reference: Lim et al., "LazyDP: Co-designing algorithm-software for scalable training of differentially private recommendation
models" (ASPLOS 2024): lazy noise update, aggregated noise sampling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hushgrad import _check
from hushgrad.clipping import Capture
from hushgrad.clipping._torch import unwatched
from hushgrad.clipping.sums import Sum
from hushgrad.errors import CaptureError, HushgradError
from hushgrad.noise.independent import Independent
from hushgrad.noise.source import Source
from hushgrad.noise.table_rows import add_rows, rows_of
from hushgrad.release.placement.world import World

if TYPE_CHECKING:
    from hushgrad.train.plan import Plan

_AT_ONCE = 1 << 20  # numbers: settling a whole table needs no second table
_EAGER = "Leave lazy_tables out."


@dataclass(slots=True, eq=False)
class LazyTable:
    """One table of a run: which noise its rows owe, and the hooks that add it before they are read."""

    name: str
    param: Tensor
    index: int  # of its noise
    optimizer: Optimizer
    place: int  # of its group in the optimizer, stable when a state is loaded; the group itself is replaced
    source: Callable[[], Source]
    reads: Callable[[tuple[Any, ...], Mapping[str, Any]], Tensor | None]
    owed: Tensor  # (rows,) float64: the variance; a sum of positive terms, so no digit cancels
    tables: LazyTables  # all tables of the run
    step: int = 0  # the last completed one

    def hooks(self, module: nn.Module) -> list[Any]:
        """Settle before the module reads the table, and before the table is saved or replaced; returns the handles."""
        return [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True),
            module.register_state_dict_pre_hook(self._before_state),
            module.register_state_dict_post_hook(partial(self._after_state)),  # torch modifies the returned state
            module.register_load_state_dict_pre_hook(self._before_state),  # owed noise belongs to the values that are replaced
        ]

    # Methods, not closures: copy.deepcopy would share a closure, and a copied model would settle the original's table.
    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with unwatched():  # adding owed noise is not part of the model's forward
            if self.tables.in_step():
                self.settle(self.reads(args, kwargs))
            else:
                self.tables.settle()

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with unwatched():
            ids = self.reads(args, kwargs)
            owes = ids is not None and bool((self.owed[ids.detach().to(device="cpu", dtype=torch.int64)] > 0).any())
        if owes:
            raise CaptureError(
                f"The module of {self.name} has read other rows than it was called with: a later forward pre-hook changed the ids. "
                "Change them before the module is called."
            )

    def _before_state(self, *_: Any) -> None:
        self.tables.settle()

    def _after_state(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Put a copy into the state: the table itself goes on, and would lack noise again in the hands of whoever kept the state."""
        name = prefix + self.name.rpartition(".")[2]
        if name in state and not isinstance(state[name], nn.Parameter):
            state[name] = state[name].detach().clone()

    def __reduce__(self) -> str:
        raise TypeError(
            "A model with lazy tables is not copied or pickled as it is: they lack noise. Use model.state_dict(), or detach() first."
        )

    @property
    def group(self) -> dict[str, Any]:
        """The optimizer's options for this table, as they are now."""
        return self.optimizer.param_groups[self.place]

    @property
    def plain(self) -> bool:
        """Whether SGD moves this table by -lr times its gradient and nothing else."""
        return self.group["momentum"] == 0 and self.group["weight_decay"] == 0

    @property
    def _direction(self) -> int:
        """A direction for the noise, so that rows which are read at every step get exactly the noise of the eager run."""
        return 1 if self.group["maximize"] else -1

    @torch.no_grad()
    def update(self, raw_sum: Tensor, std: float, step: int) -> None:
        """Do the optimizer's ``step``: touched rows move now, and all rows owe noise of standard deviation ``std``."""
        rate = float(self.group["lr"])
        self.step = step
        self.owed.add_((rate * std) ** 2)  # first: an interruption must not lose noise
        ids, values = raw_sum._indices()[0], raw_sum._values()
        moved = Sum(self.param, self.param.dtype, self.param.data)
        moved.add_rows(ids, values, values.new_full((len(ids),), self._direction * rate))

    @torch.no_grad()
    def settle(self, ids: Tensor | None = None) -> None:
        """Give the rows ``ids``, or all, the noise that they owe."""
        if ids is None:
            rows = self.owed.nonzero().squeeze(1)
        else:
            ids = ids.detach().reshape(-1).to(device="cpu", dtype=torch.int64)
            rows = torch.from_numpy(np.unique(ids[self.owed[ids] > 0].numpy()))
            self.tables.note(self.index, rows)
        if len(rows):
            with self.tables.whole():
                self._pay(rows)

    @torch.no_grad()
    def settle_all(self) -> None:
        """Give all rows the noise that they owe, as part of settling all tables."""
        self._pay(self.owed.nonzero().squeeze(1))

    def _pay(self, rows: Tensor) -> None:
        weight = self.param.data  # without a new version: rows that a pending backward has read do not change
        here = weight if weight.is_cpu and weight.is_contiguous() else None
        for some in rows.split(max(1, _AT_ONCE // weight.shape[1])):
            by = self.owed[some].sqrt_().mul_(self._direction).to(weight.dtype)
            if here is not None:
                add_rows(self.source(), self.step, self.index, some, by, here)
            else:
                z = rows_of(self.source(), self.step, self.index, some, weight.shape[1], dtype=weight.dtype)
                weight.index_add_(0, some.to(weight.device), z.mul_(by.unsqueeze(1)).to(weight.device))
            self.owed[some] = 0.0  # last, for the same reason


class LazyTables:
    """The tables of a captured model whose noise is added when their rows are read."""

    def __init__(
        self,
        capture: Capture,
        params: Mapping[str, Tensor],
        optimizer: Optimizer,
        source: Callable[[], Source],
        *,
        in_step: Callable[[], bool],
        before: Callable[[], None],
        whole: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take them over; ``source`` gives the run's noise.

        ``in_step`` says whether a forward pass belongs to a step, ``before`` is called before all tables are settled, and ``whole`` wraps
        whatever gives a row its noise.

        Raises:
            ArgumentError: if the optimizer or the model does not allow it.
        """
        if type(optimizer) is not SGD:
            remedy = f"Other updates are not linear in the noise. {_EAGER}"
            _check.fail("optimizer", type(optimizer).__name__, "to be torch.optim.SGD for lazy tables", remedy)
        if not capture.scattered:
            remedy = f"There is nothing to gain. {_EAGER}"
            _check.fail("model", type(capture.model).__name__, "to have a trainable embedding table of its own", remedy)
        numbered = [(name, index) for index, name in enumerate(params) if name in capture.scattered]
        self.in_step, self._before, self.whole = in_step, before, whole
        self._noted = hashlib.blake2b(digest_size=16)
        self._handles: list[Any] = []
        self._tables = [_table(capture, name, params[name], index, optimizer, source, self) for name, index in numbered]
        for table in self._tables:
            self._handles += table.hooks(capture.owners(table.name)[0].module)
        capture.keep_rows(table.name for table in self._tables)

    def check(self) -> None:
        """Before a step: check that the optimizer still allows it. A scheduler may have turned the momentum on."""
        for table in self._tables:
            if not table.plain:
                raise CaptureError(
                    f"The optimizer now has momentum or weight decay for {table.name}, whose noise is lazy. Set both to 0."
                )

    def update(self, raw_sums: Mapping[str, Tensor], std: float, step: int) -> None:
        """Take one step of all tables, whose noise has the standard deviation ``std``."""
        self._noted = hashlib.blake2b(digest_size=16)
        for table in self._tables:
            table.update(raw_sums[table.name], std, step)

    def settle(self) -> None:
        """Give every row of every table the noise that it owes.

        Raises:
            ArgumentError: if an interrupted run did not read its tables at this point.
        """
        if any(bool(table.owed.any()) for table in self._tables):
            with self.whole():
                self._before()
                for table in self._tables:
                    table.settle_all()

    def note(self, index: int, rows: Tensor) -> None:
        """Remember which rows a step has read."""
        if len(rows):
            self._noted.update(index.to_bytes(4, "little"))
            self._noted.update(rows.numpy())  # type: ignore[arg-type]  # an array is a buffer

    def noted(self) -> bytes:
        """A digest of the rows that were read since the last step."""
        return self._noted.digest()

    def detach(self) -> None:
        """Settle, and remove all hooks. Rows that must not get their noise here are made unreadable instead."""
        for handle in self._handles:
            handle.remove()
        try:
            self.settle()
        except HushgradError:
            for table in self._tables:
                table.param.data[(table.owed > 0).to(table.param.device)] = torch.nan


def require_lazy_plan(plan: Plan, world: World, *, sharded: bool) -> None:
    """Refuse plans whose noise cannot be added later, and runs of several processes."""
    if type(plan.noise) is not Independent:
        remedy = f"Correlated noise of later steps depends on it. {_EAGER}"
        _check.fail("plan.noise", type(plan.noise).__name__, "to be Independent for lazy tables", remedy)
    for name, value in (("denoise", plan.denoise), ("average", plan.average), ("projection", plan.projection)):
        if value is not None:
            remedy = f"It needs every row in every step. {_EAGER}"
            _check.fail(f"plan.{name}", type(value).__name__, "to be None for lazy tables", remedy)
    if plan.secure:
        _check.fail("plan.secure", True, "to be False for lazy tables", f"A sum is rounded with its noise, in its step. {_EAGER}")
    if plan.certified:
        _check.fail("plan.certified", True, "to be False for lazy tables", f"Their sums are added without noise. {_EAGER}")
    if world.size > 1 or sharded:
        _check.fail("processes", world.size, "to be 1, without fully_shard, for lazy tables", _EAGER)


def _table(
    capture: Capture, name: str, p: Tensor, index: int, optimizer: Optimizer, source: Callable[[], Source], tables: LazyTables
) -> LazyTable:
    site, *others = capture.owners(name)
    if others:
        remedy = f"Another module reads it without saying which rows. Untie it, or: {_EAGER}"
        _check.fail("model", name, "to be a table of one module only for lazy noise", remedy)
    if p.dtype not in (torch.float32, torch.float64):
        _check.fail("model", f"{name}: {p.dtype}", "to have float32 or float64 tables for lazy noise", _EAGER)
    (place,) = [k for k, group in enumerate(optimizer.param_groups) if any(p is other for other in group["params"])]
    owed = torch.zeros(p.shape[0], dtype=torch.float64)
    table = LazyTable(name, p, index, optimizer, place, source, site.rule.reads, owed, tables)
    if not table.plain:
        values = {option: table.group[option] for option in ("momentum", "weight_decay")}
        remedy = f"Noise that is added later would miss them; give the table a group of its own with both 0. {_EAGER}"
        _check.fail("optimizer", values, f"to have neither momentum nor weight decay for {name}", remedy)
    return table
