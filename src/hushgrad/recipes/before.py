"""What a session releases before its first step: drawn once, written down once, read again when the run goes on."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.recipes.encoders import Encoder
from hushgrad.recipes.learning import LearningEncoder, learn
from hushgrad.recipes.recipe import Recipe
from hushgrad.release.atomic import replacing

__all__ = ["Before"]

_FILE = "encoder.json"


class Before:
    """The encoder that a session has learned.

    It is kept in memory until the budget is reserved; then ``keep`` writes it, before the first step. So a session that is refused, or
    killed earlier, has released nothing, and one that goes on has the encoder that it began with: no noise is ever drawn again.
    """

    def __init__(self, recipe: Recipe, out: Path, key: bytes | None) -> None:
        self._recipe, self._file = recipe, out / _FILE
        seed = recipe.run.seed
        self._secret = key or (secrets.token_bytes(32) if seed is None else f"seed {seed}".encode().ljust(16))
        self._fresh: LearningEncoder | None = None

    def __call__(self, encoder: LearningEncoder, prepared: Any, train: np.ndarray) -> LearningEncoder:
        """The encoder that was learned before, or one that learns now from the rows ``train``."""
        if self._file.exists():
            return self._known(encoder)
        records = float(self._recipe.plan.get("dataset_size", len(train)))
        self._fresh = learn(encoder, prepared, train, records=records, secret=self._secret)
        return self._fresh

    def _known(self, encoder: LearningEncoder) -> LearningEncoder:
        try:
            known = Encoder.from_json(self._file.read_text(encoding="utf-8"))
        except ValueError:
            raise ArgumentError(f"Expected {str(self._file)!r} to be as it was written; it was damaged.") from None
        if not isinstance(known, type(encoder)) or known.learns is not None:
            _check.fail("encoder", type(known).__name__, f"to be the {type(encoder).__name__} of the interrupted run")
        return known

    def keep(self) -> None:
        """Write down what was learned in this session."""
        if self._fresh is not None:
            with replacing(self._file, mode=0o666) as new:
                new.write_text(json.dumps(self._fresh.to_json()) + "\n", encoding="utf-8")
