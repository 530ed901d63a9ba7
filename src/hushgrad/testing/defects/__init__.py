"""A register of planted defects: mistakes that this library, or one like it, has made or could make.

Each is a context inside of which the real objects have the mistake, with the law that it breaks and a small run on which it shows.
``make audit-power`` prints which check of the deep audit catches which:

    >>> from hushgrad.testing.defects import DEFECTS, audited
    >>> halved = DEFECTS["noise halved"]
    >>> with halved.plant():
    ...     report = audited(halved.bed)
    >>> report.refuted
    True
"""

from __future__ import annotations

from hushgrad.testing.defects import around, batches, clipping, fields, noise, runs, servers
from hushgrad.testing.defects.base import DEFECTS, Defect, defect, patched
from hushgrad.testing.defects.beds import BEDS, SERVERS, audited, bench

__all__ = [
    "BEDS",
    "DEFECTS",
    "SERVERS",
    "Defect",
    "around",
    "audited",
    "batches",
    "bench",
    "clipping",
    "defect",
    "fields",
    "noise",
    "patched",
    "runs",
    "servers",
]
