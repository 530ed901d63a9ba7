"""A session: from a recipe to a folder with the model, its plan, its ledger, its guarantee and a report."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from hushgrad import _check
from hushgrad.budget import Policy, read_policy
from hushgrad.budget.folder import RESERVATION
from hushgrad.clipping.batch_invariance import request_batch_invariance
from hushgrad.errors import ArgumentError
from hushgrad.guarantee import Guarantee
from hushgrad.recipes.allocator import keep_large_blocks
from hushgrad.recipes.dataset import Data
from hushgrad.recipes.interrupt import Interrupt
from hushgrad.recipes.learned_encoder import ENCODER, LearnedEncoder
from hushgrad.recipes.metrics import confusion, evaluate, verdict
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.recipe_file import DEMO
from hushgrad.recipes.saved import describe, save_model
from hushgrad.recipes.spending import Spending, new_folder, require_allowed
from hushgrad.recipes.summary import write_report
from hushgrad.release.atomic import replacing
from hushgrad.release.erasure import destroy, finish
from hushgrad.release.journal import WAYS_ON
from hushgrad.release.keys import KEY
from hushgrad.release.owner import LOCK
from hushgrad.train.callbacks import JsonLines, ProgressBar
from hushgrad.train.checkpoint import Checkpoint
from hushgrad.train.fitting import run_steps
from hushgrad.train.plan import Plan
from hushgrad.train.private import Private, make_private

_PUBLIC = 0o666  # as the user's umask says
_METRICS = "metrics.jsonl"  # there from the moment on at which a step may be taken


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a finished session."""

    guarantee: Guarantee
    test: dict[str, float]
    steps: int
    seconds: float
    out: Path
    confusion: list[list[int]] | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "out": str(self.out),
            "guarantee": self.guarantee.to_json(),
            "claim": str(self.guarantee),
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            **self.test,
            **({} if self.confusion is None else {"confusion": self.confusion}),
            **({"verdict": self.verdict} if self.verdict else {}),
        }

    @property
    def verdict(self) -> str:
        """A sentence if the model is no better than a constant, else nothing."""
        return verdict(self.test)


def train(
    recipe: Recipe | None,
    out: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    key: bytes | None = None,
    data: Data | None = None,
    take_over: bool = False,
    allow_code: bool = False,
    policy: Policy | str | Path | None = None,
) -> Outcome:
    """Train as ``recipe`` says (the demo if None) and write everything into the folder ``out``.

    An interrupted session (Ctrl-C, SIGTERM) finishes its step, saves a checkpoint and raises KeyboardInterrupt; one that was
    killed has its last periodic checkpoint. Both continue with ``resume=True``, bit for bit. A finished session erases its key.

    If the recipe has a ``[ledger]``, room for the whole plan is reserved there before anything else, and what was done is
    committed at the end.

    Args:
        recipe: what to train; with ``resume`` it may be left out, or must be that of the interrupted run.
        out: a new or empty folder, or that of the interrupted run.
        resume: continue an interrupted run.
        progress: show a bar with the (un-noised) loss on the terminal.
        key: the run's secret, 32 bytes; fresh by default. For programs that run many sessions.
        data: what to train on; by default what the recipe names.
        take_over: take the folder from a dead owner if the file system cannot tell (:mod:`hushgrad.release.owner`).
        allow_code: whether a stored recipe that names code as ``module:function`` may run it on ``resume``. A folder is data.
        policy: what is allowed, or its file; by default the one that HUSHGRAD_POLICY names, if any.

    Raises:
        BudgetExceeded: if the ledger has no room for the plan; nothing was trained then.
        PolicyRefused: if the policy does not allow the plan; nothing was trained then.
    """
    rules = policy if isinstance(policy, Policy) else read_policy(policy)
    recipe = None if recipe is None else Recipe.given(recipe)
    out = Path(out)
    if resume:
        if not (out / "recipe.json").exists():
            _check.fail("--out", str(out), "to hold an interrupted run", "Leave --resume out to start a new one.")
        finish(out)  # what a crash at the very end may have left
    with new_folder(out, take_over=take_over):  # before anything in it is looked at, or removed
        recipe = _opened(recipe, out, resume, allow_code)
        return _trained(recipe, out, resume, progress, key, data, take_over, rules)


