"""Testing: public conformance checks of every package, also for your own mechanisms, rules, samplers and accountants.

Each ``check_*`` function raises ``AssertionError`` with one sentence that says what does not hold. ``assert_private`` does so
if an attack refutes a claimed (epsilon, delta); ``worst_record`` searches for the record that moves a sum most. hushgrad's own
tests run them over everything in each package's ``__all__``, so a new part is tested as soon as it is imported there:

    for name in testing.members(hushgrad.noise, hushgrad.noise.Mechanism): ...
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import TYPE_CHECKING

from hushgrad._lazy_import import later

if TYPE_CHECKING:
    from hushgrad.audit.worst_record_search import worst_record
    from hushgrad.testing.accountants import check_accountant
    from hushgrad.testing.clippers import check_clipper
    from hushgrad.testing.denoisers import check_denoiser, check_disk, check_laplacian
    from hushgrad.testing.mechanisms import check_mechanism
    from hushgrad.testing.private import assert_private
    from hushgrad.testing.rules import check_rule
    from hushgrad.testing.samplers import check_sampler

__all__ = [
    "assert_private",
    "check_accountant",
    "check_clipper",
    "check_denoiser",
    "check_disk",
    "check_laplacian",
    "check_mechanism",
    "check_rule",
    "check_sampler",
    "members",
    "worst_record",
]


def members(room: ModuleType, family: type) -> dict[str, type]:
    """The public concrete subclasses of ``family`` in ``room``, by name.

    >>> from hushgrad import events
    >>> sorted(members(events, events.Participation))[:2]
    ['BallsInBins', 'CyclicPoisson']
    """
    public = {name: getattr(room, name) for name in room.__all__}
    return {
        name: kind
        for name, kind in public.items()
        if inspect.isclass(kind) and issubclass(kind, family) and kind is not family and not inspect.isabstract(kind)
    }


# Imported on first use, so that checking an accountant does not import torch.
__getattr__, __dir__ = later(__name__)
