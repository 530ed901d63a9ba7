"""What a session releases before its first step: drawn once, recorded once, and read again when the run is resumed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.recipes.encoders import Encoder
from hushgrad.recipes.learning import LearningEncoder, learn
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.saved_plans import from_table
from hushgrad.recipes.spending import public_size
from hushgrad.release.atomic import replacing
from hushgrad.release.journal import JOURNAL, Journal
from hushgrad.release.journal_history import shown
from hushgrad.train.plan import Plan
from hushgrad.train.plan_checks import require_room

ENCODER = "encoder.json"
_BOUND = "learned numbers"  # in the journal


class LearnedEncoder:
    """The encoder that a session, or a search, has learned.

    It is kept in memory until the budget is reserved. Then, before the first step, ``keep`` writes it to the run's journal, and from
    there to a public file. So a session that is refused or killed earlier has released nothing, and a resumed one has the encoder
    that it began with, even if the public file was lost: no noise is ever drawn again.

    Args:
        recipe: of the run.
        out: its folder.
        key: its secret, if one is given.
        home: the folder below ``out`` that holds the journal.
    """

    def __init__(self, recipe: Recipe, out: Path, key: bytes | None = None, *, home: str = "checkpoint") -> None:
        self._recipe, self._file, self._journal = recipe, out / ENCODER, out / home / JOURNAL
        seed = recipe.run.seed
        self._secret = key or (secrets.token_bytes(32) if seed is None else f"seed {seed}".encode().ljust(16))
        self._used: LearningEncoder | None = None

    def __call__(
        self, encoder: LearningEncoder, prepared: Any, train: np.ndarray, owners: Sequence[str] | None
    ) -> LearningEncoder:
        """The encoder that was learned before, or one that learns now from the rows ``train``, which belong to ``owners``."""
        written = self._written()
        self._used = self.anew(encoder, prepared, train, owners) if written is None else self._known(encoder, written)
        return self._used

    def anew(self, encoder: LearningEncoder, prepared: Any, train: np.ndarray, owners: Sequence[str] | None) -> LearningEncoder:
        """An encoder that learns now; it is not kept."""
        terms = self._terms(len(train) if owners is None else len(set(owners)))
        return learn(encoder, prepared, train, secret=self._secret, owners=owners, **terms)

    def again(self, encoder: LearningEncoder, *_: Any) -> LearningEncoder:
        """The encoder that an earlier start recorded; nothing is learned."""
        written = self._written()
        if written is None:
            _check.fail("folder", str(self._file.parent), f"to hold {ENCODER}: what its run learned first", "Train it first.")
        return self._known(encoder, written)

    def _terms(self, count: int) -> dict[str, Any]:
        """The plan's terms: whether its sums are certified and correctly rounded, and the public number of units.

        The real number, ``count``, is taken only where the plan itself is made from it.
        """
        table = self._recipe.plan
        if "saved" in table:
            plan = from_table(table)
            stated, certified, secure = public_size(plan), plan.certified, plan.secure
        else:
            stated, secure = table.get("dataset_size", count), table.get("secure", False)
            certified = table.get("certified", False) or secure
        return {"records": _check.positive(dataset_size=stated), "certified": certified, "secure": secure}

    def _written(self) -> Any:
        """The encoder that an earlier start recorded, or None."""
        if self._file.exists():
            return self._file.read_text(encoding="utf-8")
        return shown(self._journal).bound.get(_BOUND) if self._journal.exists() else None

    def _known(self, encoder: LearningEncoder, written: Any) -> LearningEncoder:
        try:
            known = Encoder.from_json(written)
        except ValueError:
            raise ArgumentError(f"Expected {str(self._file)!r} to be as it was written; it was damaged.") from None
        if not isinstance(known, type(encoder)) or known.learns is not None:
            _check.fail("encoder", type(known).__name__, f"to be the {type(encoder).__name__} of the interrupted run")
        return known

    def require_room(self, plan: Plan) -> None:
        """Refuse a run whose own limit is below the cost of this release alone, before anything is released."""
        limit = self._recipe.run.max_epsilon
        if plan.before is not None and limit is not None:
            require_room(plan.before, max_epsilon=limit, delta=plan.delta, accountant="pld", relation=plan.relation)

    def keep(self, journal: Journal) -> None:
        """Record what was learned, in the ``journal`` first.

        Raises:
            ArgumentError: where this run has released other numbers before; nothing is written then.
        """
        if self._used is not None:
            text = json.dumps(self._used.to_json())
            journal.bind(_BOUND, json.loads(text))
            if not self._file.exists():
                with replacing(self._file, mode=0o666) as new:
                    new.write_text(text + "\n", encoding="utf-8")
