"""What private fine-tuning of a causal language model costs: time and peak memory against the plain run, LoRA and full.

    python benchmarks/language.py [--mode lora full] [--rounds 7] [--processes 5] [--peers] [--sweep] [--json out.json]

A Llama from a config (random weights; hidden 256, 4 layers, 2,048 tokens, length 64), AdamW, a logical batch of 32 in parts of 8. Time is
CPU time (one thread) of whole steps, all implementations in turn in one process, median of the quotients; ``--peers`` adds Opacus ghost.
Memory is the peak of a process of its own above what it held after a step of a tiny model, the median of several: as it is, and (alive)
with a C library that gives freed blocks back at once. As it is, the holes of the heap move a peak by 5 % from one process to the next.
``--sweep``: logical batches of 64 to 4,096 in parts of 8, private, for examples and for users of 4 examples each, in later steps, as many
as have 512 parts together (the holes of the heap need some passes to settle, whatever steps these belong to), and without the proofs that
one pass in a thousand repeats: these hold what the first step held.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from models import files_in_memory, memory
from step import Step, interleaved
from torch import Tensor, nn

from hushgrad import noise
from hushgrad.clipping import root
from hushgrad.integrations.huggingface import token_loss
from hushgrad.sampling.batch_loader import stamp
from hushgrad.train import Plan, make_private

_MMAP_THRESHOLD = -3  # of glibc's mallopt
TARGETS = {"lora": (1.2, 1.1), "full": (1.3, 1.3)}  # time, peak memory above the imports


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, what of it is trained, and how large a step is."""

    mode: str = "full"  # "lora" or "full"
    family: str = "llama"  # or "gpt2"
    hidden: int = 256
    layers: int = 4
    vocabulary: int = 2048
    length: int = 64
    part: int = 8
    size: int = 32
    bands: int = 1  # of the noise; 1: independent

    def model(self) -> nn.Module:
        """With random weights, the same ones every time."""
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(self.config())
        if self.mode == "lora":
            import peft

            adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, target_modules="all-linear")
            model = peft.get_peft_model(model, adapter)
        return model.train()

    def config(self) -> transformers.PretrainedConfig:
        """As transformers has it."""
        if self.family == "gpt2":
            sizes = {"n_embd": self.hidden, "n_layer": self.layers, "n_head": 4, "vocab_size": self.vocabulary}
            off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
            return transformers.GPT2Config(**sizes, **off, n_positions=self.length)
        sizes = {"hidden_size": self.hidden, "intermediate_size": 8 * self.hidden // 3 // 8 * 8, "num_hidden_layers": self.layers}
        tokens = {"vocab_size": self.vocabulary, "max_position_embeddings": self.length}
        return transformers.LlamaConfig(**sizes, **tokens, num_attention_heads=4)

    def texts(self) -> dict[str, Tensor]:
        """A batch."""
        ids = torch.randint(self.vocabulary, (self.size, self.length), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    ids = batch["input_ids"]
    return token_loss(model(input_ids=ids, attention_mask=batch["attention_mask"]).logits, ids, shift=True)


def plain(setting: Setting) -> Step:
    model = setting.model()
    optimizer, batch = optimizer_of(model), setting.texts()

    def step() -> None:
        optimizer.zero_grad()
        for first in range(0, setting.size, setting.part):
            part = {name: rows[first : first + setting.part] for name, rows in batch.items()}
            (loss_of(model, part) * (len(part["input_ids"]) / setting.size)).backward()
        optimizer.step()

    return step


def private(setting: Setting, *, users: bool = False) -> Step:
    model = setting.model()
    optimizer, batch = optimizer_of(model), setting.texts()
    common: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-6, "max_grad_norm": 1.0, "batch_size": setting.size}
    common |= {"dataset_size": 10**6, "steps": 10**6 if setting.bands == 1 else 1000, **({"unit": "user"} if users else {})}
    if setting.bands == 1:
        plan = Plan.dpsgd(**common)
    else:
        plan = Plan.dpftrl(**common, sampling="cyclic_poisson", noise=noise.Banded.square_root(bands=setting.bands))
    run = make_private(model, optimizer, plan, seed=0)
    owners = torch.arange(setting.size) // 4 if users else None

    def step() -> None:
        issued = stamp(batch, step=run.steps, examples=setting.size, units=owners, issue=run._on_issue)
        run._on_issue(issued)  # what the loader does, without the data
        for part in run.split(issued, setting.part):
            loss_of(model, part).backward()
        optimizer.step()

    return step


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits  # type: ignore[no-any-return]


def ghost(setting: Setting) -> Step:
    """Opacus: norms from activations, a second backward pass for the weighted sum; parts as virtual steps."""
    from opacus import PrivacyEngine

    bare = _Logits(setting.model())
    ids = setting.texts()["input_ids"]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, ids), batch_size=setting.size)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=bare,
        optimizer=optimizer_of(bare),
        data_loader=data,
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode="ghost",
        **options,
    )

    def step() -> None:
        for first in range(0, setting.size, setting.part):
            part = ids[first : first + setting.part]
            optimizer.zero_grad()
            scores = model(part)[:, :-1]
            criterion(scores.flatten(0, 1), part[:, 1:].flatten(), shape=scores.shape).backward()
            optimizer.signal_skip_step(do_skip=first + setting.part < setting.size)
            optimizer.step()

    return step