def _trained(
    recipe: Recipe,
    out: Path,
    resume: bool,
    progress: bool,
    key: bytes | None,
    data: Data | None,
    take_over: bool,
    rules: Policy | None,
) -> Outcome:
    began = time.monotonic()
    run = recipe.run
    keep_large_blocks()
    if run.threads is not None:
        torch.set_num_threads(_check.positive_int(threads=run.threads))
    request_batch_invariance()  # before the first product
    before = LearnedEncoder(recipe, out, key)
    data = recipe.make_data(before) if data is None else data
    model = recipe.make_model(data)
    plan = _plan(recipe, data, out, resume)
    require_allowed(rules, plan, paid=bool(recipe.ledger))
    before.require_room(plan)
    optimizer = recipe.make_optimizer(model)
    scheduler = recipe.make_schedule(optimizer, plan.steps)
    private = make_private(model, optimizer, plan, key=key, seed=run.seed, max_epsilon=run.max_epsilon)
    spending = Spending(recipe, plan, out)
    _require_key(out, begun=spending.begun)
    _write(out / "recipe.json", recipe.tables())  # before its key is there: from here on the folder can be resumed
    _write(out / "plan.json", plan.to_json())
    extras = {} if scheduler is None else {"scheduler": scheduler}
    checkpoint = Checkpoint(out / "checkpoint", private, extras=extras, take_over=take_over)
    _forget_after(out / _METRICS, private.steps)
    spending.begin(private.key.run_name())
    before.keep(private.journal)
    run_steps(
        private,
        F.cross_entropy,
        data.train,
        callbacks=_callbacks(recipe, private, checkpoint, data, out, progress),
        max_physical_batch=run.max_physical_batch,
        groups=data.groups,
        scheduler=scheduler,
        num_workers=run.workers,
    )
    outcome = _finished(recipe, private, data, out, began)
    destroy(out)  # from now on nobody can subtract the noise
    spending.commit(outcome.guarantee.event)
    return outcome


def _callbacks(
    recipe: Recipe, private: Private, checkpoint: Checkpoint, data: Data, out: Path, progress: bool
) -> list[Callable[[dict[str, Any]], Any]]:
    run = recipe.run

    def test(metrics: dict[str, Any]) -> None:
        if run.evaluate_every and metrics["step"] % run.evaluate_every == 0:
            metrics.update(_tested(private, data))

    def save(metrics: dict[str, Any]) -> None:
        if metrics["step"] % run.checkpoint_every == 0:
            checkpoint.save()

    bar: list[Any] = [ProgressBar(private.steps_allowed)] if progress else []
    # The interrupt comes last: when it stops the loop, the step is complete and everything about it is written.
    return [test, JsonLines(out / _METRICS, raw=run.raw_metrics), *bar, save, Interrupt(checkpoint.save)]


def _tested(private: Private, data: Data) -> dict[str, float]:
    with private.averaged() if private.plan.average is not None else nullcontext():
        return evaluate(private.model, data.test)


def _finished(recipe: Recipe, private: Private, data: Data, out: Path, began: float) -> Outcome:
    with private.averaged() if private.plan.average is not None else nullcontext():
        test, errors = evaluate(private.model, data.test), confusion(private.model, data.test)
        save_model(private.model, out / "model.safetensors", describe(recipe.model, data))
    _write(out / "ledger.json", private.ledger.to_json())
    guarantee = private.spent()
    private.detach()
    facts: dict[str, Any] = {"guarantee": guarantee, "steps": private.steps, "seconds": time.monotonic() - began, "out": out}
    outcome = Outcome(test=test, confusion=errors, **facts)
    write_report(out, recipe, private.plan, outcome.to_json(), guarantee)  # last: it marks a finished session
    return outcome


