"""Defects of a federated server: unclipped clients, missing noise, wrong rounds after a restart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hushgrad.release.core import Release
from hushgrad.testing.defects.base import defect, replaced, wrong
from hushgrad.testing.defects.fields import zeroed
from hushgrad.testing.defects.noise import COVARIANCE
from hushgrad.testing.defects.runs import COVERED

_NORM = "no user moves the sum of a round by more than the clip norm"


def _server(method: str, mistaken: Callable[..., Any]) -> AbstractContextManager[None]:
    from hushgrad.federated.aggregate import Aggregator  # needs the extra ``federated``

    return replaced(Aggregator, method, mistaken)


def _added(weight: Callable[[Any, np.ndarray], float]) -> AbstractContextManager[None]:
    """Every finite update is added ``weight`` of (aggregator, update) times."""

    def add(right: Any, self: Any, content: Any) -> bool:
        self._layout.read_update(content, self._current, self._update)
        if np.isfinite(np.square(self._update).sum()):
            self._sum += self._update * weight(self, self._update)
            self._norms.append(float(np.linalg.norm(self._update)))
        return False

    return _server("add", add)


def _clipped(name: str, size: Callable[[np.ndarray], Any], *, bed: str = "server") -> None:
    """Register clients that are clipped by ``size`` of their update."""

    def weight(server: Any, update: np.ndarray) -> float:
        return min(1.0, server.clip_norm / max(1e-300, float(size(update))))

    defect(name, law=_NORM, bed=bed)(lambda: _added(weight))


_clipped("clients are not clipped", lambda update: 0.0)
_clipped("a client is clipped by its first array", lambda update: np.linalg.norm(update[:1200]))
_clipped("a client is clipped by its largest number", lambda update: np.abs(update).max(), bed="correlated server")


@defect("a round is divided by who answered", law="the divisor is public", bed="server")
def _() -> AbstractContextManager[None]:
    def divided(release: Any, self: Any, step: int) -> Any:
        self._sum *= self._plan.batch_size / max(1, len(self._norms))
        return release(self, step)

    return _server("release", divided)


@wrong(Release, "_moved_clip", "a server's clip norm follows the bare count", law=COVERED, bed="adaptive server")
def _(moved: Any, self: Release, step: int, norms: Any) -> Any:
    return self.clip.moved(self.clip.raw_count(norms))  # type: ignore[attr-defined]


@defect("a restarted server loads other buffers", law=COVARIANCE, bed="correlated server")
def _() -> AbstractContextManager[None]:
    def loaded(load: Any, self: Any, state: Any) -> None:
        load(self, {**state, "noise": zeroed(state["noise"])})

    return _server("load_state_dict", loaded)
