"""One task at one epsilon: trained as ``hushgrad train --auto`` does, for each seed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from torch.nn import functional as F

from accuracy.tasks import HERE, Task
from hushgrad.advice import Codebook, advise, read_codebook
from hushgrad.recipes import Recipe, evaluate
from hushgrad.recipes.dataset import Data
from hushgrad.train.fitting import fit


def measure(
    task: Task, data_of: Callable[[int, float], Data], epsilon: float, seeds: range, book: Codebook | None = None
) -> list[dict[str, float]]:
    """The figures of a run for each seed, and its CPU time: the recipe, plan and loop of ``hushgrad train --auto``, without its folder."""
    found: list[dict[str, float]] = []
    advice = None
    for seed in seeds:
        gc.collect()  # a run and its data are one circle of references, here of gigabytes
        began = time.process_time()
        data = data_of(seed, epsilon)
        if advice is None:  # it depends on public facts only
            advice = advise(
                book or read_codebook(HERE / task.codebook),
                epsilon=epsilon,
                delta=1e-5,
                records=len(data.train),
                minutes=task.minutes,
            )
        recipe = Recipe.from_tables({**advice.recipe("-").tables(), "run": {"seed": seed}})
        model = recipe.make_model(data)
        optimizer = recipe.make_optimizer(model)
        schedule = recipe.make_schedule(optimizer, advice.plan.steps)
        spent = fit(model, F.cross_entropy, optimizer, data.train, advice.plan, scheduler=schedule, progress=False, seed=seed)
        assert spent.epsilon <= epsilon
        test = evaluate(model, data.test)
        kept = {name: test[f"test_{name}"] for name in ("accuracy", "auc", "majority", "balanced_accuracy")}
        found.append({**kept, "seconds": time.process_time() - began, "steps": advice.plan.steps})
    return found
