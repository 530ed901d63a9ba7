"""From data to prediction: a model file stands alone, an encoder is the same everywhere, and files are data."""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hushgrad
from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.recipes import (
    DATA,
    MODELS,
    ByteEncoder,
    Encoder,
    ImageEncoder,
    Recipe,
    TableEncoder,
    TensorEncoder,
    TextEncoder,
    describe,
    from_datasets,
    load_predictor,
    load_recipe,
    read_description,
    save_model,
    train,
)
from hushgrad.train import Plan

PLAN = {"noise_multiplier": 1.0, "delta": 1e-4, "batch_size": 16, "steps": 3}


def _people(path: Path, count: int, *, label: bool = True) -> None:
    draw = random.Random(count)
    titles = ["age", "job", *(["y"] if label else [])]
    rows = [[draw.randint(18, 80), draw.choice(["clerk", "boss", "none"]), draw.choice(["no", "yes"])] for _ in range(count)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([titles, *(row[: len(titles)] for row in rows)])


def _recipe(folder: Path, **changes: dict) -> Recipe:
    _people(folder / "people.csv", 80)
    data = {"name": "csv", "path": str(folder / "people.csv"), "label": "y", "classes": ["no", "yes"], "buckets": 8}
    tables = {"model": {"name": "mlp", "hidden": 4}, "data": data, "plan": PLAN}
    return Recipe.from_tables({**tables, **changes}, allow_code=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prediction")
    train(_recipe(folder), folder / "run", progress=False)
    return folder


def test_a_model_file_alone_predicts_what_the_trained_model_says(folder, tmp_path, capsys):
    alone = tmp_path / "elsewhere.safetensors"
    alone.write_bytes((folder / "run" / "model.safetensors").read_bytes())
    (folder / "people.csv").rename(folder / "hidden")  # no training data
    try:
        model = hushgrad.load_model(alone)
        _people(tmp_path / "new.csv", 7, label=False)
        assert main(["predict", str(alone), str(tmp_path / "new.csv"), "--out", str(tmp_path / "p.csv"), "--probabilities"]) == 0
    finally:
        (folder / "hidden").rename(folder / "people.csv")
    data = _recipe(folder).make_data()
    by_hand = MODELS["mlp"](data, hidden=4)
    by_hand.load_state_dict(load_file(alone))
    assert type(model) is nn.Sequential and not model.training
    assert torch.equal(model(data.test.tensors[0]), by_hand(data.test.tensors[0]))
    with (tmp_path / "new.csv").open() as new, (tmp_path / "p.csv").open() as found:
        rows, answers = list(csv.DictReader(new)), list(csv.DictReader(found))
    chances = by_hand(data.encoder(rows)).softmax(dim=1)
    assert [answer["prediction"] for answer in answers] == [("no", "yes")[int(i)] for i in chances.argmax(dim=1)]
    assert [float(answer["p(yes)"]) for answer in answers] == pytest.approx(chances[:, 1].tolist(), abs=1e-5)
    capsys.readouterr()
    assert main(["evaluate", str(folder / "run"), str(folder / "people.csv"), "--json"]) == 0
    inputs = torch.cat([data.train.tensors[0], data.test.tensors[0]])
    labels = torch.cat([data.train.tensors[1], data.test.tensors[1]])
    hits = (by_hand(inputs).argmax(dim=1) == labels).float().mean()
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == pytest.approx(float(hits))


def test_prediction_files_may_order_their_columns_as_they_like_and_lack_labels(folder, tmp_path):
    predictor = load_predictor(folder / "run")
    (tmp_path / "a.csv").write_text("age,job,y\n30,boss,no\n")
    (tmp_path / "b.csv").write_text("shoe,job,age\n43,boss,30\n")
    assert torch.equal(*(predictor.probabilities(predictor.rows(tmp_path / name)) for name in ("a.csv", "b.csv")))
    (tmp_path / "c.csv").write_text("job\nboss\n")
    with pytest.raises(ArgumentError, match="lacks age"):
        predictor.rows(tmp_path / "c.csv")
    with pytest.raises(ArgumentError, match="to have labels"):
        predictor.labelled(tmp_path / "b.csv")
    (tmp_path / "d.csv").write_text("age,age,job\n1,2,boss\n")
    with pytest.raises(ArgumentError, match="age is there twice"):
        predictor.rows(tmp_path / "d.csv")


@pytest.mark.parametrize(
    "encoder, rows",
    [
        (TableEncoder(columns=("a", "b"), buckets=5), [("1", "x"), ("nan", ""), ("-1e300", "y")]),
        (TextEncoder(length=5), ["hello there", "", "a b c d e f g"]),
        (ByteEncoder(length=4), [b"abcd", b"wxyz"]),
        (ImageEncoder(channels=1, height=2, width=3, top=16.0), list(np.arange(12).reshape(2, 2, 3))),
        (TensorEncoder(shape=(2,)), [[1.0, 2.0], [3.0, 4.0]]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_encoders_survive_json_and_encode_each_row_alone(encoder, rows):
    again = Encoder.from_json(json.loads(json.dumps(encoder.to_json())))
    assert again == encoder
    together = encoder(rows)
    for i, row in enumerate(rows):
        assert torch.equal(again([row])[0], together[i])


def test_pictures_and_texts_in_folders_of_their_classes(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "texts" / name).mkdir(parents=True)
        for i in range(4):
            pixels = np.full((9, 7, 3), 60 * number + i, np.uint8)
            image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{i}.png")
            (tmp_path / "texts" / name / f"{i}.txt").write_text(f"the {name}\nsays {i}")
    pictures = DATA["images"](path=str(tmp_path / "pictures"), classes=["cat", "dog"], height=4, width=4, test_fraction=0.25)
    texts = DATA["text-files"](path=str(tmp_path / "texts"), classes=["cat", "dog"], length=6)
    assert pictures.shape == (3, 4, 4) and texts.shape == (6,)
    assert all(len(part.train) + len(part.test) == 8 and len(part.test) for part in (pictures, texts))
    save_model(MODELS["logistic"](pictures), tmp_path / "m.safetensors", describe({"name": "logistic"}, pictures))
    assert main(["predict", str(tmp_path / "m.safetensors"), str(tmp_path / "pictures" / "cat"), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["predictions"]
    assert [Path(answer["file"]).name for answer in answers] == ["0.png", "1.png", "2.png", "3.png"]
    assert main(["evaluate", str(tmp_path / "m.safetensors"), str(tmp_path / "pictures"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 8
    with pytest.raises(ArgumentError, match="lacks bird"):
        DATA["images"](path=str(tmp_path / "pictures"), classes=["cat", "bird"], height=4, width=4)
    (tmp_path / "pictures" / "cat" / "0.png").write_bytes(b"\x89PNG no")
    with pytest.raises(ArgumentError, match="to be a picture"):
        load_predictor(tmp_path / "m.safetensors")(load_predictor(tmp_path / "m.safetensors").rows(tmp_path / "pictures"))


@pytest.mark.parametrize("name, suffix", [("images", ".png"), ("text-files", ".txt")])
@pytest.mark.parametrize("stray", ["three/a", "a", "one/deeper/a"])
def test_no_file_of_a_folder_is_left_out_without_a_word(tmp_path, name, suffix, stray):
    for place in ("one/a", "two/a", stray):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / (place + suffix)).write_text("word")
    (tmp_path / ".trash").mkdir()
    (tmp_path / ".trash" / f"b{suffix}").write_text("hidden files are nobody's records")
    read = ImageEncoder(channels=1, height=2, width=2).read if name == "images" else TextEncoder(length=2).read
    with pytest.raises(ArgumentError, match=f"file='{stray}{suffix}' to lie in a folder of .* called by its class"):
        read(tmp_path, ["one", "two"])
    (tmp_path / (stray + suffix)).unlink()
    found = read(tmp_path, ["one", "two"])
    assert found.labels == ["one", "two"] and found.files == [tmp_path / f"{label}/a{suffix}" for label in ("one", "two")]


def test_predictions_for_a_folder_of_texts_name_their_files(tmp_path, capsys):
    for label in ("ham", "spam"):
        (tmp_path / "texts" / label).mkdir(parents=True)
        for i in range(20):
            (tmp_path / "texts" / label / f"{i}.txt").write_text(f"{label} {i}")
    data = {"name": "text-files", "path": str(tmp_path / "texts"), "classes": ["ham", "spam"], "length": 4}
    tables = {"model": {"name": "text"}, "data": data, "plan": PLAN}
    with pytest.raises(ArgumentError, match=r"Recipe\.from_tables makes one"):
        train(tables, tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    train(Recipe.from_tables(tables), tmp_path / "run", progress=False)
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "texts"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["predictions"]
    assert {row["file"] for row in said} == {str(file) for file in (tmp_path / "texts").glob("*/*.txt")}


def test_torch_data_sets_become_data_with_declared_classes(tmp_path):
    pairs = [(torch.full((3,), float(i)), i % 2) for i in range(40)]
    data = from_datasets(pairs[:30], pairs[30:], classes=["even", "odd"])
    train(_recipe(tmp_path, model={"name": "logistic"}), tmp_path / "run", progress=False, data=data)
    predictor = load_predictor(tmp_path / "run")
    np.savez(tmp_path / "new.npz", inputs=np.ones((2, 3), np.float32), labels=np.array([0, 1]))
    assert len(predictor(predictor.rows(tmp_path / "new.npz"))) == 2
    assert predictor.labelled(tmp_path / "new.npz").tensors[1].tolist() == [0, 1]
    with pytest.raises(ArgumentError, match=r"to lie in 0\.\.0"):
        from_datasets(pairs, pairs, classes=["even"])


@pytest.mark.parametrize(
    "encoder", [ImageEncoder(height=2, width=2, channels=1), TensorEncoder(shape=(2, 2))], ids=["images", "own"]
)
def test_arrays_bring_their_labels_and_cut_ones_are_refused(encoder, tmp_path):
    file = tmp_path / "x.npz"
    np.savez(file, inputs=np.zeros((3, 2, 2), np.uint8), labels=np.array([0, 1, 1]))
    found = encoder.read(file, ("a", "b"))
    assert len(found.rows) == 3 and found.labels == ["a", "b", "b"]
    whole = file.read_bytes()
    np.savez(tmp_path / "few.npz", inputs=np.zeros((3, 2, 2)), labels=np.array([0]))
    np.save(tmp_path / "one.npy", np.float64(1.0))
    for size in (0, 10, len(whole) // 2, len(whole) - 5):
        (tmp_path / f"{size}.npz").write_bytes(whole[:size])
    for bad in ("few.npz", "one.npy", "0.npz", "10.npz", f"{len(whole) // 2}.npz", f"{len(whole) - 5}.npz"):
        with pytest.raises(ArgumentError, match=bad):
            encoder.read(tmp_path / bad, ("a", "b"))


def test_a_language_model_goes_on_with_a_text(tmp_path):
    (tmp_path / "text").write_text("to be or not to be " * 20)
    data = DATA["text"](path=str(tmp_path / "text"), length=8)
    options = {"name": "gpt-small", "width": 8, "heads": 2, "layers": 1}
    save_model(MODELS["gpt-small"](data, width=8, heads=2, layers=1), tmp_path / "m.safetensors", describe(options, data))
    predictor = load_predictor(tmp_path / "m.safetensors")
    assert len(predictor(["to be", ""])) == 2 and predictor.labelled(tmp_path / "text").tensors[0].shape[1] == 8


def test_an_exported_network_gives_the_same_scores_for_every_batch(folder, tmp_path):
    predictor = load_predictor(folder / "run")
    assert main(["export", str(folder / "run"), str(tmp_path / "m.pt2")]) == 0
    exported = torch.export.load(tmp_path / "m.pt2").module()
    for count in (1, 2, 5):
        inputs = predictor.encoder([("30", "boss")] * count)
        assert torch.allclose(exported(inputs), predictor.model(inputs))
    assert main(["export", str(folder / "run"), str(tmp_path / "m.txt")]) == 2


def test_onnx_is_written_or_its_packages_are_named(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", str(folder / "run"), str(tmp_path / "m.onnx")]) == 2
    assert "hushgrad[onnx]" in capsys.readouterr().err


# Files are data ---------------------------------------------------------------------------------------------------------


def _with(path: Path, out: Path, change: dict | None) -> Path:
    """The model file with another description, or with none."""
    content = json.dumps({**read_description(path).to_json(), **(change or {})})
    save_file(load_file(path), out, metadata=None if change is None else {"hushgrad": content})
    return out


@pytest.mark.parametrize(
    "change, match",
    [
        (None, "which network its weights belong to"),
        ({"form": 2}, "in a form that this version knows"),
        ({"more": 1}, "field='more'"),
        ({"model": {"name": "mlp", "hidden": 10**9}}, "it is too small"),
        ({"model": {"name": "mlp", "hidden": 5}}, "it holds others"),
        ({"model": {"name": "mlp", "width": 4}}, "to describe a 'mlp'"),
        ({"model": {"name": "os:system"}}, "names code"),
        ({"model": {"name": "gpt"}}, "gpt-small"),
        ({"shape": [10**6, 10**6]}, "at most"),
        ({"shape": [-1]}, "shape=-1"),
        ({"classes": 10**9}, "it is too small"),
        ({"encoder": {"encoder": "Pickle"}}, "encoder='Pickle'"),
        ({"encoder": {"event": "Gaussian", "noise_multiplier": 1.0}}, "to describe a Encoder"),
        ({"names": "no"}, "names='no'"),
    ],
)
def test_a_model_file_is_data(folder, tmp_path, change, match):
    crafted = _with(folder / "run" / "model.safetensors", tmp_path / "crafted.safetensors", change)
    with pytest.raises(ArgumentError, match=match):
        load_predictor(crafted)


def test_a_cut_model_file_and_another_network_are_refused(folder, tmp_path):
    whole = (folder / "run" / "model.safetensors").read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ArgumentError, match="to be a model file"):
            hushgrad.load_model(tmp_path / "cut")
    with pytest.raises(ArgumentError, match="weights of this network"):
        hushgrad.load_model(folder / "run", model=nn.Linear(3, 2))
    with pytest.raises(ArgumentError, match="folder of a finished run"):
        hushgrad.load_model(tmp_path)


CODE = """from pathlib import Path
from hushgrad.recipes import MODELS
Path({mark!r}).touch()
def net(data):
    return MODELS["logistic"](data)
"""


@pytest.fixture
def named(tmp_path, monkeypatch) -> tuple[str, Path]:
    """A module beside a recipe, and the file that it makes when it is run."""
    name, mark = f"hushgrad_code_{tmp_path.name.replace('-', '_')}", tmp_path / "it-ran"
    (tmp_path / f"{name}.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return f"{name}:net", mark


@pytest.mark.parametrize("over", ["optimizer.lr", "model.name"])
def test_an_interrupted_search_that_names_code_waits_until_it_is_allowed(named, tmp_path, capsys, over):
    code, mark = named
    model = {"name": code if over == "optimizer.lr" else "logistic"}
    tune = {"over": {over: [0.1, 0.2] if over == "optimizer.lr" else ["logistic", code]}}
    tables = {"model": model, "data": {"name": "digits"}, "plan": {**PLAN, "batch_size": 64, "steps": 2}, "tune": tune}
    begun = tmp_path / "out" / "search" / "recipe.json"
    begun.parent.mkdir(parents=True)
    begun.write_text(json.dumps(Recipe.from_tables(tables).tables()))
    assert main(["tune", "--out", str(tmp_path / "out"), "--resume"]) == 2
    assert "--allow-code" in capsys.readouterr().err and not mark.exists()
    assert begun.exists() and not (tmp_path / "out" / "tuning.json").exists()  # it can go on


def test_code_in_a_recipe_or_a_run_folder_runs_only_where_it_is_allowed(named, tmp_path, capsys, monkeypatch):
    code, mark = named
    path, out = tmp_path / "r.toml", tmp_path / "out"
    path.write_text(
        f'[model]\nname = "{code}"\n[data]\nname = "digits"\n[plan]\nnoise_multiplier=1.0\ndelta=1e-4\nbatch_size=64\nsteps=2\n'
    )
    assert main(["train", str(path), "--out", str(out), "--quiet"]) == 2
    assert "--allow-code" in capsys.readouterr().err and not mark.exists()
    recipe = load_recipe(path)
    out.mkdir(exist_ok=True)
    (out / "recipe.json").write_text(json.dumps(recipe.tables()))  # somebody else's folder
    for words in (
        ["train", "--out", str(out), "--resume"],
        ["tune", str(path), "--over", "optimizer.lr=1,2", "--out", str(tmp_path / "t")],
    ):
        assert main(words) == 2
        assert "--allow-code" in capsys.readouterr().err and not mark.exists()
    (out / "recipe.json").unlink()
    assert main(["train", str(path), "--out", str(out), "--quiet", "--allow-code"]) == 0 and mark.exists()
    mark.unlink()
    monkeypatch.delitem(sys.modules, code.partition(":")[0])
    assert main(["predict", str(out), str(out)]) == 2
    assert "--allow-code" in capsys.readouterr().err and not mark.exists()
    assert load_predictor(out, allow_code=True).description.classes == 10 and mark.exists()


# Plans are input --------------------------------------------------------------------------------------------------------


def test_a_saved_plan_trains_and_is_the_plan_of_the_run(folder, tmp_path, capsys):
    plan = Plan.dpsgd(**{key: value for key, value in PLAN.items() if key != "steps"}, dataset_size=64, steps=4, average="ema")
    (tmp_path / "p.json").write_text(json.dumps(plan.to_json()))
    recipe = tmp_path / "r.toml"
    data = f'[data]\nname = "csv"\npath = "{folder / "people.csv"}"\nlabel = "y"\nclasses = ["no", "yes"]\n'
    recipe.write_text('[model]\nname = "logistic"\n' + data)
    assert main(["train", str(recipe), "--plan", str(tmp_path / "p.json"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert Plan.from_json((tmp_path / "run" / "plan.json").read_text()) == plan
    capsys.readouterr()
    assert main(["epsilon", "--from", str(tmp_path / "p.json"), "--delta", "1e-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["epsilon"] == pytest.approx(plan.guarantee().epsilon)
    words = ["tune", str(recipe), "--plan", str(tmp_path / "p.json"), "--over", "optimizer.lr=0.1,1", "--dry", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["naive_epsilon"] == pytest.approx(plan.guarantee().epsilon)


@pytest.mark.parametrize(
    "content, match",
    [
        ("", "JSON text"),
        ("[]", "to describe a Plan"),
        ('{"plan": "Plan"}', "complete Plan"),
        ('{"event": "NonPrivate"}', "to describe a Plan"),
    ],
)
def test_a_file_that_is_no_plan_is_one_sentence(tmp_path, capsys, content, match):
    (tmp_path / "p.json").write_text(content)
    assert main(["train", "--plan", str(tmp_path / "p.json"), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert match in error and error.count("\n") == 1 and not (tmp_path / "run").exists()
    assert main(["train", "--plan", str(tmp_path / "none.json"), "--out", str(tmp_path / "run")]) == 2


def test_what_stands_beside_a_saved_plan_is_refused(tmp_path):
    plan = Plan.dpsgd(**{key: value for key, value in PLAN.items()}, dataset_size=64)
    (tmp_path / "p.json").write_text(json.dumps(plan.to_json()))
    recipe = load_recipe(None, changes=["plan.steps=5"], plan=tmp_path / "p.json")
    with pytest.raises(ArgumentError, match="'steps' beside a saved plan"):
        recipe.make_plan(recipe.make_data())
    more = load_recipe(None, changes=["plan.noise_multiplier=2"], plan=tmp_path / "p.json")
    assert more.make_plan(more.make_data()).noise_multiplier == 2


def _attached() -> tuple[nn.Module, object, torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = Plan.dpsgd(**PLAN, dataset_size=64)
    return model, hushgrad.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan), torch.randn(5, 3)


@pytest.mark.parametrize("record", [torch.jit.trace, lambda model, x: torch.export.export(model, (x,))], ids=["trace", "export"])
def test_tracing_before_detach_says_what_to_do(record):
    model, private, x = _attached()
    with pytest.raises(CaptureError, match=r"Call private\.detach\(\) first"):
        record(model, x)
    private.detach()
    record(model, x)


def test_a_misspelt_argument_is_answered_by_name():
    model, private, _ = _attached()
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
    with pytest.raises(ArgumentError, match="'progres' to be an argument of fit"):
        hushgrad.fit(model, nn.functional.cross_entropy, private.optimizer, data, private.plan, progres=False)
    with pytest.raises(ArgumentError, match="Did you mean 'num_workers'"):
        private.loader(data, num_worker=1)
    with pytest.raises(ArgumentError, match=r"'module' .* The model is the first argument"):
        hushgrad.make_private(module=model, optimizer=private.optimizer, plan=private.plan)
    with pytest.raises(ArgumentError, match=r"'target_epsilon' .* Plan.dpsgd\(epsilon=...\)"):
        Plan.dpsgd(target_epsilon=3.0, target_delta=1e-5)
