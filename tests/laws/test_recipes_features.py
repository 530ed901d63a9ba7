"""Encoders of tables and texts: rows of length 1, one by one, from declared facts; what is learned costs what it says."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hushgrad
from hushgrad.errors import ArgumentError
from hushgrad.events import Gaussian
from hushgrad.recipes import Recipe, image_features
from hushgrad.recipes.column import Category, Number, columns_of
from hushgrad.recipes.columns import Columns
from hushgrad.recipes.encoders import ByteEncoder, Encoder, TableEncoder, TextEncoder
from hushgrad.recipes.image_features import ImageFeatures
from hushgrad.recipes.images import ImageEncoder
from hushgrad.recipes.learned_encoder import LearnedEncoder
from hushgrad.recipes.learning import learn
from hushgrad.recipes.metrics import area, confusion, evaluate, verdict
from hushgrad.recipes.models import Linear
from hushgrad.recipes.saved_plans import from_table
from hushgrad.recipes.text_features import LOOKS, TextFeatures
from hushgrad.release.journal import Journal
from hushgrad.release.keys import RunKey
from hushgrad.train import Plan

COLUMNS = Columns(
    columns=(
        Number(name="age", cuts=(20, 40)),
        Category(name="job", values=("a", "b", "c")),
        Number(name="pay", low=-10, high=1000, bins=5, scale="log"),
    )
)
CELLS = st.one_of(
    st.sampled_from(["a", "b", "c", "?", "", "nan", "inf", "-inf", "1e400"]), st.floats().map(str), st.text(max_size=5)
)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_any_row_has_length_one_or_nothing_and_does_not_depend_on_others(rows):
    together = COLUMNS(rows)
    assert together.dtype == torch.float32
    lengths = together.norm(dim=1)
    assert (((lengths - 1).abs() < 1e-5) | (lengths == 0)).all()
    for row, found in zip(rows, together, strict=True):
        assert torch.equal(COLUMNS([row])[0], found)
        named = dict(zip(("age", "job", "pay"), row, strict=True))
        assert torch.equal(COLUMNS([named])[0], found)


@given(st.lists(st.text(max_size=60), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_text_has_length_one_and_does_not_depend_on_others(texts):
    encode = TextFeatures(buckets=16)
    together = encode(texts)
    assert together.shape == (len(texts), LOOKS + 16)
    assert torch.allclose(together.norm(dim=1), torch.ones(len(texts)), atol=1e-5)
    for text, found in zip(texts, together, strict=True):
        assert torch.allclose(encode([text])[0], found, atol=1e-6)


def test_a_block_is_one_place_minus_the_mean():
    row = COLUMNS([("20", "c", "-10")])[0] * COLUMNS([("20", "c", "-10")])[0].abs().max().reciprocal()
    block = torch.tensor([-1 / 3, 2 / 3, -1 / 3])
    assert torch.allclose(row[:3] / row[1] * (2 / 3), block, atol=1e-5)
    assert row[3:6].argmax() == 2
    assert row[6:].argmax() == 0
    unknown = COLUMNS([("20", "zebra", "x")])[0]
    assert (unknown[3:] == 0).all()


@pytest.mark.parametrize(
    "encode", [COLUMNS, TextFeatures(buckets=8), ImageFeatures(images=ImageEncoder(channels=1, height=8, width=8))]
)
def test_encoders_are_written_down_whole(encode):
    assert Encoder.from_json(encode.to_json()) == encode


# What is learned ----------------------------------------------------------------------------------------------------------------------


def waiting(columns: int, bins: int) -> Columns:
    return Columns(columns=tuple(Number(name=f"c{i}", low=0, high=64, bins=bins, learn=True) for i in range(columns)))


@given(st.integers(1, 5), st.lists(st.floats(-100, 200), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_record_adds_a_vector_of_length_at_most_one(columns, values):
    encode = waiting(columns, 4)
    rows = [tuple(str(v) for _ in range(columns)) for v in values]
    prepared = encode.prepared(rows)
    everyone = np.arange(len(rows))
    whole = encode.statistic(prepared, everyone, np.ones(len(rows)))
    for left in everyone:
        moved = whole - encode.statistic(prepared, everyone[everyone != left], np.ones(len(rows) - 1))
        assert float(moved.norm()) <= 1 + 1e-12


def test_learned_cut_points_are_quantiles_also_of_equal_values():
    rng = np.random.default_rng(0)
    values = np.concatenate([np.zeros(6000), rng.uniform(0, 64, 4000)])
    encode = waiting(1, 4)
    prepared = encode.prepared([(str(v),) for v in values])
    learned = learn(encode, prepared, np.arange(len(values)), records=1e4, secret=bytes(32))
    assert learned.learns is None
    cuts = learned.columns[0].cuts
    assert cuts[0] == 1.0  # the cell of the equal values is a bin of its own
    shares = np.bincount(learned.columns[0].place([str(v) for v in values])) / len(values)
    assert shares[0] == pytest.approx(0.6, abs=0.02)
    with pytest.raises(ArgumentError, match="learned first"):
        encode([("1",)])


def test_numbers_whose_bounds_nobody_knows_are_cut_at_their_quantiles_too():
    rng = np.random.default_rng(0)
    count = 20_000
    age, pay = rng.normal(45, 12, count), np.where(rng.random(count) < 0.5, 0.0, np.exp(rng.normal(9, 1, count)))
    encode = Columns(columns=(Number(name="age", learn=True), Number(name="pay", learn=True, bins=4), *waiting(1, 4).columns))
    assert Encoder.from_json(encode.to_json()) == encode
    prepared = encode.prepared([(str(a), str(p), "1") for a, p in zip(age, pay, strict=True)])
    found = learn(encode, prepared, np.arange(count), records=count, secret=bytes(32))
    wanted = np.quantile(age, np.arange(1, 8) / 8)
    assert np.abs(np.log(np.array(found.columns[0].cuts) / wanted)).max() < 0.12
    assert found.columns[1].cuts[:2] == (0.0, pytest.approx(0.055, abs=1e-3))  # a half of them is 0
    assert found.columns[1].cuts[2] == pytest.approx(np.quantile(pay, 0.75), rel=0.1)
    assert found.columns[2] == learn(waiting(1, 4), [["1"] * count], np.arange(count), records=count, secret=bytes(16)).columns[0]
    whole = encode.statistic(prepared, np.arange(50), np.ones(50))
    assert float((whole - encode.statistic(prepared, np.arange(49), np.ones(49))).norm()) <= 1 + 1e-12


def test_a_number_with_one_bound_or_none_and_nothing_to_learn_is_refused():
    for known in ({"low": 0, "learn": True}, {"high": 9}, {}):
        with pytest.raises(ArgumentError, match="known without a look at the data"):
            Number(name="a", **known)


def test_words_that_nobody_has_declared_have_places_that_follow_from_themselves():
    (column,) = columns_of({"town": {"buckets": 8}})
    assert column == Category(name="town", buckets=8) and column.places == 8
    alone = [int(column.place([word])[0]) for word in ("Bern", "Rome", "Oslo", "")]
    assert column.place(["Oslo", "", "Rome", "Bern"]).tolist() == [alone[2], -1, alone[1], alone[0]]
    assert "buckets" not in Category(name="sex", values=("f", "m")).to_json()
    for wrong in ({"buckets": 1}, {"buckets": 4, "values": ["a"]}, {"values": []}):
        with pytest.raises(ArgumentError):
            columns_of({"town": wrong})


def test_a_session_learns_once_and_reads_it_again(tmp_path):
    recipe = Recipe.from_tables({"model": {"name": "linear"}, "data": {"name": "encoded"}, "plan": {"delta": 1e-5}})
    encode = waiting(2, 4)
    prepared, everyone = encode.prepared([(str(v), str(v)) for v in range(60)]), np.arange(60)
    refused = LearnedEncoder(recipe, tmp_path, None)
    refused(encode, prepared, everyone, None)
    assert list(tmp_path.iterdir()) == []  # nothing is written before the budget is there
    first = LearnedEncoder(recipe, tmp_path, None)
    learned = first(encode, prepared, everyone, None)
    first.keep(Journal(RunKey.make(seed=1)))
    assert LearnedEncoder(recipe, tmp_path, bytes(32))(encode, prepared, everyone, None) == learned
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(ArgumentError):
        LearnedEncoder(recipe, tmp_path, None)(encode, prepared, everyone, None)


def test_all_values_equal_and_nothing_at_all_give_a_working_encoder():
    for values in (["5"] * 1000, ["?"] * 3, []):
        encode = waiting(2, 4)
        prepared = encode.prepared([(v, v) for v in values])
        learned = learn(encode, prepared, np.arange(len(values)), records=1e3, secret=bytes(32))
        assert learned([("5", "6")]).norm() == pytest.approx(1.0, abs=1e-5)


def test_a_saved_plan_counts_what_an_encoder_learns_or_is_refused():
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=80, steps=3)
    table = {"saved": plan.to_json(), "noise_multiplier": 1.0, "delta": 1e-5}
    assert from_table(table).before is None
    with pytest.raises(ArgumentError, match="counts what the encoder learns first"):
        from_table(table, learned=5.0)
    counted = dataclasses.replace(plan, before=Gaussian(5.0))
    assert from_table({**table, "saved": counted.to_json()}, learned=5.0) == counted


def test_the_noise_of_what_is_learned_has_the_size_that_is_charged():
    encode = waiting(4, 4)
    found = {}

    class Spy(Columns):
        def learned(self, noisy, records):
            found["noisy"] = noisy
            return super().learned(noisy, records)

    spy = Spy(columns=encode.columns, noise_multiplier=7.0)
    learn(spy, spy.prepared([]), np.arange(0), records=1.0, secret=bytes(32))
    noise = found["noisy"].numpy()
    assert noise.std() == pytest.approx(7.0, rel=5 / math.sqrt(2 * len(noise)))  # five standard errors, and the draw is fixed


def test_images_are_centred_by_a_private_mean():
    images = np.random.default_rng(1).integers(0, 255, (40, 8, 8))
    encode = ImageFeatures(images=ImageEncoder(channels=1, height=8, width=8), noise_multiplier=1e-3)
    prepared = encode.prepared(images)
    everyone = np.arange(40)
    for left in (0, 17):
        others = everyone[everyone != left]
        moved = encode.statistic(prepared, everyone, np.ones(40)) - encode.statistic(prepared, others, np.ones(39))
        assert float(moved.norm()) <= 1 + 1e-12
    learned = learn(encode, prepared, everyone, records=40, secret=bytes(32))
    rows = learned(images).float()
    assert torch.allclose(rows.norm(dim=1), torch.ones(40), atol=1e-2)
    assert rows.mean(dim=0).norm() < 0.3  # before: about 0.9


@given(st.lists(st.text(max_size=60), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_text_adds_looks_of_length_at_most_one_and_stays_a_row_of_its_own(texts):
    encode = TextFeatures(buckets=16, noise_multiplier=30.0)
    prepared, everyone = encode.prepared(texts), np.arange(len(texts))
    whole = encode.statistic(prepared, everyone, np.ones(len(texts)))
    for left in everyone:
        moved = whole - encode.statistic(prepared, everyone[everyone != left], np.ones(len(texts) - 1))
        assert float(moved.norm()) <= 1 + 1e-12
    learned = learn(encode, prepared, everyone, records=len(texts), secret=bytes(32))
    rows = learned(texts)
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(texts)), atol=1e-5)
    for i, text in enumerate(texts):
        assert torch.equal(learned([text])[0], rows[i])


def test_texts_without_a_mean_have_the_rows_that_they_had():
    rows = TextFeatures(buckets=16)(["Call 555 now!", ""])
    assert "mean" not in TextFeatures(buckets=16).to_json()
    assert rows[0, :3].tolist() == pytest.approx([-0.0317795, -0.0822878, -0.1726189], abs=1e-7)


# What is refused ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        {"age": {"cuts": [3, 2]}},
        {"age": {"cuts": []}},
        {"age": {}},
        {"age": {"low": 1}},
        {"age": {"low": 2, "high": 1}},
        {"age": {"low": 0, "high": 1, "bins": 1}},
        {"age": {"low": 0, "high": 1, "bins": 1000}},
        {"age": {"low": 0, "high": 1, "scale": "root"}},
        {"age": {"cuts": [math.nan]}},
        {"age": {"values": []}},
        {"age": {"values": ["a", "a"]}},
        {"age": {"values": ["a"], "cuts": [1]}},
        {"age": 3},
    ],
)
def test_columns_that_are_not_declared_well_are_refused(table):
    with pytest.raises(ArgumentError):
        columns_of(table)


def test_declared_categories_are_compared_as_cells_are():
    encode = Columns(columns=(Category(name="sex", values=("f ", " m")),))
    assert encode([["f"], [" m "], ["x"]]).abs().sum(dim=1).gt(0).tolist() == [True, True, False]


def test_an_image_that_cannot_be_used_is_named_by_its_place_among_all(monkeypatch):
    monkeypatch.setattr(image_features, "_CHUNK", 2)
    rows = np.zeros((7, 8, 8), np.float32)
    rows[5, 3, 3] = np.nan
    with pytest.raises(ArgumentError, match=r"pixels of image 6 to be numbers from 0 to 255\. Mend it"):
        ImageFeatures(images=ImageEncoder(channels=1, height=8, width=8)).prepared(rows)


# What a model is worth ----------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30).filter(
        lambda rows: 0 < sum(y for _, y in rows) < len(rows)
    )
)
@settings(max_examples=60, deadline=None)
def test_the_area_counts_pairs_and_equal_scores_half(rows):
    scores, positive = np.array([s for s, _ in rows], float), np.array([y for _, y in rows])
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    assert area(scores, positive) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("size", [1.0, 60.0, 900.0])
@pytest.mark.parametrize("classes", [2, 3])
def test_a_model_that_is_sure_ranks_records_as_well_as_one_that_is_not(size, classes):
    """Probabilities of a sure model are all 1; what it ranks by is not."""
    inputs = torch.eye(classes)[torch.arange(40) % classes] * torch.linspace(1.0, 2.0, 40)[:, None]
    y = torch.arange(40) % classes
    y[::7] = (y[::7] + 1) % classes
    scaled = torch.nn.Linear(classes, classes, bias=False)
    torch.nn.init.eye_(scaled.weight)
    expected = evaluate(scaled, torch.utils.data.TensorDataset(inputs, y))["test_auc"]
    assert 0.5 < expected < 1
    with torch.no_grad():
        scaled.weight.mul_(size)
    assert evaluate(scaled, torch.utils.data.TensorDataset(inputs, y))["test_auc"] == pytest.approx(expected)


class Constant(torch.nn.Module):
    def __init__(self, scores):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.tensor(scores))

    def forward(self, x):
        return self.scores.expand(len(x), -1)


def test_a_constant_is_told_from_a_model():
    y = torch.tensor([0] * 90 + [1] * 10)
    data = torch.utils.data.TensorDataset(torch.zeros(100, 1), y)
    found = evaluate(Constant([1.0, 0.0]), data)
    assert (found["test_accuracy"], found["test_majority"], found["test_balanced_accuracy"], found["test_auc"]) == (
        0.9,
        0.9,
        0.5,
        0.5,
    )
    assert "No better than a constant" in verdict(found)
    assert confusion(Constant([1.0, 0.0]), data) == [[90, 0], [10, 0]]
    assert verdict({**found, "test_accuracy": 0.99}) == ""
    assert "rank" in verdict({**found, "test_auc": 0.8})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_any_precision_are_proved_and_trained_on(dtype):
    rows = torch.nn.functional.normalize(torch.randn(16, 6)).to(dtype)
    model = Linear(6, 2)
    plan = hushgrad.Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=16, steps=2)
    data = torch.utils.data.TensorDataset(rows, torch.randint(2, (16,)))
    hushgrad.fit(
        model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), data, plan, progress=False
    )
    assert model.head.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("encode", "row"),
    [
        (Columns(columns=(Category(name="town", buckets=8), Number(name="age", cuts=(20, 40)))), ("\ud800", "\udcff")),
        (TableEncoder(columns=("a",), buckets=4), ("\ud800",)),
        (TextFeatures(buckets=8), "hi \ud800"),
        (TextEncoder(length=3), "hi \ud800"),
        (ByteEncoder(length=3), "hi \ud800"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_half_a_character_is_no_error(encode, row):
    assert torch.isfinite(encode([row]).double()).all()


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("bounds", [(0, 5e-324), (1, 1 + 8e-16), (1e15, 1e15 + 2**-3)], ids=str)
def test_bounds_with_too_few_numbers_between_them_are_refused_before_anything_is_learned(bounds, scale):
    for learned in (False, True):
        with pytest.raises(ArgumentError, match="to have numbers between them that can be told apart for 'a'"):
            Number(name="a", low=bounds[0], high=bounds[1], scale=scale, learn=learned)


def test_bounds_whose_distance_is_no_number_are_refused():
    with pytest.raises(ArgumentError, match="told apart"):
        Number(name="a", low=-1.7e308, high=1.7e308, learn=True)


@settings(max_examples=40, deadline=None)
@given(cells=st.lists(st.tuples(st.sampled_from(["5", "25", "70", "", "x"]), st.sampled_from(["a", "b", "c", ""])), max_size=6))
def test_crossed_columns_have_a_place_for_each_pair(cells):
    """Beside the blocks of both, centred as they are, and empty where one of the two is not known; rows keep length 1 or 0."""
    columns = (Number(name="age", cuts=(20.0, 60.0)), Category(name="job", values=("a", "b")))
    plain, both = (Columns(columns=columns, crosses=pairs) for pairs in ((), (("age", "job"),)))
    assert Columns.from_json(both.to_json()) == both and "crosses" not in plain.to_json()
    rows = both(cells).double().numpy()
    assert rows.shape == (len(cells), 5 + 6)
    assert np.allclose([row @ row for row in rows], [float(bool(row.any())) for row in rows])
    for (age, job), row in zip(cells, rows, strict=True):
        known = age in ("5", "25", "70") and job in ("a", "b")
        assert row[5:].any() == known
        assert not known or row[5:].argmax() == 2 * ("5", "25", "70").index(age) + "ab".index(job)


def test_crosses_that_are_none_are_refused():
    columns = (Number(name="age", cuts=(20.0, 60.0)), Category(name="job", buckets=2000), Category(name="sex", values=("f", "m")))
    for pairs in (
        (("age", "age"),),
        (("age",),),
        (("age", "sex"), ("sex", "age")),
        (("age", "town"),),
        (("age", "job"),),
        "age",
        (1,),
    ):
        with pytest.raises(ArgumentError, match="crosses"):
            Columns(columns=columns, crosses=pairs)
