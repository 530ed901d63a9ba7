"""A run has an identity: whoever would release a row of its noise again proves that it is the same value, or is refused."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import math
import os
import secrets
import shutil
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hushgrad.clipping.adaptive import Adaptive
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.events import Poisson
from hushgrad.recipes import Recipe, train
from hushgrad.recipes.recipe_file import DEMO
from hushgrad.release.key_reuse import forget
from hushgrad.release.keys import RunKey
from hushgrad.release.owner import Owner
from hushgrad.sampling import Poisson as PoissonSampler
from hushgrad.sampling import data_digest as identities
from hushgrad.sampling.data_digest import identity_of
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.fitting import fit, run_steps
from hushgrad.train.spending import guarantee_of

F = nn.functional
STEPS = 12


def _data(changed=False, seed=5):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 6, generator=g), torch.randint(2, (64,), generator=g)
    if changed:
        x[0] = 9.0
    return TensorDataset(x, y)


PLANS = {
    "dpsgd": lambda: Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=16, dataset_size=64, steps=STEPS),
    "dpftrl": lambda: Plan.dpftrl(noise_multiplier=1.0, delta=1e-5, batch_size=16, dataset_size=64, epochs=3),
}


class Process:
    """One life of a run in ``folder``: begun, taken to a step, abandoned as a kill would leave it. Records all releases."""

    def __init__(self, folder, plan="dpsgd", *, start=None, lr=0.1, key=None):
        torch.seed() if start is None else torch.manual_seed(start)
        self.model = nn.Linear(6, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.private = make_private(self.model, self.optimizer, PLANS[plan](), key=key)
        self.checkpoint = None if folder is None else Checkpoint(folder, self.private)
        self.lr, self.released = lr, {}

    def to(self, step, data=None, *, save_at=(), **options):
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

        def look(metrics):
            self.released[metrics["step"]] = torch.cat([p.detach().flatten().clone() for p in self.model.parameters()])
            if metrics["step"] in save_at:
                self.checkpoint.save()
            if metrics["step"] == step:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            run_steps(self.private, F.cross_entropy, _data() if data is None else data, callbacks=[look], **options)
        return self


def _same(a, b):
    common = a.released.keys() & b.released.keys()
    return all(torch.equal(a.released[step], b.released[step]) for step in common)


def test_killed_before_its_first_save_a_run_starts_again_from_the_same_weights(tmp_path):
    first = Process(tmp_path).to(3)
    second = Process(tmp_path).to(5)  # another initialisation, which is not used
    assert second.checkpoint.resumed and second.private.key.fingerprint == first.private.key.fingerprint
    assert _same(first, second) and len(second.released) == 5


@pytest.mark.parametrize("lost", ["state.safetensors", "journal", "key.json"])
@pytest.mark.parametrize("saved", [(), (2,)])
def test_a_lost_file_is_refused(tmp_path, lost, saved):
    Process(tmp_path).to(3, save_at=saved)
    os.unlink(tmp_path / lost)
    with pytest.raises(ArgumentError, match=r"prior="):
        Process(tmp_path)


FILES = ("state.safetensors", "journal", "key.json")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.usefixtures("on_another_machine")
def test_lost_old_and_copied_files_in_every_combination(tmp_path, plan):
    """3 files, each as it is, lost, as it was earlier, or another run's: a refusal, or the same releases."""
    torch.manual_seed(0)
    life = Process(tmp_path / "run", plan).to(4, save_at=(2,))
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    life.private.detach()
    life = Process(tmp_path / "run", plan).to(9, save_at=(6,))
    Process(tmp_path / "other", plan).to(9, save_at=(6,))
    went_on = 0
    for number, choice in enumerate(itertools.product(("run", "old", "other", None), repeat=3)):
        folder = tmp_path / f"mix{number}"
        folder.mkdir()
        for name, source in zip(FILES, choice, strict=True):
            if source is not None:
                shutil.copy2(tmp_path / source / name, folder / name)
        try:
            again = Process(folder, plan).to(9)
        except HushgradError:
            continue
        went_on += 1
        own = choice.count("other") + choice.count(None) == 0
        assert not own or _same(life, again), choice
        assert own or choice in {("other",) * 3, (None,) * 3}, choice  # another whole run, or an empty folder
    assert went_on >= 4


