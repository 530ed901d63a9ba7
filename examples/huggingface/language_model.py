"""A language model, trained openly on a little text and privately on more: loss and memorised secrets over epsilon.

    python examples/huggingface/language_model.py                   made-up speakers, a tiny model, a minute: shows the code, no result
    python examples/huggingface/language_model.py --data FOLDER     Tiny Shakespeare (input.txt or input.txt.gz in FOLDER)
    python examples/huggingface/language_model.py --data FOLDER --rows "LoRA, example, DP-SGD, 3"

Needs pip install 'hushgrad[hf]'. A GPT that reads bytes is trained without privacy on the speakers who speak first, their words in small
letters without punctuation, as public corpora have them; then it is fine-tuned with Hugging Face's Trainer on other speakers as they are
written, LoRA or all weights, with privacy of a line of text or of a whole speaker. Secrets ("my number
is 314159") are planted among the private lines: some once, some by one speaker many times. Afterwards the loss is measured on speakers
whom nobody trained on, and so is the exposure of the secrets: how far above numbers that were never planted the model ranks them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from hushgrad.audit import exposure, secret_sequences, sequence_losses
from hushgrad.experiments.characters import VERSES
from hushgrad.integrations.huggingface import PrivateTrainer
from hushgrad.noise import Banded
from hushgrad.sampling import Units
from hushgrad.train import Plan

WINDOW, DIGITS, PREFIX = 64, 6, "my number is "
CHANCE = 1 / math.log(2)  # expected exposure, in bits, of a secret that a model has never seen


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    width: int = 112
    layers: int = 3
    open_steps: int = 300
    steps: int = 15  # of a private run
    open_again: int = 150  # of the runs without privacy that the private ones are compared with
    batch: int = 256  # lines of text
    per_speaker: int = 2  # lines of a speaker in a step, for privacy of speakers
    secrets: int = 32  # planted once, and as many planted often
    copies: int = 32
    candidates: int = 4000
    tested: int = 1000


QUICK = Size(width=16, layers=1, open_steps=5, steps=2, open_again=5, batch=40, secrets=3, copies=2, candidates=50, tested=50)


class Row(NamedTuple):
    """One private run: what is trained, who is protected, by which noise, at which epsilon (infinite: neither clipping nor noise)."""

    tuned: str
    unit: str
    noise: str
    epsilon: float

    def __str__(self) -> str:
        return f"{self.tuned}, {self.unit}, {self.noise}, {self.epsilon:g}"


ROWS = [
    *(Row("LoRA", "example", "DP-SGD", epsilon) for epsilon in (8.0, 3.0, 1.0)),
    Row("LoRA", "speaker", "DP-SGD", 8.0),
    *(Row("full", "example", "DP-SGD", epsilon) for epsilon in (8.0, 3.0, 1.0)),
    Row("full", "speaker", "DP-SGD", 8.0),
    *(Row(tuned, unit, "banded", 8.0) for unit in ("example", "speaker") for tuned in ("LoRA", "full")),
    Row("full", "nobody", "none", math.inf),  # the private text, openly: what is memorised
    Row("full", "public", "none", math.inf),  # the public text, once more: what more steps alone would do
]
RATES = {"LoRA": 1e-2, "full": 1e-3}  # Adam's


# The text ---------------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """Lines of WINDOW + 1 bytes."""

    public: Tensor
    private: Tensor
    owners: list[str]  # who says each private line
    tested: Tensor
    secrets: dict[str, Tensor]  # planted "once" and "often"
    candidates: Tensor  # never planted


def speakers(folder: str | None) -> dict[str, str]:
    """What each speaker says, in the order in which they first speak."""
    if folder is None:
        draw = random.Random(1)
        return {f"speaker {i:03}": "\n".join(draw.sample(VERSES, 6)) for i in range(60)}
    packed = Path(folder, "input.txt.gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else Path(folder, "input.txt").read_text()
    said: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", text):
        name, colon, words = block.partition(":\n")
        if colon:
            said.setdefault(name, []).append(words)
    return {name: "\n".join(parts) for name, parts in said.items()}


def plain(text: str) -> str:
    """Small letters and single spaces: the form in which large public corpora of bytes come (text8)."""
    return re.sub("[^a-z]+", " ", text.lower())


def lines(text: str) -> Tensor:
    """Pieces that do not overlap; the end is filled up with line breaks."""
    ids = list(text.encode())
    ids += [10] * (-len(ids) % (WINDOW + 1))
    return torch.tensor(ids).view(-1, WINDOW + 1)


def numbers(count: int, seed: int) -> Tensor:
    """Different secrets."""
    digits = secret_sequences(count, length=DIGITS, vocabulary=10, seed=seed) + ord("0")
    before = torch.tensor(list(PREFIX.encode())).expand(count, -1)
    after = torch.full((count, WINDOW + 1 - len(PREFIX) - DIGITS), 10)
    return torch.cat([before, digits, after], dim=1)


def text_of(folder: str | None, size: Size, seed: int) -> Text:
    """The first sixth of the speakers is public; of the others every tenth is for testing, and each secret is planted by another one."""
    said = speakers(folder)
    names = list(said)
    public, others = names[: len(names) // 6], names[len(names) // 6 :]
    tested = torch.cat([lines(said[name]) for name in others[::10]])[: size.tested]
    private = [(name, line) for i, name in enumerate(others) if i % 10 for line in lines(said[name])]
    planted = numbers(2 * size.secrets + size.candidates, seed)
    once, often = planted[: size.secrets], planted[size.secrets : 2 * size.secrets]
    owners = random.Random(seed).sample([name for i, name in enumerate(others) if i % 10], 2 * size.secrets)
    private += list(zip(owners[: size.secrets], once, strict=True))
    private += [(name, line) for name, line in zip(owners[size.secrets :], often, strict=True) for _ in range(size.copies)]
    return Text(
        public=torch.cat([lines(plain(said[name])) for name in public]),
        private=torch.stack([line for _, line in private]),
        owners=[name for name, _ in private],
        tested=tested,
        secrets={"once": once, "often": often},
        candidates=planted[2 * size.secrets :],
    )


# The model --------------------------------------------------------------------------------------------------------------


def gpt(size: Size) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 256, "n_positions": WINDOW, "n_embd": size.width, "n_layer": size.layers, "n_head": 4}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off))


def openly(model: nn.Module, rows: Tensor, steps: int, rate: float, batch: int) -> None:
    """Ordinary training: no clipping, no noise."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        chosen = rows[torch.randint(len(rows), (batch,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(chosen[:, :-1]).logits.flatten(0, 1), chosen[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()


