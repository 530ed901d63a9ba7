"""The deep audit of a run folder of ``hushgrad train``: its recipe gives model, data and optimizer, its plan the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from hushgrad import _check
from hushgrad._printed import reason
from hushgrad.audit.bench import Bench
from hushgrad.audit.deep_audit import audit_run
from hushgrad.audit.report import DeepReport
from hushgrad.errors import ArgumentError
from hushgrad.recipes.learned_encoder import LearnedEncoder
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.saved import put_weights
from hushgrad.release.journal import JOURNAL
from hushgrad.release.journal_history import shown
from hushgrad.release.keys import KEY, read_key
from hushgrad.train.plan import Plan


def audit_folder(folder: str | Path, **options: Any) -> DeepReport:
    """Audit the run in ``folder``: at its released weights if it is finished, else at its first ones.

    Where the run is not finished, its key is still there and its first weights follow from the recipe's seed, the compared steps are
    taken under the run's own key and must repeat what its journal says; the key and the releases stay in memory. ``options`` are
    those of :func:`audit_run`.
    """
    path = Path(folder)
    recipe, plan = Recipe.from_tables(_read(path / "recipe.json")), Plan.from_json(_read(path / "plan.json"))
    data = recipe.make_data(LearnedEncoder(recipe, path, None).again)
    first = recipe.make_model(data)
    bench = Bench(
        build=_builder(recipe, lambda: copy.deepcopy(first)),
        plan=plan,
        dataset=data.train,
        loss_fn=F.cross_entropy,
        groups=data.groups,
    )
    secret, journal = path / "checkpoint" / KEY, path / "checkpoint" / JOURNAL
    if secret.exists() and journal.exists() and recipe.run.seed is not None and recipe.run.max_physical_batch is None:
        key = read_key(secret, plan=plan.digest)
        return audit_run(bench, key=key.secret, journal=shown(journal).digests, **options)
    weights = path / "model.safetensors"
    if weights.exists():
        put_weights(first, weights)
    return audit_run(bench, **options)


def _builder(recipe: Recipe, model: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def build() -> tuple[nn.Module, Optimizer]:
        own = model()
        return own, recipe.make_optimizer(own)

    return build


def _read(path: Path) -> Any:
    try:
        return _check.parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"Expected to read {str(path)!r}, a file of a run of hushgrad train: {reason(error)}.") from None
