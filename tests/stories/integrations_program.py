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
from hushgrad.train import Plan, make_private

LENGTH = 5


def plan(*, rare: bool = False) -> Plan:
    """Poisson batches, of which a process may get nothing; ``rare``: it often does, and once nobody gets anything."""
    common = {"noise_multiplier": 0.5, "delta": 1e-5, "dataset_size": 12, "max_grad_norm": 0.5}
    return Plan.dpsgd(steps=6, batch_size=1, **common) if rare else Plan.dpsgd(steps=4, batch_size=4, **common)


def llama() -> nn.Module:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 20,
        "max_position_embeddings": LENGTH,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def gpt2() -> nn.Module:
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
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop))


def language_model(made: Any, *, lora: bool, sharded: bool) -> nn.Module:
    torch.manual_seed(1)
    model = made()
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


class Counted(PrivateTrainer):
    """Notes how many examples of each step this process has."""

    def training_step(self, model: nn.Module, inputs: Any, *given: Any) -> Any:
        self.counts.append(inputs.examples - inputs.padding)
        return super().training_step(model, inputs, *given)


def texts() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(1, 20, (12, LENGTH), generator=torch.Generator().manual_seed(3))
    # Positions of their own: with fully_shard a table that all examples read as one, as GPT-2 does by itself, is refused.
    return [{"input_ids": row, "labels": row.clone(), "position_ids": torch.arange(LENGTH)} for row in rows]


def in_a_loop(made: Any, *, sharded: bool, rare: bool = False) -> dict[str, Any]:
    """A plain loop that passes whatever it is given."""
    model = language_model(made, lora=False, sharded=sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan(rare=rare), seed=1, check_isolation=False)
    counts = []
    for batch in private.loader(texts()):
        counts.append(batch.examples - batch.padding)
        for part in private.split(batch, 2):
            model(**part).loss.backward()
        optimizer.step()
    found = {"weights": whole(model), "steps": private.steps, "spent": private.spent().epsilon, "counts": counts}
    private.detach()
    return found


def with_trainer(
    made: Any = gpt2, *, lora: bool = False, sharded: bool, rare: bool = False, folder: str | None = None, stop: int = 100
) -> dict[str, Any]:
    model = language_model(made, lora=lora, sharded=sharded)
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
        own = {"train_dataset": texts(), "seed": 1, "check_isolation": False, "callbacks": [Stops(stop)]}
        where = None if folder is None else f"{folder}/{'lora' if lora else 'full'}"
        trainer = own["callbacks"][0].trainer = Counted(model, args, plan(rare=rare), checkpoint=where, **own)
        trainer.counts = []
        trainer.train()
    found = {"weights": whole(model), "steps": trainer.private.steps, "spent": trainer.spent().epsilon}
    found |= {"counts": trainer.counts, "losses": [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]}
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
    given = {name: options[name] for name in ("sharded", "rare", "folder", "stop") if name in options}
    work = {
        "trainer": lambda: with_trainer(**given),
        "lora": lambda: with_trainer(lora=True, **given),
        "llama": lambda: with_trainer(llama, **given),
        "loop": lambda: in_a_loop(gpt2, **given),
        "llama, loop": lambda: in_a_loop(llama, **given),
        "lightning": with_lightning,
        "lightning, sharded": lambda: with_lightning(sharded=True),
    }
    return {name: work[name]() for name in options["which"]}