KINDS = {"plain": plain, "private": private, "users": lambda setting: private(setting, users=True), "opacus ghost": ghost}


# Measuring ----------------------------------------------------------------------------------------------------------------


def times_of(setting: Setting, kinds: list[str], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median CPU seconds of a step, and the median of their quotients to the first kind."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = {}
    for kind in kinds:
        try:
            steps[kind] = KINDS[kind](setting)
            steps[kind]()
        except Exception as error:  # noqa: BLE001 (a peer that cannot run the case is a result)
            steps.pop(kind, None)
            print(f"  {kind}: {type(error).__name__}: {' '.join(str(error).split())[:90]}", file=sys.stderr)
    times = interleaved(steps, rounds, time.process_time, 0.0)
    first = times[kinds[0]]
    ratios = {kind: median(t / p for t, p in zip(each, first, strict=True)) for kind, each in times.items()}
    return {kind: median(each) for kind, each in times.items()}, ratios


def in_a_child(found: Callable[[], Any]) -> Any:
    """What is found in a copy of this process, so that no heap is shared between measurements."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            files_in_memory()
            os.write(write, json.dumps(found()).encode())
        except BaseException:  # noqa: BLE001 (it ends here, and the parent finds no answer)
            traceback.print_exc()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def peak_of(kind: str, setting: Setting, *, alive: bool, once: bool = False, later: int = 2) -> tuple[float, float]:
    """Megabytes in the first two steps and in the ``later`` ones, in a process of its own; ``once``: no proof is repeated at random."""

    def found() -> tuple[float, float]:
        if alive:
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 100_000)
        if once:
            root.REPEAT_ONE_IN = 1 << 60  # else a step of many passes meets a repeated proof, and one of few does not
        KINDS[kind](replace(setting, hidden=16, layers=1, vocabulary=32, length=8, size=8))()  # loads modules, libraries, kernels
        return peaks(lambda: KINDS[kind](setting), later)

    held = in_a_child(found)
    return held[0], held[1]


def peaks(make: Callable[[], Step], later: int = 2) -> tuple[float, float]:
    """What this process holds at most, in MiB above what it holds now: in the first two steps, which also prove a model, and later."""
    ctypes.CDLL(None).malloc_trim(0)
    before = memory("VmRSS")
    found = []
    step: Step | None = None
    for steps in (2, later):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        step = step or make()
        for _ in range(steps):
            step()
        found.append(memory("VmHWM") - before)
    return found[0], found[1]


def _later(kind: str, setting: Setting, steps: int) -> float:
    """The peak of later steps, in a process of its own."""
    return peak_of(kind, setting, alive=True, once=True, later=steps)[1]


def sweep(modes: list[str], processes: int) -> dict[str, list[float]]:
    sizes = (64, 512, 4096)
    found = {}
    for mode in modes:
        small = Setting(mode=mode, hidden=64, layers=2)
        for kind in ("private", "users"):
            held = [median(_later(kind, replace(small, size=n), sizes[-1] // n) for _ in range(processes)) for n in sizes]
            data = [size * small.length * 16 / 2**20 for size in sizes]  # the batch itself: ids and mask
            own = [peak - batch for peak, batch in zip(held, data, strict=True)]
            found[f"{mode}, {kind}"] = own
            shown = ", ".join(f"{p:.1f}" for p in own)
            verdict = "PASS" if max(own) <= 1.05 * min(own) else "MISS"
            print(f"{mode}, {kind}: logical batch {sizes}: {shown} MB  {verdict}", flush=True)
    return found


def report(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    slow, large = TARGETS[mode]
    kinds = ["plain", "private", *(["opacus ghost"] if args.peers else [])]
    found: dict[str, Any] = {}
    for alive in () if args.no_memory else (False, True):  # before anything of this mode has run in this process
        held = {kind: [peak_of(kind, Setting(mode=mode), alive=alive) for _ in range(args.processes)] for kind in kinds}
        title = "alive" if alive else "with the heap as it is"
        found[title] = held
        for part, when in enumerate(("first steps, with the proof", "later steps")):
            middle = {kind: median(peak[part] for peak in each) for kind, each in held.items()}
            ratio = middle["private"] / middle["plain"]
            shown = ", ".join(f"{kind} {peak:.0f}" for kind, peak in middle.items())
            verdict = "PASS" if ratio <= large else "MISS"
            print(f"{mode}: MB {title}, {when}: {shown}; x {ratio:.2f}, target {large}  {verdict}", flush=True)
    if args.rounds:
        seconds, ratios = times_of(Setting(mode=mode), kinds, args.rounds)
        shown = ", ".join(f"{kind} x {ratio:.2f}" for kind, ratio in ratios.items() if kind != "plain")
        verdict = "PASS" if ratios["private"] <= slow else "MISS"
        print(f"{mode}: CPU s per step, plain {seconds['plain']:.3f}, {shown}; target {slow}  {verdict}", flush=True)
        found |= {"seconds": seconds, "ratios": ratios}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps; 0: none")
    parser.add_argument("--processes", type=int, default=5, help="of which each peak is the median")
    parser.add_argument("--peers", action="store_true", help="also Opacus ghost")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="logical batches of 64 to 4,096 instead")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = (
        {"sweep": sweep(args.mode, args.processes)} if args.sweep else {mode: report(mode, args) for mode in args.mode}
    )
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