def adapted(model: nn.Module) -> nn.Module:
    """With two thin matrices beside each projection; only these are trained.

    The second one begins at 0, and the first one then has no gradient: a first batch says nothing of whose rows it reads, so that
    the proof takes a way that is 20 times as long. Small numbers instead of 0 spare that, and leave the model as good as it was.
    """
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn", "c_fc", "c_proj"])
    made = get_peft_model(model, config)
    for name, matrix in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(matrix, std=1e-3)
    return made


# Private fine-tuning ----------------------------------------------------------------------------------------------------


def plan_of(row: Row, size: Size, text: Text) -> Plan:
    people = len(set(text.owners))
    records, batch = (len(text.private), size.batch) if row.unit == "example" else (people, people // 2)
    common: dict[str, Any] = {"epsilon": row.epsilon, "delta": 0.1 / records, "max_grad_norm": 1.0, "steps": size.steps}
    common |= {"batch_size": batch, "dataset_size": records, "unit": "user" if row.unit == "speaker" else "example"}
    if row.noise == "DP-SGD":
        return Plan.dpsgd(**common)
    return Plan.dpftrl(**common, sampling="cyclic_poisson", noise=Banded.square_root(bands=2), relation="add_remove")


def tuned(model: nn.Module, row: Row, size: Size, text: Text, seed: int) -> str:
    """Fine-tune ``model``, and say what was spent."""
    if row.noise == "none":
        openly(model, text.public if row.unit == "public" else text.private, size.open_again, 2e-3, 64)
        return "no guarantee"
    data = [{"input_ids": line[:-1], "labels": line[:-1]} for line in text.private]
    groups = Units(text.owners, examples=len(data), cap=size.per_speaker) if row.unit == "speaker" else None
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output,
            per_device_train_batch_size=16,
            learning_rate=RATES[row.tuned],
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = PrivateTrainer(model, args, plan_of(row, size, text), train_dataset=data, groups=groups, seed=seed)
        trainer.train()
    return str(trainer.spent())


# Measuring --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def bits(model: nn.Module, rows: Tensor) -> Tensor:
    """Bits per byte of each line."""
    model.eval()
    losses = [
        nn.functional.cross_entropy(model(input_ids=part[:, :-1]).logits.transpose(1, 2), part[:, 1:], reduction="none").mean(1)
        for part in rows.split(200)
    ]
    model.train()
    return torch.cat(losses) / math.log(2)


def exposed(model: nn.Module, text: Text) -> dict[str, float]:
    """Mean exposure in bits of the secrets."""

    def losses(rows: Tensor) -> Tensor:
        known = rows[:, : len(PREFIX) + DIGITS]
        return torch.cat(
            [sequence_losses(lambda ids: model(input_ids=ids).logits, p, start=len(PREFIX)) for p in known.split(500)]
        )

    reference = losses(text.candidates)
    return {name: float(exposure(losses(rows), reference).mean()) for name, rows in text.secrets.items()}


def measured(row: Row, size: Size, text: Text, state: dict[str, Tensor], before: Tensor, seed: int) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(seed)
    model: nn.Module = gpt(size)
    model.load_state_dict(state)
    if row.tuned == "LoRA":
        model = adapted(model)
    began = time.process_time()
    spent = tuned(model, row, size, text, seed)
    seconds = time.process_time() - began
    after = bits(model, text.tested)
    gain = before - after
    found = {"bits": float(after.mean()), "gain": float(gain.mean()), "error": float(gain.std()) / math.sqrt(len(gain))}
    return {"row": str(row), "seed": seed, **found, "exposure": exposed(model, text), "spent": spent, "seconds": seconds}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    size = QUICK if options.data is None else Size()
    if options.steps:
        size = replace(size, steps=options.steps)
    for seed in options.seeds:
        text = text_of(options.data, size, seed)
        torch.manual_seed(seed)
        public = gpt(size)
        began = time.process_time()
        if options.public and Path(options.public).exists():
            public.load_state_dict(torch.load(options.public, weights_only=True))
        else:
            openly(public, text.public, size.open_steps, 2e-3, 64)
            if options.public:
                torch.save(public.state_dict(), options.public)
        before = bits(public, text.tested)
        found = {"bits": float(before.mean()), "exposure": exposed(public, text), "seconds": time.process_time() - began}
        shape = {
            "parameters": sum(p.numel() for p in public.parameters()),
            "public": len(text.public),
            "private": len(text.private),
        }
        yield {"row": "public", "seed": seed, **found, **shape, "speakers": len(set(text.owners)), "tested": len(text.tested)}
        for row in ROWS:
            if not options.rows or str(row) in options.rows:
                yield measured(row, size, text, public.state_dict(), before, seed)


def line_of(found: dict[str, Any]) -> str:
    shown = {name: f"{value:.2f}" for name, value in found["exposure"].items()}
    gained = f", {found['gain']:.4f} ± {found['error']:.4f} better" if "gain" in found else ""
    known = f"exposure once {shown['once']}, often {shown['often']} (chance {CHANCE:.2f})"
    return f"{found['row']} (seed {found['seed']}): {found['bits']:.4f} bits per byte{gained}; {known}; {found['seconds']:.0f} s"


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of Tiny Shakespeare")
    parser.add_argument("--rows", nargs="+", help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, help="of each private run")
    parser.add_argument("--public", help="a file that holds the openly trained weights, to train them once only")
    parser.add_argument("--json", help="add each result to this file, a line each")
    options = parser.parse_args(arguments)
    found = []
    for one in run(options):
        print(line_of(one), flush=True)
        found.append(one)
        if options.json:
            with Path(options.json).open("a", encoding="utf-8") as file:
                file.write(json.dumps(one) + "\n")
    return found


if __name__ == "__main__":
    main()