def _keeps_attributes(folder):
    try:
        os.setxattr(folder, "user.test", b"1")
    except (OSError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("saved", [2, 4])
def test_a_folder_written_over_in_place_by_an_older_one_is_refused(tmp_path, saved):
    """The files keep their numbers and births, so nothing in them tells; the folder knows how long its journal was."""
    if not _keeps_attributes(tmp_path):
        pytest.skip("the disk keeps no attributes")
    (run := Process(tmp_path / "run").to(4, save_at=(saved,))).private.detach()
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    Process(tmp_path / "run").to(6).private.detach()  # as it was, it goes on
    for name in FILES:
        shutil.copyfile(tmp_path / "old" / name, tmp_path / "run" / name)
    shutil.rmtree(tmp_path / "old")
    with pytest.raises(ArgumentError, match=r"an older one was put in its place.*prior="):
        Process(tmp_path / "run", lr=0.5)
    assert len(run.released) == 4


def test_a_changed_record_is_refused(tmp_path):
    Process(tmp_path).to(3, save_at=(2,))
    with pytest.raises(ArgumentError, match=r"data of this run.*prior="):
        Process(tmp_path).to(5, data=_data(changed=True))


class Lazily(Dataset):
    """Shows no content before it is asked: a server has it, here this module."""

    def __init__(self, changed):
        SERVER.data, self.name = _data(changed), "wards"

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return SERVER.data[i]


SERVER = types.SimpleNamespace()  # a connection: nobody can look behind it


def test_a_changed_record_behind_files_is_stopped_before_anything_is_released(tmp_path):
    """Nobody can see it before it is read; the step that repeats comes out differently, and is not released."""
    key = bytes(range(32))  # under which record 0 takes part in a step that is repeated
    first = Process(tmp_path, key=key).to(8, data=Lazily(False), save_at=(1,))
    assert first.private.attendance_state()["count"][0] > 0 and first.private.attendance_state()["last"][0] > 1
    second = Process(tmp_path)
    with pytest.raises(ArgumentError, match="came out differently"):
        second.to(8, data=Lazily(True))
    assert _same(first, second)
    third = Process(tmp_path).to(8, data=Lazily(False))
    assert _same(first, third) and "Unseen data" in str(third.private.spent())


class Store:
    """Neither a data set nor a container."""

    def __init__(self, x):
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def _in_frame(x):
    return pytest.importorskip("pandas").DataFrame(x)


HOLDERS = {
    "a plain object": Store,
    "slots": Slotted,
    "objects in a list": lambda x: [Store(float(v)) for v in x.flatten()],
    "a closure": lambda x: lambda i: x[i],
    "a partial": lambda x: functools.partial(np.take, x),
    "a bound method": lambda x: Store(x).__eq__,
    "a set": lambda x: {(i, float(v)) for i, v in enumerate(x.flatten())},
    "a deque": lambda x: collections.deque(x.flatten().tolist()),
    "a data frame": _in_frame,
    "a ring": lambda x: _ring(x),
}


def _ring(x):
    a = Store(x)
    a.self, a.other = a, [a]
    return a


class Held(Dataset):
    def __init__(self, inside):
        self.name, self.inside = "patients", inside

    def __len__(self):
        return 8

    def __getitem__(self, i):
        raise NotImplementedError


@pytest.mark.parametrize("holder", HOLDERS)
def test_the_identity_follows_whatever_holds_the_records(holder):
    x = np.arange(8.0).reshape(4, 2)
    other = x.copy()
    other[3, 1] = 7.5
    first, same, changed = (identity_of(Held(HOLDERS[holder](a.copy())), b"k") for a in (x, x, other))
    assert first == same != changed and first["seen"]


@pytest.mark.parametrize("kind", [str, Path, lambda p: [(str(p), 1)], lambda p: {"train": [str(p)]}, lambda p: Store(str(p))])
@pytest.mark.parametrize("cheap", [True, False])
def test_the_identity_follows_named_files(tmp_path, kind, cheap, monkeypatch):
    if not cheap:
        monkeypatch.setattr(identities, "_READ", 3)
    file = tmp_path / "records"
    file.write_bytes(b"abcdefgh")
    first = identity_of(Held(kind(file)), b"k")
    if cheap:
        os.utime(file, (1, 1))  # of what is read, the time does not matter: data may be copied
    assert first["seen"] and identity_of(Held(kind(file)), b"k") == first
    file.write_bytes(b"abcdefgx")
    os.utime(file, (2, 2))
    assert identity_of(Held(kind(file)), b"k") != first


@pytest.mark.parametrize(
    "inside", [None, 3, "wards", (3,), threading.Lock(), (i for i in range(3)), [threading.Lock()], os.curdir]
)
def test_what_cannot_be_looked_into_is_called_unseen(inside):
    assert not identity_of(Held(inside), b"k")["seen"]


def test_sets_have_no_order(tmp_path):
    """Texts in a set come in another order in every process. Here: two that want one place, in the order in which they came to it."""
    pairs = (({a, b}, {b, a}) for a, b in itertools.combinations(map(str, range(100)), 2))
    one, other = next(pair for pair in pairs if [*pair[0]] != [*pair[1]])
    assert identity_of(one, b"k")["seen"] and identity_of(one, b"k") == identity_of(other, b"k")


WIDE = 20_000  # columns: a change of one of them is one number in many


class Sparse(Dataset):
    """One-hot records behind a function of this module, so that nobody sees them before they are read."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.zeros(WIDE)
        x[SERVER.column if i == 3 else 100 + i] = 5.0
        return x, i % 2


SERVER.column = 5000


@pytest.mark.parametrize("column", [5001, 7000, 19_999])
def test_a_sparse_record_of_the_same_norm_is_stopped(tmp_path, column, monkeypatch):
    """The record moves to another column: every norm stays, and four of 40,000 released numbers are others."""

    def life():
        model = nn.Linear(WIDE, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=63, dataset_size=64, steps=4)
        private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan)
        Checkpoint(tmp_path, private)
        run_steps(private, F.cross_entropy, Sparse())
        return private

    first = life()
    assert first.attendance_state()["count"][3] > 0
    first.detach()
    monkeypatch.setattr(SERVER, "column", column)
    with pytest.raises(ArgumentError, match="came out differently"):
        life()


def test_a_refused_repetition_has_moved_nothing(tmp_path):
    """The clip norm, the book of who took part and the folder are as before, also when the refused run is saved."""
    clip = Adaptive(1.5, batch_size=16)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=16, dataset_size=64, steps=6, clip=clip)

    def life(scale, until):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.5), plan)
        checkpoint, data = Checkpoint(tmp_path, private), _data()
        for x, y in private.loader(data):
            F.cross_entropy(model(scale * x), y).backward()
            private.optimizer.step()
            if private.steps == until:
                break
        return private, checkpoint

    first, _ = life(1.0, 1)
    first.detach()
    seen = []
    real = Checkpoint.__init__

    def kept(self, directory, private, **options):
        real(self, directory, private, **options)
        seen.append((private, self))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ArgumentError, match="came out differently"):
        patch.setattr(Checkpoint, "__init__", kept)
        life(0.01, 1)
    refused, checkpoint = seen[0]
    assert refused.steps == 0 and refused.clip == clip and refused.attendance_state()["total"] == 0
    checkpoint.save()
    refused.detach()
    again, _ = life(1.0, 3)
    assert again.steps == 3 and again.clip != clip


def test_a_named_data_set_keeps_its_name(tmp_path):
    Process(tmp_path).to(3, data=Lazily(False), save_at=(2,), identity="wards, version 3")
    with pytest.raises(ArgumentError, match="data of this run"):
        Process(tmp_path).to(5, data=Lazily(False), identity="wards, version 4")
    again = Process(tmp_path).to(5, data=Lazily(False), identity="wards, version 3")
    assert "Unseen" not in str(again.private.spent())


@pytest.mark.parametrize("plan", PLANS)
def test_another_learning_rate_in_a_repeated_step_is_stopped(tmp_path, plan):
    first = Process(tmp_path, plan, lr=0.1).to(7, save_at=(3,))
    second = Process(tmp_path, plan, lr=0.5)
    with pytest.raises(ArgumentError, match="came out differently"):
        second.to(7)
    # Step 4 is the very same gradient; only the learning rate, which is no release, moved the weights elsewhere.
    assert set(second.released) <= {4} and len(first.released) == 7


def test_another_optimizer_is_refused(tmp_path):
    Process(tmp_path).to(5, save_at=(5,))
    model = nn.Linear(6, 2)
    with pytest.raises(ArgumentError, match="to be the interrupted run's, SGD"):
        Checkpoint(tmp_path, make_private(model, torch.optim.Adam(model.parameters()), PLANS["dpsgd"]()))


def test_beyond_what_was_released_a_learning_rate_may_change(tmp_path):
    Process(tmp_path, lr=0.1).to(3, save_at=(3,))
    assert Process(tmp_path, lr=0.5).to(STEPS).private.steps == STEPS


class Augmented(Dataset):
    """Noise of three kinds on every example."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        import random

        x, y = self.data[i]
        return x + torch.randn(6) + float(np.random.rand()) + random.random(), y


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_is_the_same_after_a_restart(tmp_path, workers):
    first = Process(tmp_path).to(6, data=Augmented(_data()), save_at=(3,), num_workers=workers)
    torch.rand(100)
    second = Process(tmp_path).to(8, data=Augmented(_data()), num_workers=2 - workers)
    assert _same(first, second) and second.private.steps == 8


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.usefixtures("on_another_machine")
def test_a_copied_folder_continued_twice_costs_infinity(tmp_path, plan):
    Process(tmp_path / "a", plan, start=0).to(5, save_at=(5,))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a = Process(tmp_path / "a", plan, lr=0.1).to(STEPS).private
    forget()  # on another machine
    b = Process(tmp_path / "b", plan, lr=0.5).to(STEPS).private
    total = guarantee_of(a.ledger + b.ledger, a.plan)
    assert math.isfinite(a.spent().epsilon) and math.isfinite(b.spent().epsilon) and math.isinf(total.epsilon)
    assert "two ways" in str(total)


def test_a_run_has_one_folder(tmp_path):
    first = Process(tmp_path / "a")
    with pytest.raises(ArgumentError, match="One run, one folder"):
        Checkpoint(tmp_path / "b", first.private)
    assert not (tmp_path / "b" / "key.json").exists()
    first.to(3, save_at=(2,))
    assert _same(first, Process(tmp_path / "a").to(4))


def test_one_key_twice_in_one_process(tmp_path):
    key = bytes(range(32))
    first = Process(None, key=key).to(STEPS).private
    model = nn.Linear(6, 2)
    with pytest.raises(ArgumentError, match="fresh"):
        make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), first.plan, key=key, prior=first.ledger)
    second = Process(None, key=key).to(STEPS).private
    assert math.isinf(guarantee_of(first.ledger + second.ledger, first.plan).epsilon)


