"""Two neighbouring files, read as a recipe reads them: what is trained on, and what is learned first, differs by one unit at most."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import hushgrad
from hushgrad.clipping.certificate import KAPPA
from hushgrad.errors import ArgumentError
from hushgrad.estimators import quantile
from hushgrad.events import Gaussian
from hushgrad.noise.secure import grid
from hushgrad.recipes import Recipe, train
from hushgrad.recipes.column import Number
from hushgrad.recipes.columns import Columns
from hushgrad.recipes.encoders import TableEncoder
from hushgrad.recipes.image_features import ImageFeatures
from hushgrad.recipes.images import ImageEncoder, _named
from hushgrad.recipes.learned_encoder import LearnedEncoder
from hushgrad.recipes.learning import learn
from hushgrad.recipes.text_features import TextFeatures
from hushgrad.sampling import Units

RNG = np.random.default_rng(27)
WORDS = [f"{'hi' * int(RNG.integers(1, 4))} {RNG.integers(30)}" for _ in range(120)]  # some are there more than once
LABELS = [str(label) for label in RNG.choice(["no", "yes"], 120)]
PLAN = {"delta": 1e-5, "noise_multiplier": 1.0, "batch_size": 4, "dataset_size": 100, "steps": 2}


def _table(folder, kept, word="text"):
    rows = [f"{i % 7},{WORDS[i]},{LABELS[i]}" for i in kept]
    (folder / "t.csv").write_text(f"a,{word},y\n" + "\n".join(rows) + "\n")
    return {"path": str(folder / "t.csv"), "label": "y", "classes": ["no", "yes"]}


def _csv(folder, kept):
    return {"name": "csv", **_table(folder, kept)}


def _users(folder, kept):
    return {"name": "csv", **_table(folder, kept), "user": "text"}


def _encoded(folder, kept):
    return {**_lines(folder, kept), "name": "encoded", "encoder": TextFeatures(buckets=8).to_json()}


def _lines(folder, kept):
    (folder / "t.tsv").write_text("".join(f"{LABELS[i]}\t{WORDS[i]}\n" for i in kept))
    return {"name": "labelled-text", "path": str(folder / "t.tsv"), "classes": ["no", "yes"]}


def _text_files(folder, kept):
    for i in kept:
        (folder / LABELS[i]).mkdir(exist_ok=True)
        (folder / LABELS[i] / f"{i}.txt").write_text(WORDS[i])
    return {"name": "text-files", "path": str(folder), "classes": ["no", "yes"]}


def _pictures(folder, kept):
    for i in kept:
        (folder / LABELS[i]).mkdir(exist_ok=True)
        Image.new("L", (4, 4), i).save(folder / LABELS[i] / f"{i}.png")
    return {"name": "images", "path": str(folder), "classes": ["no", "yes"], "height": 4, "width": 4, "channels": 1}


def _arrays(folder, kept):
    images = np.stack([np.full((4, 4), i // 2) for i in kept])
    np.savez(folder / "t.npz", inputs=images, labels=np.array([LABELS[i] for i in kept]))
    encoder = ImageEncoder(channels=1, height=4, width=4).to_json()
    return {"name": "encoded", "path": str(folder / "t.npz"), "classes": ["no", "yes"], "encoder": encoder}


def _windows(folder, kept):
    (folder / "t.txt").write_bytes(b"".join(f"{i:04d}".encode() for i in kept))
    return {"name": "text", "path": str(folder / "t.txt"), "length": 3}


KINDS = [_csv, _encoded, _lines, _text_files, _pictures, _arrays, _windows]


def _sides(folder, kind, kept, **plan):
    folder.mkdir()
    recipe = Recipe.from_tables({"model": {"name": "linear"}, "data": kind(folder, kept), "plan": {**PLAN, **plan}})
    data = recipe.make_data()
    return [
        Counter((tuple(x.flatten().tolist()), tuple(y.flatten().tolist())) for x, y in zip(*part.tensors, strict=True))
        for part in (data.train, data.test)
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("left", [0, 57, 119])
def test_one_record_less_is_one_record_less_on_its_own_side(tmp_path, kind, left):
    everyone = list(range(120))
    whole = _sides(tmp_path / "a", kind, everyone)
    without = _sides(tmp_path / "b", kind, [i for i in everyone if i != left])
    lost = [sum((one - other).values()) for one, other in zip(whole, without, strict=True)]
    assert sorted(lost) == [0, 1]
    assert [sum((other - one).values()) for one, other in zip(whole, without, strict=True)] == [0, 0]
    assert 5 < sum(whole[1].values()) < 40


@pytest.mark.parametrize("kind", [_csv, _lines, _arrays], ids=lambda kind: kind.__name__)
def test_the_order_of_a_file_does_not_matter(tmp_path, kind):
    assert _sides(tmp_path / "a", kind, range(120)) == _sides(tmp_path / "b", kind, range(119, -1, -1))


def test_a_record_keeps_its_place_where_neighbours_have_as_many(tmp_path):
    plan = {"method": "dpsgd", "relation": "replace_one", "sampling": "fixed_size"}
    whole = _sides(tmp_path / "a", _lines, range(120), **plan)
    for replaced in range(0, 119, 7):
        kept = [119 if i == replaced else i for i in range(120)]
        other = _sides(tmp_path / f"b{replaced}", _lines, kept, **plan)
        changed = [sum((one - two).values()) for one, two in zip(whole, other, strict=True)]
        assert sum(changed) <= 1
        assert [sum(part.values()) for part in other] == [96, 24]


@pytest.mark.parametrize("kind", [_text_files, _pictures], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("replaced", [0, 57, 119])
def test_a_file_that_is_replaced_by_one_of_another_class_moves_no_other(tmp_path, monkeypatch, kind, replaced):
    plan = {"relation": "replace_one", "sampling": "fixed_size"}
    whole = _sides(tmp_path / "a", kind, range(120), **plan)
    other_label = {"no": "yes", "yes": "no"}[LABELS[replaced]]
    monkeypatch.setitem(globals(), "LABELS", [*LABELS[:replaced], other_label, *LABELS[replaced + 1 :]])
    other = _sides(tmp_path / "b", kind, range(120), **plan)
    assert sorted(sum((one - two).values()) for one, two in zip(whole, other, strict=True)) == [0, 1]
    assert [sum(part.values()) for part in other] == [sum(part.values()) for part in whole]


@pytest.mark.parametrize("kind", [_text_files, _pictures], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tested", [False, True], ids=["split off", "all"])
def test_a_file_that_is_replaced_leaves_every_other_in_its_place(tmp_path, monkeypatch, kind, tested):
    """A sampler that deals records by their places would deal all those between to other steps."""

    def read(folder):
        folder.mkdir()
        table = kind(folder, range(120)) | ({"test_path": str(folder)} if tested else {})
        tables = {
            "model": {"name": "linear"},
            "data": table,
            "plan": {**PLAN, "relation": "replace_one", "sampling": "fixed_size"},
        }
        return Recipe.from_tables(tables).make_data().train.tensors

    whole = read(tmp_path / "a")
    for replaced in (0, 57, 119):
        other_label = {"no": "yes", "yes": "no"}[LABELS[replaced]]
        with monkeypatch.context() as patched:
            patched.setitem(globals(), "LABELS", [*LABELS[:replaced], other_label, *LABELS[replaced + 1 :]])
            other = read(tmp_path / f"b{replaced}")
        moved = (whole[0] != other[0]).flatten(1).any(dim=1)
        assert int(moved.sum()) == 0
        assert int((whole[1] != other[1]).sum()) <= 1


def test_all_records_of_a_user_lie_on_one_side(tmp_path):
    recipe = Recipe.from_tables({"model": {"name": "linear"}, "data": _users(tmp_path, range(120)), "plan": PLAN})
    data = recipe.make_data()
    owners = Counter(WORDS)
    assert max(owners.values()) > 1
    assert all(Counter(data.groups)[owner] == owners[owner] for owner in data.groups)
    assert 0 < len(data.test) < 60


@pytest.mark.parametrize("key", ["placed", "learn"])
def test_what_follows_from_the_plan_is_no_key_of_the_data(tmp_path, key):
    table = {**_lines(tmp_path, range(120)), key: True}
    with pytest.raises(ArgumentError, match=f"Expected '{key}' not to be a key"):
        Recipe.from_tables({"model": {"name": "linear"}, "data": table, "plan": PLAN}).make_data()


# What is learned first ----------------------------------------------------------------------------------------------------------------


def _waiting():
    return Columns(columns=(Number(name="a", low=0, high=64, learn=True), Number(name="b", low=0, high=9, learn=True)))


def _maps():
    return ImageFeatures(images=ImageEncoder(channels=1, height=8, width=8))


def _sum_of(encode, rows, owners):
    found = {}

    class Spy(type(encode)):
        def learned(self, noisy, records):
            found["noisy"] = noisy
            return super().learned(noisy, records)

    spy = Spy(**{name: getattr(encode, name) for name in encode.__dataclass_fields__})
    prepared = spy.prepared(rows)
    learn(spy, prepared, np.arange(len(rows)), records=10, secret=bytes(16), owners=owners)
    return found["noisy"]


@pytest.mark.parametrize(
    ("encode", "rows"),
    [
        (_waiting(), [(str(i % 64), str(i % 9)) for i in range(60)] + [("63", "8")] * 200),
        (_maps(), np.concatenate([RNG.integers(0, 255, (20, 8, 8)), np.full((50, 8, 8), 7) * (np.arange(8) % 2)])),
        (TextFeatures(buckets=8, noise_multiplier=30.0), [f"{word} {i}" for i, word in enumerate(WORDS[:60])] + ["WIN 1!"] * 200),
    ],
    ids=["cut points", "mean", "looks"],
)
def test_a_user_moves_what_is_learned_by_one_at_most_however_many_records_there_are(encode, rows):
    others = 20 if isinstance(encode, ImageFeatures) else 60
    owners = [f"u{i // 3}" for i in range(others)] + ["rich"] * (len(rows) - others)
    moved = _sum_of(encode, rows, owners) - _sum_of(encode, rows[:others], owners[:others])
    assert 0.5 < float(moved.norm()) <= 1 + 1e-9
    alone = _sum_of(encode, rows, None) - _sum_of(encode, rows[:others], None)
    assert float(alone.norm()) > 30  # what the same records may move where each is protected alone


@pytest.mark.parametrize("saved", [False, True])
def test_a_mean_is_divided_by_the_number_that_is_public(tmp_path, saved):
    plan = hushgrad.Plan.dpsgd(**PLAN, before=Gaussian(30.0))
    table = {"saved": plan.to_json(), "noise_multiplier": 1.0, "delta": 1e-5} if saved else PLAN
    recipe = Recipe.from_tables({"model": {"name": "linear"}, "data": {"name": "encoded"}, "plan": table, "run": {"seed": 1}})
    images = RNG.integers(0, 255, (20, 8, 8))
    encode = _maps()
    found = LearnedEncoder(recipe, tmp_path, None)(encode, encode.prepared(images), np.arange(20), None)
    expected = learn(encode, encode.prepared(images), np.arange(20), records=100, secret=b"seed 1".ljust(16))
    assert found.mean == expected.mean


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("promise", ["certified", "secure"])
def test_what_is_learned_first_keeps_what_the_plan_promises_of_its_sums(tmp_path, monkeypatch, saved, promise):
    found = {}

    def learned(self, noisy, records):
        found["noisy"] = noisy.clone()
        return self

    monkeypatch.setattr(TextFeatures, "learned", learned)
    encode = TextFeatures(buckets=8, noise_multiplier=30.0)
    prepared, chosen = encode.prepared(WORDS), np.arange(120)
    total = encode.statistic(prepared, chosen, np.ones(120))
    released = {}
    for words in ({}, {promise: True}):
        plan = hushgrad.Plan.dpsgd(**PLAN, **words, before=Gaussian(30.0))
        table = {"saved": plan.to_json(), "noise_multiplier": 1.0, "delta": 1e-5} if saved else {**PLAN, **words}
        tables = {"model": {"name": "linear"}, "data": {"name": "encoded"}, "plan": table, "run": {"seed": 1}}
        LearnedEncoder(Recipe.from_tables(tables), tmp_path, None)(encode, prepared, chosen, None)
        released[bool(words)] = found["noisy"]
    if promise == "secure":
        steps = released[True] / grid(30.0 * (1 + KAPPA))
        assert bool((steps == steps.round()).all())
    else:  # rounding in the sum is covered by as much more noise as a certified step's
        more = (released[True] - total) / (released[False] - total)
        assert bool(((more - (1 + KAPPA)).abs() < 1e-9).all())


def test_what_is_released_before_the_run_follows_from_the_encoder_alone(tmp_path):
    encoder = TextFeatures(buckets=8, noise_multiplier=30.0).to_json()
    plan = {**PLAN, "before": Gaussian(0.5).to_json()}
    tables = {"model": {"name": "linear"}, "data": {**_encoded(tmp_path, range(120)), "encoder": encoder}, "plan": plan}
    recipe = Recipe.from_tables(tables)
    with pytest.raises(ArgumentError, match=r"Expected 'before' to be a key of \[plan\]"):
        recipe.make_plan(recipe.make_data(LearnedEncoder(recipe, tmp_path, None)))


def test_a_run_whose_own_limit_the_first_release_exceeds_releases_nothing(tmp_path):
    encoder = TextFeatures(buckets=8, noise_multiplier=1.0).to_json()
    tables = {"model": {"name": "linear"}, "data": {**_encoded(tmp_path, range(120)), "encoder": encoder}, "plan": PLAN}
    recipe = Recipe.from_tables({**tables, "run": {"max_epsilon": 0.5}})
    with pytest.raises(
        ArgumentError, match=r"Expected max_epsilon=0\.5 to be more than 4\.378, .* noise_multiplier of \[data\] encoder"
    ):
        train(recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


# What is refused ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refused",
    [
        lambda folder: TableEncoder(columns=("a", "b"))([("1", "secret", "x")]),
        lambda folder: _waiting().prepared([("1", "2"), ("secret",)]),
        lambda folder: _sides(folder / "a", lambda f, _: {**_csv(f, range(9)), "label": "text"}, None),
        lambda folder: _maps().prepared([np.zeros((8, 8)), np.full((8, 8), 20052005.0 * 2**40)]),
        lambda folder: _named(np.array([1, 0, 99]), ["no", "yes"]),
        lambda folder: quantile([1.0, 20052005.0, float("nan")], epsilon=1.0, bounds=(0, 10)),
        lambda folder: Units(["secret", "other"], examples=3),
        lambda folder: _private().loader(TensorDataset(torch.zeros(2, 2)), groups=["secret", "other"]),
    ],
    ids=["a row", "a row of columns", "a label", "a pixel", "a number of a class", "a value", "owners", "owners of no user"],
)
def test_an_error_about_a_record_says_where_it_is_and_not_what_it_holds(tmp_path, refused):
    with pytest.raises(ArgumentError) as told:
        refused(tmp_path)
    assert not any(word in str(told.value) for word in ("secret", "other", "20052005", "e+", "99", *WORDS[:9])), told.value


def _private():
    model = nn.Linear(2, 2)
    return hushgrad.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), hushgrad.Plan.dpsgd(**PLAN), seed=0)
