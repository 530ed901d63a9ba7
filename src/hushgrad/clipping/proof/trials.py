"""Runs the proofs of one capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch

from hushgrad.clipping.merged_adapters import require_unmerged
from hushgrad.clipping.proof.call_trace import after_all
from hushgrad.clipping.proof.changed_weights import beyond, is_lifted, nudged, overturned, switched, switches
from hushgrad.clipping.proof.fixed_randomness import ALMOST_ONE, Draws, FixedRandomness, draw_from, host_draws
from hushgrad.clipping.proof.influence import swayed
from hushgrad.clipping.proof.input_variants import finite, has_shared_infinities, jittered, shuffled, tamed
from hushgrad.clipping.proof.inputs import data_of, leaves, readings
from hushgrad.clipping.proof.other_rows import takes_empty
from hushgrad.clipping.proof.prove import prove
from hushgrad.clipping.proof.refusals import Failure, Refusals
from hushgrad.clipping.proof.seal import Broken, broken, broken_back
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.survey import still_there, surveyed
from hushgrad.clipping.proof.variable_lengths import Opening, lengthened, openings, tells_lengths
from hushgrad.clipping.reconcile import REPLACED, is_replaced
from hushgrad.clipping.thresholds import SEAL_EXAMPLES
from hushgrad.errors import CaptureError, HushgradError, NotIsolated


class Trials(Refusals):
    """Proves passes of a model, by :mod:`~hushgrad.clipping.proof.prove` and :mod:`~hushgrad.clipping.proof.seal`."""

    acts_back = False  # some proved pass had hooks on the way back, or functions with a custom backward
    hooks = frozenset({0})  # how many of them forwards have put there whose way back was looked at

    # Proofs ----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def drawing(self, draws: Draws | None) -> Iterator[None]:
        """Proofs inside draw what a pass drew that began in this random state."""
        now = None if draws is None else host_draws()
        try:
            if draws is not None:
                draw_from(draws)
            yield
        finally:
            if now is not None:
                draw_from(now)

    def proved(self, inputs: Any, B: int, known: Structure | None = None) -> Structure:
        """Prove and seal; returns ``known`` if these inputs show nothing more. Raises NotIsolated or CaptureError."""
        return self._proved_somehow(partial(self._tried, B=B, known=known), inputs, B)

    def proved_of_one(self, inputs: Any) -> Structure:
        """The same for a batch of one example, from which batches of three are made."""
        return self._proved_somehow(self._tried_thrice, inputs, 1)

    def _proved_somehow(self, attempt: Callable[[Any], Structure | Failure], inputs: Any, B: int) -> Structure:
        """The result of the first attempt, or of two others if it fails.

        One attempt moves the weights a little but keeps random choices: within its batch a value may round to the other side of a kink (of
        a maximum, a ReLU) than alone, with another gradient; real mixing remains. The other one clamps extreme inputs, whose overflow hides
        everything.
        """
        choices, first = self._lot.getstate(), attempt(finite(inputs))
        again = first
        if isinstance(first, Failure) and first.problem is not None and not first.problem.influence:
            self._lot.setstate(choices)
            with nudged(self._capture.trained.values()):
                again = attempt(finite(inputs))
        tame = tamed(inputs) if isinstance(again, Failure) else None
        again = again if tame is None else attempt(tame)
        if isinstance(again, Structure) and has_shared_infinities(inputs, again.reading):  # they may decide a branch
            as_it_is = attempt(finite(inputs, again.reading))
            again = as_it_is if isinstance(as_it_is, Structure) else again
        self._give_back()
        if isinstance(again, Structure):
            return again
        assert isinstance(first, Failure)
        self._refuse(finite(inputs), B, first)

    def _tried_thrice(self, inputs: Any) -> Structure | Failure:
        """An example, and two similar ones."""
        first: Failure | None = None
        for reading in readings(inputs, 1):
            three = reading.only(inputs, torch.tensor([0, 0, 0]), 1)
            three = reading.changed(three, {1: lambda t, _: jittered(t), 2: lambda t, _: jittered(jittered(t))}, 3)
            found = self._tried(three, 3)
            if isinstance(found, Structure):
                return found
            first = first or found
        assert first is not None
        return first

    def is_new(self, structure: Structure) -> bool:
        """Whether a pass, of a model that counts or follows a schedule, is the first at its values."""
        at = (structure.sizes, *[value for *_, value in self._attributes.times()])
        new = self.moves_buffers or at not in self._times
        self._times.add(at)
        return new

    def repeat(self, structure: Structure, inputs: Any, B: int, *, brief: bool) -> None:
        """For a pass that looks like a proved one: replace the other examples and make them extreme once more. Raises NotIsolated.

        ``brief``: only ordinary and large replacements.
        """
        inputs = finite(inputs, structure.reading)
        self.opening = lengthened(structure.ways, leaves(inputs))
        with self._proving(FixedRandomness()):
            problem = swayed(self, structure, inputs, B, self._lot, brief=brief) if self._seal else None
        if problem is not None:
            self._refuse(inputs, B, Failure(Broken(problem, influence=True), None, frozenset()))
        if self.acts_back:
            self.repeat_back(structure, inputs, B)

    def repeat_back(self, structure: Structure, inputs: Any, B: int) -> None:
        """The same for the way back, with what may change a proof that fails: see ``_proved_somehow``. Raises NotIsolated."""
        inputs, trained, choices = finite(inputs, structure.reading), self._capture.trained.values(), self._lot.getstate()
        tries = ((inputs, nullcontext()), (inputs, nudged(trained)), (tamed(inputs), nullcontext())) if self._seal else ()
        problem = None
        for given, change in (one for one in tries if one[0] is not None):
            self._lot.setstate(choices)
            with change, self._proving(FixedRandomness()):
                problem = broken_back(self, structure, given, B, self._lot)
            if problem is None:
                return
        if problem is not None:
            self._refuse(inputs, B, Failure(problem, None, frozenset()))

    def may_be_read(self, inputs: Any, B: int) -> bool:
        """Whether some reading of the inputs explains the outputs for this number of examples."""
        self.opening = None  # not that of an earlier batch, whose lengths were others
        with suppress(NotIsolated), self._proving(FixedRandomness()):
            return prove(self, finite(inputs), B) is not None
        return False

    def _tried(self, inputs: Any, B: int, known: Structure | None = None) -> Structure | Failure:
        """The first way in which the outputs may hold the examples that can be proved; otherwise why the plain one fails."""
        require_unmerged(self.model)
        failed: Failure | None = None
        for opening in self._openings(inputs, B):
            self.opening = opening
            found = self._tried_so(inputs, B, known, self._alike(inputs))
            if isinstance(found, Structure):
                return found
            failed = found if opening is None else failed
        assert failed is not None
        return failed

    def _openings(self, inputs: Any, B: int) -> Iterator[Opening | None]:
        tensors = leaves(inputs)
        if not tells_lengths(tensors, B):
            yield None
            return
        self.opening = None
        with self._proving(FixedRandomness()), torch.no_grad(), self.paused():
            shapes = [y.shape for y in self.alone(inputs)[0]]
        yield from openings(shapes, tensors, B)

    def _alike(self, inputs: Any) -> list[Structure]:
        """All that were proved for such inputs."""
        return self._known.proved(self._attributes.key([*map(data_of, leaves(inputs))]))

    def _tried_so(self, inputs: Any, B: int, known: Structure | None, alike: list[Structure]) -> Structure | Failure:
        """Prove and seal; of two structures that differ because these data have fewer gradients, the one that was proved before."""
        quiet, more = FixedRandomness(), None
        self.traces = []
        try:
            with self._proving(quiet):
                found = prove(self, inputs, B)
                if found is not None and known is not None and found[0].same_as(known):
                    return known  # already sealed
                more = next((s for s in alike if found is not None and found[0].shows_less_than(s)), None)
                if found is not None and more is not None:
                    found = more._replace(most=max(more.most, found[0].most)), found[1]
                problem = None if found is None or not self._seal else broken(self, found[0], inputs, B, self._lot)
            if found is not None and problem is None and self._seal and quiet.replaced:
                problem = self._swayed(found[0], inputs, B)
            if found is not None and problem is None and self._seal:
                problem = self._drawn_otherwise(found[0], inputs, B, quiet)
            if found is not None and problem is None and self._seal:
                problem = self._switched(found[0], inputs, B, list(quiet.bounds))
        except HushgradError as error:
            if more is not None:
                return self._tried_so(inputs, B, known, [])
            return Failure(None, error, frozenset(quiet.drawn))
        except Exception as error:  # noqa: BLE001  the model's own, of whatever kind
            line = next(iter(str(error).splitlines()), type(error).__name__)[:300]
            message = (
                f"{type(self.model).__name__} cannot be run for fewer or more examples, as its proof needs: {line} "
                "Let the model take any number of examples, one too (squeeze(1) rather than squeeze(), which drops the examples' dimension "
                "as well), or vouch for it with check_isolation=False."
            )
            if self._capture.whole and is_replaced(self.model, self._capture.trained):
                message = REPLACED
            return Failure(None, CaptureError(message), frozenset(quiet.drawn))
        if problem is not None and more is not None:
            return self._tried_so(inputs, B, known, [])
        if found is None or problem is not None:
            return Failure(problem, None, frozenset(quiet.drawn))
        found = self._with_empty(found[0], inputs, B), found[1]
        self._attributes.meet(quiet.met)
        structure = found[0] if found[1] else self._with_order(found[0], inputs, B)
        traces = after_all(structure.traces, self.traces) if self._seal else None
        return structure._replace(traces=traces, dispatched=traces is not None and traces.dispatched)

    def _with_empty(self, structure: Structure, inputs: Any, B: int) -> Structure:
        """The structure of later batches with examples without rows, too, where all rows are in one list and the model takes these."""
        reading, seen = structure.reading, len(self.traces)
        if reading.empty or not self._seal or reading.flat(inputs, B) is None:
            return structure
        with self._proving(FixedRandomness()):
            empty = takes_empty(self, structure, inputs, B, self._lot)
        if not empty:
            del self.traces[seen:]
        return structure._replace(reading=reading._replace(empty=empty))

    def _with_order(self, structure: Structure, inputs: Any, B: int) -> Structure:
        """If other data of the same size move rows elsewhere, by whatever operation, tags find the owners in every pass."""
        if structure.moves is None:
            return structure
        n = min(B, SEAL_EXAMPLES)
        some = structure.reading.only(inputs, torch.tensor(self._lot.sample(range(B), n)), B)
        other = structure.reading.all_changed(some, shuffled)
        try:
            with self._proving(FixedRandomness()):
                still = still_there(structure, surveyed(self.run(other, n), structure.exits, n))
        except Exception:  # noqa: BLE001  such data it does not take, so nothing was shown: tags tell, in every pass
            still = False
        return structure if still else structure._replace(moves=None, plain=False)

    def _swayed(self, structure: Structure, inputs: Any, B: int) -> Broken | None:
        """The seal's replacements with other constants for random numbers, which may open a branch or a factor that mixes examples."""
        for uniform, normal in ((1 - ALMOST_ONE, 1.0), (0.5, -1.0)):
            with self._proving(FixedRandomness(uniform=uniform, normal=normal)):
                problem = swayed(self, structure, inputs, B, self._lot)
            if problem is not None:
                return Broken(problem, influence=True)
        return None

    def _drawn_otherwise(self, structure: Structure, inputs: Any, B: int, quiet: FixedRandomness) -> Broken | None:
        """The same, briefly, where masks drop everything, and where random numbers differ from row to row."""
        problem = None
        dropping, falling = (
            [{"drops": True}] * quiet.masked,
            [{"falls": True}] * (2 * quiet.replaced),
        )  # whose row it gets is drawn
        for draws in (*dropping, *falling):
            problem = problem or self._changed(nullcontext(), structure, inputs, B, quiet=FixedRandomness(**draws))[0]
        return None if problem is None else Broken(f"with other random numbers, {problem}", influence=True)

    def _switched(self, structure: Structure, inputs: Any, B: int, bounds: list[float]) -> Broken | None:
        """The same with closed gates opened, with other weights, and with lifted zeros back at 0.

        ``bounds``: constants that the forward subtracts from its tensors, or compares them with.
        """
        trained, gates = list(self._capture.trained.values()), switches(self.model)
        if self.lifts and is_lifted(trained):
            problem, _ = self._changed(nullcontext(), structure, inputs, B, lifts=False)
            if problem is not None:
                return Broken(problem, influence=True)
        problem, ran = self._changed(overturned(trained), structure, inputs, B)
        if not ran:
            problem, _ = self._changed(overturned(p for p in trained if p.dim() < 2), structure, inputs, B)
        for bound in bounds:
            problem = problem or self._changed(beyond(trained, bound), structure, inputs, B)[0]
        if problem is not None:
            return Broken(f"with other weights, {problem}", influence=True)
        for by in (1.0, -1.0) if gates else ():
            problem, ran = self._changed(switched(gates, by), structure, inputs, B)
            for one, less in product(gates, (by, by / 64)) if not ran else ():  # a rejected combination must not hide single ones
                problem = problem or self._changed(switched([one], less), structure, inputs, B)[0]
            if problem is not None:
                return Broken(f"with other values of its single numbers, {problem}", influence=True)
        return None

    def _changed(
        self,
        change: AbstractContextManager[None],
        structure: Structure,
        inputs: Any,
        B: int,
        *,
        lifts: bool = True,
        quiet: FixedRandomness | None = None,
    ) -> tuple[str | None, bool]:
        """What is wrong with the changed model, and whether it could be run at all."""
        before, seen, self.lifts = self.lifts, len(self.traces), self.lifts and lifts
        try:
            with change, self._proving(FixedRandomness() if quiet is None else quiet):
                return swayed(self, structure, inputs, B, self._lot, brief=True), True
        except (HushgradError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # noqa: BLE001  the model's own: it does not take such a number
            return None, False
        finally:
            self.lifts = before
            del self.traces[seen:]  # a pass that makes these calls needs its own proof
