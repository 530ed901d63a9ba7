"""A run's batches for frameworks: an iterable with a length, without a sampler that could be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from hushgrad import _check
from hushgrad.sampling.batch import Batch
from hushgrad.sampling.units import Grouping
from hushgrad.train.plan import Plan
from hushgrad.train.private import Private


class Batches:
    """The batches of a run from its next step on, as many as the plan and the budget still allow.

    Frameworks search a loader for samplers that they could replace. Hushgrad's own loader answers this with an
    error; this is a plain iterable around it, in which there is nothing to find. It may be created before there is a run.
    """

    def __init__(
        self, run: Callable[[], Private | None], plan: Plan, dataset: Any, groups: Grouping | None, **options: Any
    ) -> None:
        self.dataset = dataset  # Trainer tells its length in the log
        self._run, self._plan, self.groups, self.options = run, plan, groups, options

    def __iter__(self) -> Iterator[Batch]:
        private = self._run()
        left = self._left(private)
        if private is None or not left:  # no run: a framework's look before the beginning; no step left: a finished run
            return iter(())
        return islice(private.loader(self.dataset, groups=self.groups, **self.options), left)

    def __len__(self) -> int:
        """Steps still to come. At least 1, since frameworks take 0 for a mistake: a finished run's loop is then empty."""
        return max(1, self._left(self._run()))

    def _left(self, private: Private | None) -> int:
        return self._plan.steps if private is None else private.steps_allowed - private.steps


def drawn(inputs: Any) -> Batch:
    """The batch, if it is the plan's; the error about another batch does not show its records."""
    if isinstance(inputs, Batch):
        return inputs
    remedy = "Leave get_train_dataloader as it is: the plan draws the batches. data_collator makes them of examples."
    return _check.fail("inputs", type(inputs).__name__, "to be a batch of the plan", remedy)