@pytest.mark.parametrize("way", ["bytes", "key", "state", "folder"])
@pytest.mark.parametrize("seed", range(2))
def test_a_second_run_under_one_key_repeats_the_first_or_both_are_infinite(tmp_path, way, seed):
    """One key for two models: seen in the process, wherever they begin to differ."""
    plan = list(PLANS)[seed]
    first = Process(None, plan, start=seed, key=np.random.default_rng(seed).bytes(32))
    state = first.private.state_dict(with_key=True)
    first.to(STEPS)

    def second(start=seed):
        key = {"key": first.private.key, "state": None}.get(way, first.private.key.secret)
        found = Process(tmp_path / secrets.token_hex(4) if way == "folder" else None, plan, start=start, key=key)
        if way == "state":
            found.private.load_state_dict(state)
            assert "vouched for" in str(found.private.spent().notes)
        return found

    def seen(run):
        spent = run.private.spent()
        assert math.isinf(spent.epsilon) == math.isinf(guarantee_of(run.private.ledger, run.private.plan).epsilon)
        assert math.isinf(spent.epsilon) == ("another run of this process" in str(spent))
        return math.isinf(spent.epsilon)

    same = second().to(STEPS)
    assert _same(first, same) and not seen(first) and not seen(same)
    changed = int(np.random.default_rng(seed).integers(1, STEPS - 1))
    other = second().to(changed)
    other.lr = 0.5  # the next release is the same, and the one behind it another
    assert not seen(other.to(changed + 1)) and seen(other.to(changed + 2)) and seen(first) and seen(same)
    forget()  # a later life has not seen the other run, and knows of it
    assert seen(first)
    if way == "folder":
        assert seen(Process(other.checkpoint.directory, plan))
    assert math.isinf(guarantee_of(first.private.ledger + other.private.ledger, first.private.plan).epsilon)


