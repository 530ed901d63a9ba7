"""The deep audit of a federated server: whatever clients send, a round must release the sum of clipped updates plus the key's noise row."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from hushgrad.audit.bench import row_std
from hushgrad.audit.checks import Check
from hushgrad.audit.deep_audit_base import Parts
from hushgrad.audit.noise_samples import draw_field
from hushgrad.audit.recompute import drawn, reference_row
from hushgrad.audit.report import DeepReport
from hushgrad.clipping import Adaptive
from hushgrad.clipping.clipper import Clipper
from hushgrad.events import Relation
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.whole import Whole
from hushgrad.release.placement.world import World
from hushgrad.train import Plan

_MODEL = "model"
_TOLERANCE = 1e-6  # a server adds in double precision


class Rounds(Protocol):
    """A server that can take rounds for an audit, under the audit's keys and with its clients only."""

    @property
    def size(self) -> int:
        """How many numbers the model has."""

    def take(self, key: RunKey, step: int, updates: list[np.ndarray], *, restart: bool) -> tuple[np.ndarray, Clipper]:
        """What round ``step`` releases for these flat updates, times the batch size, and the next clipper.

        ``restart``: the server has been saved and loaded before the round.
        """

    def as_sent(self, update: np.ndarray) -> np.ndarray:
        """The update in the precision in which clients send it."""

    def lengths(self, updates: list[np.ndarray]) -> list[float]:
        """How far each single update moves the sum, in double precision."""


def audit_rounds(plan: Plan, rounds: Rounds, *, records: int, seed: int = 0, confidence: float = 0.95) -> DeepReport:
    """Audit a server by rounds with simulated clients: ordinary ones, and malicious ones that send arbitrary numbers.

    **What refutes.** As for :func:`hushgrad.audit.audit_run`: the sum of the clipped updates is computed a second time in numpy, the
    row from the key; the noise and the cohorts are tested.

    Args:
        plan: the server's.
        rounds: the server itself.
        records: how many users there are.
        seed: of the updates, of the choice of rounds and columns; keys are fresh.
        confidence: of the lower bounds.
    """
    audit = _Server(plan, records, seed=seed, key=RunKey.make())
    audit.part("worst update", lambda: audit.worst(rounds))
    audit.part("releases", lambda: audit.releases(rounds))
    audit.part("noise", lambda: audit.noise(rounds.size))
    audit.part("batches", audit.batches)
    return audit.report(confidence)


class _Server(Parts):
    """The parts of one deep audit of a server."""

    def worst(self, rounds: Rounds) -> None:
        """Check that no update moves the sum by more than the clip norm."""
        norm = self.plan.clip.sensitivity(Relation.ADD_REMOVE)
        updates = self._updates(rounds, norm)
        most = max(rounds.lengths(updates)) / norm
        self.contribution = min(most, 1.0)
        seen = f"{len(updates)} updates: the sum moves by {most:.7g} clip norms at most"
        self.checks.append(Check(name="worst update", passed=most <= 1 + 1e-6, seen=seen))

    def releases(self, rounds: Rounds) -> None:
        """Recompute rounds at the beginning, at random and at the end; the second one follows a restart."""
        plan, rng = self.plan, np.random.default_rng([self.seed, 8])
        chosen = sorted({0, 1, int(rng.integers(0, plan.steps)), plan.steps - 1})
        reachable = [step for step in chosen if step < plan.steps and (step < 2 or step * rounds.size <= 4e8)]
        worst, clip, passed = 0.0, plan.clip, True
        for step in reachable:
            updates = self._updates(rounds, plan.clip.sensitivity(Relation.ADD_REMOVE))
            seen, after = rounds.take(self.key, step, updates, restart=step == 1)
            must = self._expected(step, updates)
            error = float(np.linalg.norm(seen - must)) / float(np.linalg.norm(must))
            worst = max(worst, error if error == error else float("inf"))
            passed &= self._is_next(clip, after, step, updates)
        text = f"rounds {', '.join(map(str, reachable))}: release - sum differs from the key's row by {worst:.1e}"
        self.checks.append(Check(name="exact release", passed=worst <= _TOLERANCE, seen=text))
        self.checks.append(Check(name="exact clip norm", passed=passed, seen="the next clip norm follows the noisy count"))

    def _expected(self, step: int, updates: list[np.ndarray]) -> np.ndarray:
        norm = self.plan.clip.sensitivity(Relation.ADD_REMOVE)
        total = np.zeros(updates[0].size)
        for update in updates:
            length = _length(update)
            if np.isfinite(length):
                total += update * min(1.0, norm / max(length, 1e-300))
        like = {_MODEL: torch.empty(total.size, dtype=torch.float64)}
        return total + reference_row(self.plan, self.key.secret, step, like, row_std(self.plan, self.plan.clip))[_MODEL].numpy()

    def _is_next(self, clip: Clipper, after: Clipper, step: int, updates: list[np.ndarray]) -> bool:
        if not isinstance(clip, Adaptive):
            return after == clip
        lengths = torch.tensor([length for length in map(_length, updates) if np.isfinite(length)], dtype=torch.float64)
        z = float(drawn(self.plan, self.key.secret, step, 1, 1, torch.float64)[0])
        must = clip.moved(clip.raw_count(lengths) + float(clip.count_noise or 0.0) * z).max_grad_norm
        return abs(after.sensitivity(Relation.ADD_REMOVE) / must - 1) < 1e-9

    def noise(self, size: int) -> None:
        """Test samples of the server's noise."""
        self.field(draw_field(self.plan, Whole({_MODEL: torch.zeros(size, dtype=torch.float64)}, World()), seed=self.seed))

    def _updates(self, rounds: Rounds, norm: float) -> list[np.ndarray]:
        """Updates of ordinary clients, far too long ones, and numbers that no training produces."""
        rng, size = np.random.default_rng([self.seed, 9]), rounds.size
        plain = rng.standard_normal((4, size)) / size**0.5
        updates = [norm * factor * row for row, factor in zip(plain, (0.1, 0.9, 5.0, 1e6), strict=True)]
        for place, value in ((0, 1e30), (-1, -1e150), (size // 2, 1e200), (0, 1e-200), (-1, np.inf), (size // 2, np.nan)):
            single = np.zeros(size)
            single[place] = value
            updates.append(single)
        return [rounds.as_sent(update) for update in (*updates, np.full(size, 1e160), np.zeros(size), updates[2])]


def _length(update: np.ndarray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.square(update).sum()))
