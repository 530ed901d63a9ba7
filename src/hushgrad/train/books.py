"""The books of a run: which steps were taken, what they cost, and how many more the budget allows."""

from __future__ import annotations

from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.events import Event, Participation, Unanalysed
from hushgrad.guarantee import Ledger
from hushgrad.train.guard import Room
from hushgrad.train.plan import Plan
from hushgrad.train.spending import epsilon_of

_FOREIGN = Unanalysed("a step was taken on a batch that the run's loader did not issue")


class Books(Room):
    """Counts the steps of one run of a plan and writes its ledger.

    A step is charged *before* its gradient is released. Steps that compose (``plan.event(t) == plan.event(1) * t``) are
    recorded one by one; the steps of correlated noise do not, and are recorded as one stream that costs ``plan.event(t)``.
    """

    def __init__(self, plan: Plan, run: str, *, prior: Ledger | None = None, max_epsilon: float | None = None) -> None:
        self.plan, self.run, self.prior = plan, run, Ledger() if prior is None else _check.instance(Ledger, prior=prior)
        self.content = ""  # a digest of everything released so far
        self.issued = self.foreign = 0
        self.taken = 0  # all steps charged so far: the number of the next one
        self.declared: Participation | None = None
        self.broken = ""  # what broke the guarantee: batches, a model that mixes examples, another run under the key
        self._step = plan.event(1)
        self._composes = plan.event() == self._step * plan.steps
        if any(run in (entry.run, entry.stream) for entry in self.prior):
            raise ArgumentError("Expected key to be a fresh one: the prior ledger holds a run with it. One key serves one run.")
        self.max_epsilon = None if max_epsilon is None else _check.positive(max_epsilon=max_epsilon)
        # How many steps the plan and the budget allow in all.
        self.limit = plan.steps if self.max_epsilon is None else self._affordable(self.max_epsilon)

    def declare(self, participation: Participation) -> None:
        """State who takes part in batches that come from elsewhere; see :meth:`Private.declare`."""
        _check.instance(Participation, participation=participation)
        if self.issued:
            raise ArgumentError("Expected declare() before any batch of the run's own loader: its batches are accounted already.")
        self.plan.noise.event(1.0, participation, self.plan.steps)  # raises NoTheorem now rather than in spent()
        self.declared = participation
        if self.max_epsilon is not None:
            self.limit = self._affordable(self.max_epsilon)

    def ledger(self) -> Ledger:
        """What happened: the prior phases, then this run."""
        ledger = self.prior + Ledger()
        self._record(ledger, self.issued if self.declared is None else self.foreign)
        if self.foreign and self.declared is None:
            ledger.record(_FOREIGN, times=self.foreign, run=self.run, content=self.content)
        if self.broken:
            ledger.record(Unanalysed(self.broken), run=self.run, content=self.content)
        return ledger

    def _record(self, ledger: Ledger, steps: int) -> None:
        if not steps and self.plan.before is not None:
            ledger.record(self.plan.before, stream=self.run, run=self.run, content=self.content)  # released before the first step
        if not steps:
            return
        if self.declared is not None:
            cost: Event = self.plan.event_with(self.plan.noise_multiplier or 0.0, participation=self.declared, steps=steps)
            stream = self.run
        elif self._composes:
            cost, stream = self._step, ""
        else:
            cost, stream = self.plan.event(steps), self.run
        ledger.record(cost, times=steps, stream=stream, run=self.run, content=self.content)

    def _affordable(self, max_epsilon: float) -> int:
        """The largest number of steps within the budget; computed once, so that no accountant runs in the step path."""

        def fits(steps: int) -> bool:
            total = self.prior + Ledger()
            self._record(total, steps)
            return epsilon_of(total.event(), self.plan) <= max_epsilon

        if fits(self.plan.steps):
            return self.plan.steps
        low, high = 0, self.plan.steps  # fits(high) is false; fits(0) is not evaluated: no steps always fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def state_dict(self) -> dict[str, Any]:
        """Counts and declarations; together with the plan they determine the ledger."""
        declared = None if self.declared is None else self.declared.to_json()
        counts = {"issued": self.issued, "foreign": self.foreign, "broken": self.broken, "content": self.content}
        return {**counts, "declared": declared, "prior": self.prior.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the books of an interrupted run."""
        self.issued = _check.integer(0, issued=state["issued"])
        self.foreign = _check.integer(0, foreign=state["foreign"])
        self.taken = self.issued + self.foreign
        self.broken, self.content = str(state.get("broken", "")), str(state.get("content", ""))
        self.declared = None if state["declared"] is None else Participation.from_json(state["declared"])
        stored = Ledger.from_json(state["prior"])
        if len(self.prior) and self.prior != stored:
            raise ArgumentError(
                "Expected prior= to be the interrupted run's own, or left out: a run goes on with the prior it began with. To count "
                "another phase too, start a new run with a fresh key and both ledgers as prior=."
            )
        self.prior = stored
        if self.max_epsilon is not None:
            self.limit = self._affordable(self.max_epsilon)
