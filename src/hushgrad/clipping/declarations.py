"""What hooks cannot know and must be declared: which examples form a unit, and which passes are not part of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hushgrad import _check
from hushgrad.clipping.proof.inputs import Reading
from hushgrad.clipping.proof.state import Attributes
from hushgrad.clipping.root import Root
from hushgrad.clipping.tape import Tape


class Declarations:
    """The part of a capture that takes declarations."""

    _tape: Tape
    _root: Root
    _most: int | None

    def units(self, ids: Tensor) -> None:
        """Declare that examples of the next physical batch with equal ``ids`` are one unit, whose whole gradient is clipped as one."""
        ids = torch.as_tensor(ids)
        if ids.dim() != 1 or ids.is_floating_point():
            _check.fail("ids", ids, "to be a one-dimensional integer tensor, one id for each example")
        self._tape.announce(units=ids)

    @contextmanager
    def probe(self, coefficient: float) -> Iterator[None]:
        """Passes inside are one more probe over the *same* examples as the other probes since the last collect.

        The per-example gradients of all probes are added with their coefficients, then clipped as one.
        """
        with self._tape.probing(_check.number(coefficient=coefficient)):
            yield
            for batch in self._tape.batches:  # rules that wait for collect read the parameters, which may move after the probe
                for call in batch.calls:
                    self._tape.quiet(call.measure)

    @contextmanager
    def summing(self) -> Iterator[None]:
        """A backward pass inside is that of the *sum* of the examples' losses, even in a run whose losses are means.

        A mean divides every gradient by the number of examples and rounds it: so the last bits of all gradients depend on whether one
        record is there, and where gradients cancel, or in low precision, these bits matter.
        """
        self._tape.summing = True
        try:
            yield
        finally:
            self._tape.summing = False

    @property
    def reading(self) -> Reading | None:
        """Which inputs of the last pass have the examples, as it was proved; None: nothing was."""
        structure = self._tape.batch().structure
        return None if structure is None else structure.reading

    @property
    def proving(self) -> bool:
        """Whether the running pass belongs to a proof, which reads only what the pass to be proved reads."""
        return self._root.proving

    @property
    def aside(self) -> bool:
        """Whether the running pass is not part of a step: it belongs to a proof, or is paused."""
        return self.proving or self._tape.silent > 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Passes inside are not part of the step (an attack on the inputs, say). They must not reach ``p.grad``."""
        self._tape.silent += 1
        try:
            yield
        finally:
            self._tape.silent -= 1

    def look_at_attributes(self) -> None:
        """Remember the model's numbers as they are now, at the beginning of a run."""
        self._root.attributes.proved()

    @property
    def attributes(self) -> Attributes:
        """The model's plain attributes; whether somebody has set a number among them since the run began, other than to count."""
        return self._root.attributes
