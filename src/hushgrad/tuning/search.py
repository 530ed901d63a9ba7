"""A private search: K trials, K secret and fixed by a key, each with a random candidate; only the best is released."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.budget import Policy, read_policy
from hushgrad.budget.folder import SETTLED
from hushgrad.errors import ArgumentError, CaptureError, HushgradError, NoTheorem, NotIsolated
from hushgrad.recipes.calls import require_code_allowed
from hushgrad.recipes.dataset import Data
from hushgrad.recipes.learned_encoder import ENCODER, LearnedEncoder
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.saved import put_weights
from hushgrad.recipes.session import train
from hushgrad.recipes.spending import Spending, new_folder, require_allowed
from hushgrad.release import journal_history
from hushgrad.release.erasure import finish
from hushgrad.release.journal import JOURNAL, WAYS_ON, Journal
from hushgrad.release.keys import KEY, RunKey, read_key, write_key
from hushgrad.release.owner import LOCK, Owner
from hushgrad.sampling.data_digest import identity_of
from hushgrad.tuning.cost import Draws
from hushgrad.tuning.price import Priced, priced
from hushgrad.tuning.score import held_out, private_score
from hushgrad.tuning.space import Settings, settings_of, with_candidate
from hushgrad.tuning.winner import Result, Tuned, claim, found, outcome_of, released, write

_ANY = Policy(delta_below_one_over_n=False)  # of a single trial: what counts is the search


def tune(
    recipe: Recipe | None,
    out: str | Path,
    *,
    settings: Settings | None = None,
    resume: bool = False,
    progress: bool = False,
    allow_code: bool = False,
    policy: Policy | str | Path | None = None,
    take_over: bool = False,
) -> Tuned:
    """Search as the recipe's ``[tune]`` table says, and write the winner into the folder ``out``, like a run of its own.

    K and all candidates follow from a secret key that is on disk before the first trial, so a search that is interrupted or
    killed continues with ``resume=True`` as the same search. While it runs, ``out/search`` is as secret as the data: it holds
    the key, and K, the losers and their scores are not covered by the guarantee. It is erased at the end. ``progress=True`` shows the
    progress of every trial, and with it K, so use it only where everybody may see the data. The time that a search takes is not hidden.

    Args:
        recipe: what to search over; None with ``resume``.
        out: a new or empty folder, or that of the interrupted search.
        settings: the table ``[tune]``, checked; by default the recipe's.
        resume: continue an interrupted search.
        progress: show every trial's progress.
        allow_code: whether a stored recipe which names code as ``module:function`` may run it.
        policy: what is allowed, or its file; by default the one that HUSHGRAD_POLICY names, if any.
        take_over: take the folder from an owner that is gone, where the file system cannot tell.

    **Formal guarantee.** What is in ``out`` afterwards (the winner, its metrics, its score, and which candidate it was; what the
    encoder has learned) is (epsilon, delta)-DP with the epsilon of :func:`priced`, which counts the search. See :class:`Stopping` for
    the theorem. An encoder learns once, before the first trial: all trials share it, and it is charged once beside them.
    """
    out, recipe = Path(out), None if recipe is None else Recipe.given(recipe)
    if resume:
        if not any((out / name).exists() for name in ("search/recipe.json", "tuning.json", SETTLED)):
            _check.fail("--out", str(out), "to hold an interrupted search", "Leave --resume out to start a new one.")
        finish(out)  # what a crash at the very end may have left
    with new_folder(out, take_over=take_over, undo=("search/recipe.json",)) as owner:  # before anything in it is looked at
        recipe, settings = _opened(recipe, settings, out, resume, allow_code)
        folder = out / "search"
        before = LearnedEncoder(recipe, out, home=folder.name)
        data = recipe.make_data(before)
        search = priced(recipe, settings=settings, data=data)
        _require_allowed(search, recipe, policy if isinstance(policy, Policy) else read_policy(policy))
        if not resume:  # whatever is wrong with it was said before anything is written
            _require_feasible(recipe, settings, data)
            folder.mkdir(parents=True, mode=0o700)
            write(folder / "recipe.json", recipe.tables())
        spending = Spending(recipe, search.plan, out, event=search.cost.event)
        key, journal = _key(folder, search, owner)
        spending.begin(key.run_name())
        before.keep(journal)
        journal.bind("data", identity_of(data.train, key.journal))
        best = _best(search, Draws(key.secret), data, folder, progress, journal)
        journal.close()
        run = {"run": key.run_name(), "content": journal.chain.hex()}
        tuned = released(search, best, folder, out, run, journal.notes)
        spending.commit(search.cost.event)
        return tuned


def _best(search: Priced, draws: Draws, data: Data, folder: Path, progress: bool, journal: Journal) -> Result | None:
    results = []
    for trial in range(draws.trials(search.settings.stopping)):
        journal.begin(trial)
        score = _scored(search, draws, data, folder / f"{trial:05d}", trial, progress)
        score = -math.inf if math.isnan(score) else score  # the loss of a diverged model is the worst value
        journal.released(trial, repr(score).encode())  # a trial that was scored before has the same score
        results.append(Result(score, draws.tie(trial), trial))
    return max(results, default=None)


def _scored(search: Priced, draws: Draws, data: Data, folder: Path, trial: int, progress: bool) -> float:
    """The score of one trial, which is trained first if necessary; the score is kept in the trial's folder."""
    known = folder / "score.json"
    if known.exists():
        return float(found(known, lambda content: float(content["score"])))
    settings = search.settings
    recipe = search.trial(draws.candidate(trial, len(search.plans)))
    key: bytes | None = draws.key(trial)
    if recipe.run.seed is not None:  # for experiments: a trial's seed instead of its key, so that its run says so
        recipe, key = replace(recipe, run=replace(recipe.run, seed=draws.seed(trial))), None
    records = None
    if settings.score == "private":
        data, records = held_out(data, settings, draws.scoring(trial))
    if not (folder / "guarantee.json").exists() and not _trained(recipe, folder, progress, key, data):
        folder.mkdir(exist_ok=True)  # what is refused leaves none
        write(known, {"score": -math.inf})
        return -math.inf
    if records is None:
        outcome = outcome_of(folder)
        score = outcome["test_accuracy"] if settings.metric == "accuracy" else -outcome["test_loss"]
    else:
        model = recipe.make_model(data)
        put_weights(model, folder / "model.safetensors")
        score = private_score(model, records, settings, draws.scoring(trial))
    write(known, {"score": score})
    return float(score)