class Ordered(Dataset):
    def __init__(self, order):
        self.order, self.data = order, _data()

    def __len__(self):
        return len(self.order)

    def __getitem__(self, i):
        return self.data[int(self.order[i])]


@pytest.mark.parametrize(
    "other", [lambda: Ordered(torch.arange(64).flip(0)), lambda: _data(seed=6), lambda: Ordered(torch.arange(40))]
)
def test_another_data_set_in_mid_run_is_refused(other):
    run = Process(None, "dpftrl").to(3, data=Ordered(torch.arange(64)))
    with pytest.raises(ArgumentError, match="first loader"):
        run.to(6, data=other())
    assert run.to(6, data=Ordered(torch.arange(64))).private.steps == 6  # an equal one may take its place


def test_two_owners(tmp_path):
    """Within a process the newer one takes over, and the older one is stopped before it releases anything."""
    first = Process(tmp_path).to(2)
    second = Process(tmp_path)
    with pytest.raises(ArgumentError, match="taken it over"):
        first.to(4)
    assert first.private.steps == 2 and second.to(4).private.steps == 4
    with pytest.raises(ArgumentError, match="taken it over"):
        first.checkpoint.save()


def test_a_demo_that_runs_is_not_removed_by_a_second_one(tmp_path):
    """The folder is owned before anything in it is looked at."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "recipe.json").write_text(json.dumps(Recipe.from_tables(DEMO).tables()))
    (tmp_path / "checkpoint" / "key.json").write_text("the first one's")
    first = Owner(tmp_path)
    with pytest.raises(ArgumentError, match="no other owner"):
        train(None, tmp_path, progress=False)
    assert (tmp_path / "checkpoint" / "key.json").exists() and first.held


def test_a_rate_that_was_not_the_promised_one_ends_in_an_infinite_epsilon(monkeypatch):
    """The loader's book is closed with the run, and held against the plan."""
    monkeypatch.setattr(PoissonSampler, "participation", lambda self: Poisson(0.02))
    run = Process(None).to(STEPS - 1)
    assert math.isfinite(run.private.spent().epsilon)  # nothing is said before the end
    run.to(STEPS)
    assert math.isinf(run.private.spent().epsilon) and "participations in 12 steps" in str(run.private.spent())