# The folder ------------------------------------------------------------------------------------------------------------


def _opened(recipe: Recipe | None, out: Path, resume: bool, allow_code: bool) -> Recipe:
    """The recipe of this session; checks that its folder, which is owned, is new or can be resumed."""
    known = _read(out / "recipe.json")
    if isinstance(known, dict) and "run" in known:
        known = Recipe.from_tables(known).tables()  # with what an earlier version did not write
    if resume:
        if (out / "guarantee.json").exists():
            _check.fail(
                "--out", str(out), "to hold an unfinished run; this one is complete", "Choose another folder for a new run."
            )
        if recipe is not None and recipe.tables() != known:
            raise ArgumentError(
                "Expected the recipe to be that of the interrupted run. Leave it out, or start a new run elsewhere."
            )
        return Recipe.from_tables(known, allow_code=allow_code or (recipe is not None and recipe.allow_code))
    recipe = Recipe.from_tables(DEMO) if recipe is None else recipe
    if held := [path for path in out.iterdir() if path.name != LOCK]:
        if known != recipe.tables() or known != Recipe.from_tables(DEMO).tables():
            remedy = "Choose another folder, or continue an interrupted run with --resume."
            _check.fail("--out", str(out), "to be a new or empty folder", remedy)
        for path in held:  # an earlier run of the demo, on public data, which anybody can repeat
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return recipe


def _require_key(out: Path, *, begun: bool) -> None:
    """A folder without a key has released nothing; refuse it if anything shows that there was one."""
    shown = [name for name in (_METRICS, ENCODER) if (out / name).exists()] + [RESERVATION] * begun
    if shown and not (out / "checkpoint" / KEY).exists():
        raise ArgumentError(
            f"Expected checkpoint/{KEY} beside {shown[0]}: this run has begun, and a second one would be released unpaid. {WAYS_ON}"
        )


def _plan(recipe: Recipe, data: Data, out: Path, resume: bool) -> Plan:
    stored = _read(out / "plan.json") if resume else None
    if stored is None:
        return recipe.make_plan(data)
    plan = Plan.from_json(stored)
    _require_same_size(recipe, data, plan)
    return plan


def _require_same_size(recipe: Recipe, data: Data, plan: Plan) -> None:
    """Refuse data of another size: repeating steps on other data with the same noise would reveal the difference."""
    if "saved" in recipe.plan:
        return  # a plan from a file states its numbers itself; the journal compares the records
    table = {key: value for key, value in recipe.plan.items() if key not in ("epsilon", "clip")}
    anew = replace(recipe, plan={**table, "noise": "Independent", "noise_multiplier": 1.0})  # no calibration, which takes a while
    if anew.make_plan(data).sampler != plan.sampler:
        raise ArgumentError(
            "Expected the data of the interrupted run: their number has changed since. Resume with the data as they were, or "
            "start a new run elsewhere."
        )


def _forget_after(path: Path, step: int) -> None:
    """Drop the metrics of steps after the checkpoint, which are taken again, and make sure that the file exists."""
    text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""  # whoever wrote it: what is no step is dropped
    kept = [line for line in text.splitlines() if _step(line) <= step]
    with replacing(path, mode=_PUBLIC) as new:
        new.write_text("".join(line + "\n" for line in kept))


def _step(line: str) -> float:
    try:
        return float(_check.parsed(line)["step"])
    except (ValueError, KeyError, TypeError, ArithmeticError):  # the last line of a killed run may be cut short
        return float("inf")


def _read(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return _check.parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(f"Expected {str(path)!r} to be as it was written; it was damaged ({error}).") from None


def _write(path: Path, content: Any) -> None:
    """Write atomically: a run whose plan was cut short by a full disk could never continue."""
    with replacing(path, mode=_PUBLIC) as new:
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
