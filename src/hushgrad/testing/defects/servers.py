"""Defects of a federated server: clients that are not clipped, noise that is not there, rounds after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hushgrad.testing.defects.base import defect, patched

_NORM = "no user moves the sum of a round by more than the clip norm"


@contextmanager
def _added(weight: Any) -> Iterator[None]:
    """Every finite update is added ``weight`` of (aggregator, update) times."""
    from hushgrad.federated.aggregate import Aggregator  # needs the extra ``federated``

    def add(self: Aggregator, content: Any) -> bool:
        self._layout.read_update(content, self._current, self._update)
        if np.isfinite(np.square(self._update).sum()):
            self._sum += self._update * weight(self, self._update)
            self._norms.append(float(np.linalg.norm(self._update)))
        return False

    with patched(Aggregator, "add", add):
        yield


@defect("clients are not clipped", law=_NORM, bed="server")
def _() -> Iterator[None]:
    with _added(lambda server, update: 1.0):
        yield


@defect("a client is clipped by its first array", law=_NORM, bed="server")
def _() -> Iterator[None]:
    with _added(lambda server, update: min(1.0, server.clip_norm / max(1e-300, float(np.linalg.norm(update[:1200]))))):
        yield


@defect("a client is clipped by its largest number", law=_NORM, bed="correlated server")
def _() -> Iterator[None]:
    with _added(lambda server, update: min(1.0, server.clip_norm / max(1e-300, float(np.abs(update).max())))):
        yield


@defect("a round is divided by who answered", law="the divisor is public", bed="server")
def _() -> Iterator[None]:
    from hushgrad.federated.aggregate import Aggregator

    release = Aggregator.release

    def wrong(self: Aggregator, step: int) -> Any:
        self._sum *= self._plan.batch_size / max(1, len(self._norms))
        return release(self, step)

    with patched(Aggregator, "release", wrong):
        yield


@defect("a server's clip norm follows the bare count", law="whatever is released has noise", bed="adaptive server")
def _() -> Iterator[None]:
    from hushgrad.release.core import Release

    def bare(self: Release, step: int, norms: Any) -> Any:
        return self.clip.moved(self.clip.raw_count(norms))  # type: ignore[attr-defined]

    with patched(Release, "_moved_clip", bare):
        yield


@defect("a restarted server loads other buffers", law="the rows have the covariance that is accounted", bed="correlated server")
def _() -> Iterator[None]:
    from hushgrad.federated.aggregate import Aggregator
    from hushgrad.testing.defects.fields import zeroed

    load = Aggregator.load_state_dict
    with patched(Aggregator, "load_state_dict", lambda self, state: load(self, {**state, "noise": zeroed(state["noise"])})):
        yield
