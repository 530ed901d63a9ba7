"""What the operator of a server may see of a round: sensitive, and never part of what is released."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RawRound:
    """What happened in one round, before any noise. Sensitive: for the operator's log, not for publication.

    ``chosen`` users were entitled to take part, ``asked`` of them could be reached, ``accepted`` sent a usable update and
    ``clipped`` of those had a norm above the clip norm. ``rejected`` gives, for each unusable reply, the reason; it counted
    as zero. The divisor is the plan's in every case.
    """

    round: int
    chosen: int
    asked: int
    accepted: int
    clipped: int
    rejected: tuple[str, ...] = ()

    @property
    def dropped(self) -> int:
        """Chosen users without a usable update: unreachable, silent, failed or rejected."""
        return self.chosen - self.accepted

    def __str__(self) -> str:
        reasons = "".join(f"; {reason}" for reason in self.rejected)
        return (
            f"round {self.round}: {self.chosen} chosen, {self.asked} asked, {self.accepted} accepted, {self.clipped} clipped"
            f"{reasons}"
        )
