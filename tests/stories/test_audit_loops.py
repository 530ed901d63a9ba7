"""The deep audit of runs that another framework's loop makes: with its own passes, on copies of its model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from several_processes import USUAL, run
from torch import nn
from torch.utils.data import TensorDataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hushgrad.clipping.rules.linear import Linear
from hushgrad.testing.defects import DEFECTS, patched
from hushgrad.train import Plan

N = 60


def a_plan() -> Plan:
    return Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, max_grad_norm=0.05, batch_size=6, dataset_size=N, steps=20)


def one_layer_unclipped(size: int) -> Any:
    """The norms of linear layers with so many outputs are left out."""
    measure = Linear.sq_norms

    def wrong(self: Linear, record: Any) -> dict[str, torch.Tensor]:
        own = record.g.shape[-1] == size
        return {name: value * 0 if own else value for name, value in measure(self, record).items()}

    return patched(Linear, "sq_norms", wrong)


def texts() -> list[dict[str, list[int]]]:
    rng = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(1, 31, (9 - i % 5,), generator=rng).tolist()} for i in range(N)]


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    most = max(len(e["input_ids"]) for e in examples)
    rows = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    own = [{"input_ids": e["input_ids"], "attention_mask": [1] * len(e["input_ids"]), "labels": e["input_ids"]} for e in examples]
    return {name: torch.tensor([e[name] + [free] * (most - len(e[name])) for e in own]) for name, free in rows.items()}


@pytest.mark.slow
def test_a_trainer_with_adapters(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hushgrad[hf]'")
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'hushgrad[hf]'")
    from hushgrad.integrations.huggingface import PrivateTrainer

    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=31, n_positions=16)  # dropout of 0.1
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_dropout=0.1, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    trainer = PrivateTrainer(model, args, a_plan(), train_dataset=texts(), data_collator=padded)
    trainer.train()
    before = [p.clone() for p in model.parameters()]
    report = trainer.audit()
    assert not report.refuted, str(report)
    assert report.lower_bound > 0.5 * report.claimed.epsilon
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)) and trainer.private.steps == 20
    with DEFECTS["noise halved"].plant():
        assert {"bound", "exact release"} <= set(trainer.audit().refuted_by)
    with one_layer_unclipped(3):  # the adapters' first factors
        assert trainer.audit().refuted


def test_a_lightning_module() -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'hushgrad[lightning]'")
    from hushgrad.integrations.lightning import PrivateFit

    class Classifier(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> dict[str, torch.Tensor]:
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    private = PrivateFit(a_plan(), TensorDataset(torch.randn(N, 4), torch.randint(3, (N,))))
    lightning.Trainer(callbacks=[private], accelerator="cpu", devices=1, max_epochs=1, **quiet).fit(Classifier(), private.loader)
    report = private.audit()
    assert not report.refuted, str(report)
    assert {"worst record", "exact release", "exact update", "noise rows"} <= {check.name for check in report.checks}
    with DEFECTS["noise halved"].plant():
        assert {"bound", "exact release"} <= set(private.audit().refuted_by)
    with one_layer_unclipped(8):
        assert private.audit().refuted


@pytest.mark.slow
def test_correlated_noise_in_two_processes(tmp_path: Path) -> None:
    wrong = ["noise halved", "every process adds the whole row", "norms of biases are left out"]
    program = Path(__file__).with_name("audit_distributed_program.py")
    for found in run(program, tmp_path, 2, {"defects": wrong}, imports=(*USUAL, "hushgrad.testing.defects")):
        assert not found["None"]["refuted_by"], found["None"]["text"]
        assert all(found[name]["refuted_by"] for name in wrong), found
