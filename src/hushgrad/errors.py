"""The exceptions of hushgrad.

Every message is one sentence in the shape ``Expected {name}={value!r} {constraint}. {remedy}`` or says, as plainly,
what happened and what to do next. When in doubt the library raises: a privacy guarantee fails closed.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BudgetExceeded",
    "CaptureError",
    "Contradiction",
    "HushgradError",
    "NoTheorem",
    "NotIsolated",
    "NumericalLimit",
    "PolicyRefused",
    "StorageError",
    "WorkerLost",
]


class HushgradError(Exception):
    """Base of all errors raised on purpose by hushgrad; catch it to catch them all.

    >>> from hushgrad import epsilon, events
    >>> try:
    ...     epsilon(events.Gaussian(-1.0), delta=1e-5)
    ... except HushgradError as error:
    ...     type(error).__name__
    'ArgumentError'
    """

    agreed = False  # in a run of several processes: whether all of them raise this error


class ArgumentError(HushgradError, ValueError):
    """An argument has a value that it cannot have; the message names the argument and the remedy.

    >>> from hushgrad import epsilon, events
    >>> epsilon(events.Gaussian(1.0), delta=2.0)
    Traceback (most recent call last):
        ...
    hushgrad.errors.ArgumentError: Expected delta=2.0 to lie in [0, 1).
    """


class NoTheorem(HushgradError, NotImplementedError):
    """No published analysis covers this combination, so no epsilon is given for it.

    >>> from hushgrad import epsilon, events
    >>> try:
    ...     epsilon(events.RandomizedResponse(0.5), delta=1e-5)
    ... except NoTheorem as error:
    ...     print(str(error).partition(". ")[2])
    Ask with relation='replace_one', or with relation='zero_out'.
    """


class NumericalLimit(HushgradError, ArithmeticError):
    """A method left the range of double precision; the caller then uses a coarser method that does not."""


class Contradiction(HushgradError, RuntimeError):
    """Two certified bounds contradict each other, so one of them is wrong. Nothing may be claimed; please report the question."""


class NotIsolated(HushgradError, RuntimeError):
    """An example influences another example's output, so per-example clipping bounds nothing."""


class CaptureError(HushgradError, RuntimeError):
    """A parameter or a pass was not seen completely, so its gradient could not be clipped."""


class BudgetExceeded(HushgradError, RuntimeError):
    """The next step would spend more than the budget; it was not taken."""


class PolicyRefused(HushgradError, RuntimeError):
    """A policy file does not allow this; nothing was done.

    >>> from hushgrad.budget import Policy
    >>> try:
    ...     Policy(max_epsilon=3.0).require(epsilon=8.0, delta=1e-6, relation="add_remove", unit="example")
    ... except PolicyRefused as error:
    ...     str(error)
    'The policy allows an epsilon of at most 3; this is 8.'
    """


class StorageError(HushgradError, OSError):
    """A file could not be written (disk full, no permission); what was there before is untouched."""


class WorkerLost(HushgradError, RuntimeError):
    """A process that loads data died. The step that waited for it was not taken; the run goes on from its checkpoint."""
