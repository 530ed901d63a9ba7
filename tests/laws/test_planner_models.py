"""What a language model takes, before there is one: shapes, memory and time of a step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError
from hushgrad.planner import Work, choices, shape_of
from hushgrad.planner.model_shapes import NAMES

SMALL = Work(shape=shape_of("smollm2-135m"), length=64, batch_size=32, micro_batch=4)


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_counts_what_transformers_makes(name):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    made = transformers.AutoConfig.for_model(**NAMES[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    assert shape_of(name).parameters == sum(p.numel() for p in model.parameters()) == shape_of(made.to_dict()).parameters


def test_adapters_are_counted_as_peft_makes_them():
    transformers, peft, torch = (pytest.importorskip(name) for name in ("transformers", "peft", "torch"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**NAMES["smollm2-135m"]))
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    assert shape_of("smollm2-135m").adapters(4) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_names_are_read_as_people_write_them(tmp_path):
    assert shape_of("HuggingFaceTB/SmolLM2-135M-Instruct") == shape_of("smollm2-135m")
    (tmp_path / "config.json").write_text(json.dumps(NAMES["gpt2"]))
    assert shape_of(str(tmp_path)) == shape_of(str(tmp_path / "config.json")) == shape_of("gpt2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' to be one of"),
        ({"model_type": "llama", "hidden_size": 0}, "hidden_size=0"),
        ({**NAMES["smollm2-135m"], "head_dim": 32}, "head_dim=32"),
        ({}, "model_type=None"),
    ],
)
def test_other_configs_are_refused(config, message):
    with pytest.raises(ArgumentError, match=message):
        shape_of(config)


def test_more_of_anything_takes_more():
    for change in ({"micro_batch": 8}, {"length": 128}, {"state": 4, "traffic": 8}):
        more = replace(SMALL, **change)
        assert more.peak() > SMALL.peak()
        assert more.seconds() >= SMALL.seconds() or "micro_batch" in change
    adapters = replace(SMALL, tuned="lora")
    assert adapters.kept < SMALL.kept / 3 and adapters.trained < SMALL.trained / 20


def test_processes_share_the_batch_the_noise_and_what_is_sharded():
    noisy = replace(SMALL, state=15, traffic=16, processes=4)
    replicated, sharded = (replace(noisy, placement=placement) for placement in ("replicated", "sharded"))
    one = replace(noisy, processes=1)
    assert sharded.kept < replicated.kept < one.kept
    assert replicated.spent()[0] == one.spent()[0] / 4
    assert replicated.received() < sharded.received() and one.received() == 0


def test_choices_that_fit_come_first():
    found = choices(replace(SMALL, processes=2), device_memory=4e9)
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    assert {one.mechanism for one in found} == {"DP-SGD", "banded(4)", "banded(16)", "BLT(4)"}


def test_the_command_answers_in_text_and_json(capsys):
    assert main(["plan", "--model", "gpt2", "--processes", "2", "--device-memory", "16", "--length", "128"]) == 0
    assert "gpt2: 124M parameters" in capsys.readouterr().out
    assert main(["plan", "--model", "gpt2", "--tune", "lora", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 124_439_808 and {c["tuned"] for c in found["choices"]} == {"lora"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "smolm2-135m"], "did you mean smollm2-135m?"),
        (["--model", "gpt2", "--length", "2000"], "at most the model's 1024 positions"),
        (["--model", "gpt2", "--device-memory", "-1"], "device_memory=-1"),
        (["--model", "gpt2", "--epsilon", "1"], "has no option --epsilon"),
        (["--model", "gpt2", "--proceses", "2"], "did you mean --processes?"),
    ],
)
def test_mistakes_are_one_sentence(words, message, capsys):
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert message in err.lower() and err.count("\n") == 1