# Lazy tables ---------------------------------------------------------------------------------------------------------------


class Words:
    """A run with a lazy table, in a folder; evaluations and savings at the given steps."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.private = make_private(self.model, self.optimizer, PLANS["dpsgd"](), lazy_tables=True)
        self.checkpoint = Checkpoint(folder, self.private)
        g = torch.Generator().manual_seed(1)
        self.data = TensorDataset(torch.randint(50, (64, 3), generator=g), torch.randint(2, (64,), generator=g))
        self.seen = {}

    def to(self, step, *, evaluate=(), save=(), dies_saving=()):
        def look(metrics):
            now = metrics["step"]
            if now in evaluate:
                with torch.no_grad():
                    self.seen[now] = self.model(torch.arange(40).view(-1, 2)).clone()
            if now in save:
                self.checkpoint.save()
            if now in dies_saving:
                self.model.state_dict()  # all that a saving does before it writes
            if now == step:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            run_steps(self.private, F.cross_entropy, self.data, callbacks=[look])
        return self


@pytest.mark.parametrize("repeated", [(), (5,)])
def test_lazy_tables_are_read_again_where_they_were_read(tmp_path, repeated):
    """What the first life read at step 5 and in a saving that died at step 6 is settled there by the second one, too."""
    first = Words(tmp_path).to(8, save=(3,), evaluate=(5,), dies_saving=(6,))
    second = Words(tmp_path).to(STEPS, evaluate=repeated)
    assert second.private.steps == STEPS
    assert all(torch.equal(first.seen[step], second.seen[step]) for step in repeated)


def test_lazy_tables_read_at_another_time_are_stopped(tmp_path):
    Words(tmp_path).to(8, save=(3,), evaluate=(5,))
    second = Words(tmp_path)
    with pytest.raises(ArgumentError, match="came out differently"):
        second.to(8, evaluate=(4,))
    second.private.detach()
    assert second.seen == {} and torch.isnan(second.model[0].weight).any()  # without its noise nobody reads it


def test_a_state_dict_of_a_lazy_table_is_a_copy(tmp_path):
    run = Words(tmp_path).to(1)
    state = run.model.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items() if name.startswith("0.")}
    run.to(3)
    assert all(torch.equal(kept[name], state[name]) for name in kept)


# Integrations ---------------------------------------------------------------------------------------------------------------


def test_fit_goes_on_and_erases(tmp_path):
    def fitted(folder, stop):
        torch.seed()
        model = nn.Linear(6, 2)
        seen = []

        def look(metrics):
            seen.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
            if metrics["step"] == stop:
                raise KeyboardInterrupt

        optimizer, options = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"checkpoint": folder, "save_every": 3, "progress": False},
        )
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, F.cross_entropy, optimizer, _data(), PLANS["dpsgd"](), callbacks=[look], **options)
        return seen

    first, second = fitted(tmp_path / "run", 5), fitted(tmp_path / "run", None)
    assert len(second) == STEPS - 3 and all(torch.equal(a, b) for a, b in zip(first[3:], second, strict=False))
    assert list((tmp_path / "run").iterdir()) == []


def test_one_key_for_two_fits_gives_two_noises():
    """No ledger of a fit ever meets another's, so nobody could see that two of them shared their noise: they never do."""
    key = bytes(range(7, 39))

    def fitted(**options):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        spent = fit(model, F.cross_entropy, optimizer, _data(), PLANS["dpsgd"](), progress=False, **options)
        return spent, model.weight.detach()

    (first, a), (second, b) = fitted(key=key), fitted(key=key)
    assert first.epsilon == second.epsilon < math.inf and not torch.equal(a, b)
    assert torch.equal(fitted(seed=1)[1], fitted(seed=1)[1])
    made = {RunKey.mixed(key).fingerprint for _ in range(3)} | {RunKey.mixed(bytes(32)).fingerprint, RunKey(key).fingerprint}
    assert len(made) == 5


def test_lightning_killed_before_its_first_save(tmp_path):
    lightning = pytest.importorskip("lightning")
    from hushgrad.integrations.lightning import PrivateFit

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.released = nn.Linear(6, 2), []

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self(x), y)

        def on_train_batch_end(self, *_):
            self.released.append(self.layer.weight.detach().clone())
            if len(self.released) == 3:
                raise KeyError("killed")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    lives = []
    for _ in range(2):
        torch.seed()
        module, private = Module(), PrivateFit(PLANS["dpsgd"](), _data(), checkpoint=tmp_path / "run")
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        with contextlib.suppress(KeyError):
            lightning.Trainer(max_epochs=1, callbacks=[private], accelerator="cpu", **quiet).fit(module, private.loader)
        lives.append(module.released)
    assert len(lives[0]) == 3 and all(torch.equal(a, b) for a, b in zip(*lives, strict=True))
