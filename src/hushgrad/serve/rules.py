"""The policy that the page shows and enforces. Its file is read again for every request, so a changed policy takes effect at once."""

from __future__ import annotations

from typing import Any

from hushgrad._printed import at_most
from hushgrad.budget import Policy, read_policy
from hushgrad.errors import ArgumentError, PolicyRefused
from hushgrad.serve.worker_queue import Refused


class Rules:
    """The policy in a file, or the one that HUSHGRAD_POLICY names, or none."""

    def __init__(self, place: str | None) -> None:
        self._place = place

    def policy(self) -> Policy | None:
        """What the file says now.

        Raises:
            Refused: it cannot be read any more. The sentence tells nothing of the file.
        """
        try:
            return read_policy(self._place)
        except ArgumentError:
            raise Refused("The policy cannot be read any more, so that nothing is allowed. Mend its file.") from None

    def version(self) -> str:
        """A value that changes with the policy."""
        try:
            policy = self.policy()
        except Refused:
            return "unreadable"
        return "" if policy is None else policy.digest

    def refusal(self, question: dict[str, Any]) -> str:
        """The policy's objection to a question of the planner, whose plans protect single examples; "" if there is none."""
        policy = self.policy()
        claim = {"epsilon": question["epsilon"], "delta": question["delta"], "relation": question["relation"]}
        try:
            if policy is not None:
                policy.require(**claim, unit="example", records=question["dataset_size"])
        except PolicyRefused as error:
            return str(error)
        return ""


def in_words(policy: Policy) -> dict[str, str]:
    """What is allowed, rule by rule.

    >>> in_words(Policy(max_epsilon=3.0, approvals=2))["epsilon"], in_words(Policy())["epsilon"]
    ('at most 3', 'any')
    """
    below = ["below 1 / (public number of records)"] if policy.delta_below_one_over_n else []
    delta = [] if policy.max_delta is None else [f"at most {at_most(policy.max_delta, 6)}"]
    wanted = {"certified": "certified sums", "secure": "correctly rounded noise (secure)", "ledger": "paid by a ledger"}
    return {
        "epsilon": "any" if policy.max_epsilon is None else f"at most {at_most(policy.max_epsilon, 6)}",
        "delta": ", ".join(delta + below) or "any",
        "relation": " or ".join(policy.relations) or "any",
        "unit": " or ".join(policy.units) or "any",
        "accountant": " or ".join(policy.accountants) or "any",
        "runs": ", ".join(words for name, words in wanted.items() if getattr(policy, name)) or "any",
        "approvals before a release": str(policy.approvals),
    }
