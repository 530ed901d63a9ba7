"""Policies: what an organisation allows, in one small file that training, searches, ledgers and cards obey."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad._printed import at_most, reason
from hushgrad._value import Value
from hushgrad.errors import ArgumentError, PolicyRefused
from hushgrad.events import Relation

VARIABLE = "HUSHGRAD_POLICY"  # a file that every command obeys
_LARGEST = 1 << 20


class _Rules(Value, family="policy"):
    """The family of policies."""


@dataclass(frozen=True, kw_only=True)
class Policy(_Rules):
    """What is allowed. A field that is None or empty allows everything.

    | field | what is refused |
    |---|---|
    | ``max_epsilon``, ``max_delta`` | a claim or a budget above it |
    | ``delta_below_one_over_n`` | a delta that is not below 1 / (public number of records) |
    | ``relations``, ``units``, ``accountants`` | any other one |
    | ``certified``, ``secure`` | a plan without it |
    | ``ledger`` | a run that no ledger pays for |
    | ``approvals`` | the release of a model whose run fewer people have approved |

        >>> policy = Policy(max_epsilon=3.0, relations=("add_remove",))
        >>> policy.require(epsilon=8.0, delta=1e-6, relation="add_remove", unit="example")
        Traceback (most recent call last):
        ...
        hushgrad.errors.PolicyRefused: The policy allows an epsilon of at most 3; this is 8.
    """

    max_epsilon: float | None = None
    max_delta: float | None = None
    delta_below_one_over_n: bool = True
    relations: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    accountants: tuple[str, ...] = ()
    certified: bool = False
    secure: bool = False
    ledger: bool = False
    approvals: int = 0

    def __post_init__(self) -> None:
        if self.max_epsilon is not None:
            _check.positive(max_epsilon=self.max_epsilon)
        if self.max_delta is not None:
            _check.delta(max_delta=self.max_delta)
        for name in ("delta_below_one_over_n", "certified", "secure", "ledger"):
            _check.instance(bool, **{name: getattr(self, name)})
        for name in ("relations", "units", "accountants"):
            words = getattr(self, name)
            if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
                _check.fail(name, words, "to be a list of words")
            object.__setattr__(self, name, tuple(words))
        object.__setattr__(self, "relations", tuple(Relation.of(word).value for word in self.relations))
        _check.integer(0, approvals=self.approvals)

    @property
    def digest(self) -> str:
        """SHA-256 of what it says, in hexadecimal; spaces and comments of its file do not count."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def require(
        self,
        *,
        epsilon: float,
        delta: float,
        relation: Relation | str,
        unit: str,
        accountant: str | None = None,
        records: float | None = None,
    ) -> None:
        """Refuse a claim, or a budget, that is not allowed.

        Args:
            epsilon: of the claim.
            delta: of the claim.
            relation: between neighbours.
            unit: what is protected.
            accountant: who computed it; None for a budget.
            records: the public number of records, if it is known.

        Raises:
            PolicyRefused: with the rule that it breaks.
        """
        _at_most("an epsilon", epsilon, self.max_epsilon)
        _at_most("a delta", delta, self.max_delta)
        if self.delta_below_one_over_n and records and delta * records >= 1:
            raise PolicyRefused(f"The policy wants a delta below 1 / {records:.6g} records; this is {at_most(delta, 6)}.")
        _among("relation", Relation.of(relation).value, self.relations)
        _among("unit", unit, self.units)
        if accountant is not None:
            _among("accountant", accountant, self.accountants)

    def require_plan(self, *, certified: bool, secure: bool, paid: bool) -> None:
        """Refuse a run that is not carried out as it must be.

        Args:
            certified: whether its sums are certified.
            secure: whether its noise is rounded correctly.
            paid: whether a ledger pays for it.

        Raises:
            PolicyRefused: with what is missing.
        """
        remedies = {"certified": "--set plan.certified=true", "secure": "--secure", "ledger": "--ledger PLACE --dataset NAME"}
        for name, there in (("certified", certified), ("secure", secure), ("ledger", paid)):
            if getattr(self, name) and not there:
                raise PolicyRefused(f"The policy wants runs with {name!r}. Add {remedies[name]}.")


def read_policy(path: str | Path | None = None) -> Policy | None:
    """The policy in a TOML file; without a path, that of the environment variable HUSHGRAD_POLICY, or None.

    Args:
        path: of the file. Its keys are the fields of :class:`Policy`.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
    ...     print("max_epsilon = 3.0", file=file, flush=True)
    ...     read_policy(file.name).max_epsilon
    3.0

    Raises:
        ArgumentError: where it cannot be read or has an unknown key. A policy that is not understood allows nothing.
    """
    place = path or os.environ.get(VARIABLE)
    if not place:
        return None
    file = Path(place)
    try:
        if file.stat().st_size > _LARGEST:
            raise ArgumentError(f"Expected the policy {str(place)!r} to have at most {_LARGEST} bytes.")
        table = _check.toml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ArgumentError(f"Expected a policy in TOML at {str(place)!r}: {reason(error)}.") from None
    known = [field.name for field in fields(Policy)]
    for key in table:
        _check.one_of(known, policy_key=key)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return Policy(**values)


def _at_most(what: str, value: float, limit: float | None) -> None:
    if limit is not None and not value <= limit:
        raise PolicyRefused(f"The policy allows {what} of at most {at_most(limit, 6)}; this is {at_most(value, 6)}.")


def _among(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if allowed and value not in allowed:
        raise PolicyRefused(f"The policy allows the {what} {' or '.join(map(repr, allowed))}; this is {value!r}.")