def _trained(recipe: Recipe, folder: Path, progress: bool, key: bytes | None, data: Data) -> bool:
    """Train one trial. A candidate that cannot be trained (a rate below 0, a model that mixes examples) is a lost trial.

    It must not end the search, because that would reveal which trial was drawn.
    """
    resume = (folder / "recipe.json").exists()
    try:
        train(recipe, folder, resume=resume, progress=progress, key=key, data=data, policy=_ANY)
    except (NotIsolated, CaptureError):
        return False
    except (ArgumentError, NoTheorem):
        if resume:
            raise  # it had begun: what is wrong is a file, not the candidate
        return False
    return True


# The folder ---------------------------------------------------------------------------------------------------------------


def _opened(
    recipe: Recipe | None, settings: Settings | None, out: Path, resume: bool, allow_code: bool
) -> tuple[Recipe, Settings]:
    """The recipe and settings of this search; checks that the folder is new or can be resumed."""
    known = out / "search" / "recipe.json"
    if (out / SETTLED).exists():
        _check.fail("--out", str(out), "to hold a search that may go on; this one was settled", "Start a new one elsewhere.")
    if (out / "tuning.json").exists():
        _check.fail("--out", str(out), "to be new; the search in it is complete", "Choose another folder.")
    if resume:
        if not known.exists():
            _check.fail("--out", str(out), "to hold an interrupted search", "Leave --resume out to start a new one.")
        recipe = replace(found(known, Recipe.from_tables), allow_code=allow_code)
        return recipe, settings_of(recipe)
    if recipe is None:
        raise ArgumentError("Expected a recipe with a [tune] table, or --over.")
    if any(path.name != LOCK for path in out.iterdir()):
        _check.fail("--out", str(out), "to be a new or empty folder", "Continue an interrupted search with --resume.")
    settings = settings_of(recipe) if settings is None else settings
    return replace(recipe, tune=_table(settings)), settings


def _require_allowed(search: Priced, recipe: Recipe, rules: Policy | None) -> None:
    """Refuse a search that the policy does not allow, or that costs more than the recipe's own limit: it cannot stop half way."""
    for number, plan in enumerate(search.plans):
        # In a trial it would be a lost one, and the search would end without a winner, paid for.
        require_code_allowed(str(search.trial(number).model["name"]), "model", recipe.allow_code)
        require_allowed(rules, plan, paid=bool(recipe.ledger), guarantee=claim(search))
    limit, price = search.recipe.run.max_epsilon, search.cost.epsilon
    if limit is not None and price > limit:
        remedy = "Allow more, or give [plan] a smaller epsilon."
        _check.fail("max_epsilon", limit, f"to be at least {at_most(price)}, which the whole search costs", remedy)


def _require_feasible(recipe: Recipe, settings: Settings, data: Data) -> None:
    """Require that at least one candidate can be trained; otherwise raise its error now, before all trials are lost and paid for."""
    first: HushgradError | None = None
    for candidate in settings.candidates:
        tried = with_candidate(recipe, candidate)
        try:
            tried.make_optimizer(tried.make_model(data))
            return
        except (ArgumentError, NoTheorem) as error:
            first = first or error
    if first is not None:
        raise first


def _table(settings: Settings) -> dict[str, Any]:
    """The settings as a ``[tune]`` table again."""
    shape = settings.stopping.shape
    return {
        "over": {place: list(values) for place, values in settings.over.items()},
        "mean": settings.stopping.mean,
        "shape": "poisson" if shape == float("inf") else shape,
        **{key: getattr(settings, key) for key in ("score", "metric", "score_noise", "holdout")},
    }


def _key(folder: Path, search: Priced, owner: Owner) -> tuple[RunKey, Journal]:
    """The key and the journal of the search; both are on disk before the first trial, the key last."""
    path, journal, plan = folder / KEY, folder / JOURNAL, search.digest
    if path.exists():
        key = read_key(path, plan=plan)
        if not journal.exists():
            raise ArgumentError(f"Expected the journal beside {KEY}: without it nobody knows what was scored. {WAYS_ON}")
        return key, Journal.open(journal, key, owner)
    shown = [*folder.glob("[0-9]*"), *folder.parent.glob(ENCODER)]  # the key was there before either of them
    if shown or (journal.exists() and journal_history.shown(journal).is_begun):
        raise ArgumentError(f"Expected {KEY}: this search has begun, and without its key it cannot go on. {WAYS_ON}")
    key = RunKey.make(seed=search.recipe.run.seed)
    made = Journal.create(journal, key, owner, {"plan": plan, "run": key.run_name()})
    write_key(path, key, plan=plan)
    return key, made
