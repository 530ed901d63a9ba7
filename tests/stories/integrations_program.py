"""Trainer and Lightning in one process or in several: the program that ``test_integrations_processes`` starts."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.integrations.huggingface import PrivateTrainer
from hushgrad.integrations.lightning import PrivateFit, PrivateProcesses
from hushgrad.noise import BLT
from hushgrad.train import Plan

LENGTH = 5


def plan(*, ordered: bool = False) -> Plan:
    """Poisson batches, of which a process may get nothing; or ``ordered`` ones, of which each gets a part."""
    common = {"noise_multiplier": 0.5, "delta": 1e-5, "batch_size": 4, "dataset_size": 12, "max_grad_norm": 0.5}
    return Plan.dpftrl(epochs=1, noise=BLT(buffers=2), **common) if ordered else Plan.dpsgd(steps=4, **common)


def language_model(*, lora: bool, sharded: bool) -> nn.Module:
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 20,
        "n_positions": LENGTH,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop))
    if lora:
        torch.manual_seed(2)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def whole(model: nn.Module) -> list[float]:
    tensors = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters() if p.requires_grad]
    return torch.cat([t.detach().flatten() for t in tensors]).tolist()


class Stops(transformers.TrainerCallback):
    """Ends a call of ``train`` after so many steps of the run."""

    def __init__(self, after: int) -> None:
        self.after, self.trainer = after, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self.trainer.private.steps >= self.after


def with_trainer(*, lora: bool, sharded: bool, ordered: bool, folder: str | None = None, stop: int = 100) -> dict[str, Any]:
    rows = torch.randint(1, 20, (12, LENGTH), generator=torch.Generator().manual_seed(3))
    # Positions of their own: with fully_shard a table that all examples read as one, as GPT-2 does by itself, is refused.
    data = [{"input_ids": row, "labels": row.clone(), "position_ids": torch.arange(LENGTH)} for row in rows]
    model = language_model(lora=lora, sharded=sharded)
    with tempfile.TemporaryDirectory() as out:
        args = transformers.TrainingArguments(
            output_dir=out,
            use_cpu=True,
            per_device_train_batch_size=2,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
        )
        own = {"train_dataset": data, "seed": 1, "check_isolation": False, "callbacks": [Stops(stop)]}
        where = None if folder is None else f"{folder}/{'lora' if lora else 'full'}"
        trainer = own["callbacks"][0].trainer = PrivateTrainer(model, args, plan(ordered=ordered), checkpoint=where, **own)
        trainer.train()
    found = {"weights": whole(model), "steps": trainer.private.steps, "spent": trainer.spent().epsilon}
    trainer.private.detach()
    return found


def with_lightning(*, sharded: bool = False) -> dict[str, Any]:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

        def configure_model(self):
            if sharded and world > 1:
                from torch.distributed.fsdp import fully_shard

                fully_shard(self, mesh=self.device_mesh["data_parallel"])

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, _):
            x, y = batch
            return nn.functional.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(12, 4, generator=generator), torch.randint(3, (12,), generator=generator))
    torch.manual_seed(5)
    module, fit = Module(), PrivateFit(plan(), data, seed=1, check_isolation=False)
    world = dist.get_world_size() if dist.is_initialized() else 1
    several = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1) if sharded else PrivateProcesses()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=several if world > 1 else "auto",
        callbacks=[fit],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, fit.loader)
    return {"weights": whole(module), "steps": fit.private.steps, "spent": fit.spent().epsilon}


def main(options: dict[str, Any]) -> dict[str, Any]:
    if "RANK" in os.environ:  # as torchrun says it, so that Lightning starts no processes of its own
        os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "GROUP_RANK": "0"}
        os.environ["TORCHELASTIC_RUN_ID"] = "test"
    given = {name: options[name] for name in ("sharded", "ordered", "folder", "stop") if name in options}
    work = {
        "trainer": lambda: with_trainer(lora=False, **given),
        "lora": lambda: with_trainer(lora=True, **given),
        "lightning": with_lightning,
        "lightning, sharded": lambda: with_lightning(sharded=True),
    }
    return {name: work[name]() for name in options["which"]}
