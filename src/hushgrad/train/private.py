"""make_private: attach a plan to a model and its optimizer, by torch's public hooks; nothing is wrapped or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from hushgrad import _check, sampling
from hushgrad.clipping import Clipper
from hushgrad.errors import ArgumentError
from hushgrad.events import Participation
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.world import World
from hushgrad.sampling.attendance import Attendance
from hushgrad.sampling.batch import Batch
from hushgrad.sampling.make_loader import refuse_options
from hushgrad.sampling.units import Grouping
from hushgrad.train.agreement import DRAWN, require_same_data
from hushgrad.train.attached import Attached
from hushgrad.train.contract import about_data
from hushgrad.train.findings import LOST
from hushgrad.train.loop import Loop
from hushgrad.train.opacus_names import ENGINE, OPACUS
from hushgrad.train.options import DATALOADER
from hushgrad.train.plan import Plan
from hushgrad.train.private_loss import PrivateLoss
from hushgrad.train.spending import guarantee_of


@_check.answering(OPACUS)
def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    *,
    key: bytes | RunKey | None = None,
    seed: int | None = None,
    max_epsilon: float | None = None,
    prior: Ledger | None = None,
    loss_reduction: str | None = None,
    check_isolation: bool = True,
    lazy_tables: bool = False,
    unused: str = "raise",
) -> Private:
    """Attach ``plan`` to a model and its optimizer: from now on ``optimizer.step()`` sees privatised gradients only.

    **Formal guarantee.** The sequence of all parameter values after attaching is differentially private as ``spent()`` says,
    for training on batches of ``Private.loader``. Whatever leads around that is refused or makes ``spent()`` infinite.

    Args:
        model: the bare module; every trainable parameter must be in ``optimizer``.
        optimizer: any ``torch.optim`` optimizer that needs one gradient per step. It keeps its type, state and schedulers.
        plan: what to run; calibrated.
        key: 32 secret bytes for noise and batches; fresh from the operating system by default. One key, one run.
        seed: instead of a key, for experiments: the guarantee then says that it does not hold against who knows the seed.
        max_epsilon: a budget, ``prior`` included: the step that would exceed it raises BudgetExceeded and does nothing.
        prior: ledger of earlier phases on the same data, for the same unit and relation; ``spent()`` and the budget include it.
        loss_reduction: whether the loss is the "mean" or the "sum" over the examples of a pass; the mean by default. A certified run
            needs sums: without this argument its losses must be those of :meth:`Private.loss`, which then are.
        check_isolation: test on the first batch that no example influences another (NotIsolated); False: you vouch for it.
        lazy_tables: embedding rows get their noise when they are read (plain SGD only), see :mod:`hushgrad.release.lazy`.
        unused: "zero" counts the gradient of a parameter that a pass does not reach as 0 (its noise is added all the same);
            "raise" refuses the step, so that a layer left out by mistake is noticed.

        >>> model = nn.Linear(3, 1)
        >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=2)
        >>> private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0)
        >>> data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
        >>> for x, y in private.loader(data):
        ...     private.optimizer.zero_grad(); (model(x) - y).square().mean().backward(); private.optimizer.step()
        >>> private.steps, str(private.ledger.event())
        (2, '2 x Poisson(0.25) Gaussian(1)')
    """
    with World.here().beginning():
        return Private(
            model,
            optimizer,
            plan,
            key=RunKey.make(key, seed),
            max_epsilon=max_epsilon,
            prior=prior,
            loss_reduction=loss_reduction,
            check_isolation=check_isolation,
            lazy_tables=lazy_tables,
            unused=unused,
        )


class Private(Attached):
    """A running plan: hooks on a model and an optimizer, the noise, and the books. Made by :func:`make_private`."""

    def __getattr__(self, name: str) -> Any:
        instead = f". Opacus' {name} is here: {ENGINE[name]}" if name in ENGINE else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=self)

    def __iter__(self) -> Iterator[Any]:
        """Refuse unpacking: Opacus returns three objects, this is one."""
        raise ArgumentError(
            "Expected one name on the left: private = make_private(model, optimizer, plan). Model and optimizer stay yours; batches "
            "come from private.loader(dataset)."
        )

    @_check.answering(OPACUS, also=DATALOADER)
    def loader(
        self, dataset: Any, *, groups: Grouping | None = None, identity: str | None = None, **dataloader_options: Any
    ) -> sampling.BatchLoader:
        """The run's batches of ``dataset``, all epochs in one loop, from the next step on.

        ``groups`` gives each example's user for a plan with ``unit="user"``. ``identity`` names the data and their version
        where they are read from files as they are asked for; otherwise their content is compared. Data and groups stay the same
        for the whole run. Other options go to torch's ``DataLoader``.

        Args:
            dataset: indexable, or a data set of torch; the same one for the whole run.
            groups: the owner of each example, for ``unit="user"``.
            identity: a name of the data and their version, where their content cannot be compared.
            dataloader_options: go to torch's ``DataLoader``.
        """
        with self._world.leaving():
            return self._loader(dataset, groups, identity, dataloader_options)

    def _loader(
        self, dataset: Any, groups: Grouping | None, identity: str | None, options: dict[str, Any]
    ) -> sampling.BatchLoader:
        units: list[int] = []
        first = self._contract.is_new and self._world.size > 1
        together = self._together if first else nullcontext  # what one process refuses is refused by all
        with together():
            made = self._dealing(dataset, groups, units, options)
            about = about_data(dataset, groups, identity, self._key) if first else None
        if about is not None and not require_same_data(self._world, self._key.journal, dataset, about, self.steps):
            self._journal.vouched(DRAWN)
        with together():  # after everything that may refuse them
            self._contract.require(dataset, groups, identity, self._key, self._journal, about)
        self._attendance = self._attendance or Attendance(self.plan.participation, units=units[0])
        self._dim, made.finished = made.hands.dim, not len(made) and self.steps == self._resumed
        if self._world.size > 1:
            made.reading = self._world.leaving
        if not made.hands.keeps_apart():
            self.losses.handed.prepared = True
        self.losses.handed.made_of_all = made.hands.made_of_all()
        return made

    def _dealing(self, dataset: Any, groups: Grouping | None, units: list[int], options: dict[str, Any]) -> sampling.BatchLoader:
        """The loader of data that the plan allows; how many units they have is added to ``units``."""
        if self._books.declared is not None:
            raise ArgumentError("Expected no loader: declare() stated that this run's batches come from elsewhere.")
        if (groups is None) == (self.plan.unit == "user"):
            given = "None" if groups is None else "the owner of each example"  # an error must not show their names
            raise ArgumentError(
                f'Expected groups={given} to fit the plan\'s unit={self.plan.unit!r}. Give groups= with unit="user", and only then.'
            )
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            remedy = "Batches are drawn at random from all records: read a stream into a list first."
            _check.fail("dataset", type(dataset).__name__, "to have len() and [i]", remedy)
        refuse_options(options)
        # Otherwise torch draws its workers' seed from its own generator, whose state a resumed run must reproduce.
        options.setdefault("generator", torch.Generator())
        return sampling.loader(
            dataset,
            self.plan.sampler,
            rng_key=self._key.sampling,
            start=self.steps,
            groups=groups,
            rank=self._world.rank,
            world_size=self._world.size,
            on_issue=self._on_issue,
            seeds=self._key.workers,
            attendance=units.append,
            copies=self.plan.augmentations,
            sizes=self._own.sizes,
            fixed=self.plan.pad_to,
            **options,
        )

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """``batch.split(size)``; with ``fully_shard``, as many micro-batches as the process that needs most: the last ones may be empty.

        Run forward and backward on each, those of weight 0 too: sharded parameters are gathered by all processes together.
        """
        self._splitting = True
        try:
            yield from self.placement.split(batch, size)
        finally:
            self._splitting = False

    def loss(self, fn: Callable[..., Tensor], *, per_example: bool = False) -> PrivateLoss:
        """``fn`` as a loss of this run: (1/B) sum_i fn(output_i, target_i), each example's by itself.

        **Formal guarantee.** Example i enters the loss only through fn of its own rows, if ``fn`` keeps no state. If all passes of all
        steps came through such a loss, the guarantee needs no promise of yours. Otherwise, and from the first pass on in which ``fn`` was
        seen to keep something (a centre, a queue, a running mean; counting its calls is fine), ``spent()`` says that you vouch for the
        loss.

        On the first batch the result is compared with ``fn`` of the whole batch. Class weights, ``ignore_index``, contrastive
        losses and a maximum over the batch are not means over the examples, and are refused; ``fn`` may return one number for each
        example (``reduction="none"``), which keeps class weights.

        Args:
            fn: a function of outputs and targets, every tensor with a row for each example. Or of the model and the batch, if it needs
                both: such a function is only tested, from time to time, on some examples alone, together, removed and replaced.
            per_example: the mean over single examples is what you mean, even if ``fn`` of a whole batch is something else.

            >>> model = nn.Linear(3, 2)
            >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=2)
            >>> private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
            >>> data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randint(2, (16,)))
            >>> loss = private.loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]), reduction="none"))
            >>> for x, y in private.loader(data):
            ...     private.optimizer.zero_grad(); loss(model(x), y).backward(); private.optimizer.step()
            >>> private.spent().notes
            ()
        """
        return PrivateLoss(fn, self.losses, per_example=per_example)

    def explain(self) -> str:
        """A table of how each module's per-example gradients are computed, for the batches seen so far: module, rule, layout, cost."""
        return self._capture.explain()

    def spent(self, accountant: str = "pld") -> Guarantee:
        """What the steps taken so far cost, earlier phases included: from the ledger, not from the plan."""
        self.settle()
        self._books.broken = self._books.broken or self._contract.changed()
        notes = (*self._own.notes, *self._bits.notes, *self.losses.notes, *self._journal.notes, *self._contract.notes)
        notes += self._sharded_notes + ((LOST,) if self._world.lost else ())
        return guarantee_of(
            self.ledger, self.plan, reproducible=self._key.reproducible, accountant=accountant, notes=tuple(dict.fromkeys(notes))
        )

    def audit(self, dataset: Any, loss_fn: Callable[[Any, Any], Tensor] | Loop, **options: Any) -> Any:
        """Audit this run on copies of its model and optimizer, under keys of the audit: the run itself is not touched.

        Returns a :class:`hushgrad.audit.DeepReport`, for the owner's eyes.

        Args:
            dataset: as for :func:`hushgrad.train.fit`.
            loss_fn: as for :func:`hushgrad.train.fit`.
            options: those of :func:`hushgrad.audit.audit_run`, and ``groups``, ``build``, ``whole``, ``loader_options``.
        """
        # The audit package is above this one, so it is imported by name: nothing here depends on it.
        return import_module("hushgrad.audit.deep_audit").audit_private(
            self, dataset, loss_fn, {"loss_reduction": self._capture.loss_reduction, **self._asked}, **options
        )

    def declare(self, participation: Participation) -> None:
        """State who takes part in batches that do not come from :meth:`loader`; the promise is then yours, not the library's.

        It applies to all batches of the run, earlier ones included, and the run's own loader cannot be used any more.
        """
        self._books.declare(participation)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has the averaged parameters (``average=`` of the plan), to evaluate or save; afterwards its own."""
        if self._averaged is None:
            raise ArgumentError('Expected plan.average=None to be a rule. Make the plan with average="tail", "ema" or "polyak".')
        with self._averaged.swapped_in(partial(self.placement.moved, self.model)):
            yield

    @property
    def steps_allowed(self) -> int:
        """Steps that the plan and the budget allow in all."""
        return self._books.limit

    @property
    def clip(self) -> Clipper:
        """The clipper of the next step: the plan's, or where adaptive clipping has moved it (released, so not sensitive)."""
        return self._release.clip

    @property
    def raw_norms(self) -> Tensor:
        """Norms of the last step's per-example gradients before clipping. Sensitive: not covered by the guarantee."""
        if self._raw_norms.is_cpu or any(p.dtype is torch.float64 for p in self._params.values()):
            return self._raw_norms
        return self._raw_norms.float()  # on a device they are stored unconverted

    @property
    def raw_loss(self) -> Any:
        """What the last step's closure returned. Sensitive."""
        return self._raw_loss

    @property
    def rejected(self) -> int:
        """Examples so far whose gradient was NaN or infinite; they took part with weight 0. Sensitive if not 0."""
        return self._rejected.count

    @property
    def ledger(self) -> Ledger:
        """What happened, earlier phases included. Ledgers of runs on the same data add up."""
        self._later.settle()
        self._look_back()
        self._books.broken = self._books.broken or self._journal.broken
        return self._books.ledger()

    def __repr__(self) -> str:
        return (
            f"Private({type(self.model).__name__}, {type(self.optimizer).__name__}, plan {self.plan.digest[:12]}, "
            f"step {self.steps} of {self.plan.steps}, {self.plan.participation}, noise {type(self.plan.noise).__name__})"
        )
