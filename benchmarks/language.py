"""What private fine-tuning of a causal language model costs: time and peak memory against the plain run, LoRA and full.

    python benchmarks/language.py [--mode lora full] [--rounds 7] [--sweep] [--json out.json]

A Llama from a config (random weights; hidden 256, 4 layers, 2,048 tokens, length 64), AdamW, a logical batch of 32 in parts of 8. Time is
CPU time (one thread) of whole steps, plain and private in turn in one process, median of the quotients. Memory is the peak of a process of
its own above what it held after its imports: as it is, and (alive) with a C library that gives freed blocks back at once. ``--sweep``:
logical batches of 64 to 4,096 in parts of 8, private, for examples and for users of 4 examples each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from models import memory
from torch import Tensor, nn

from hushgrad.integrations.huggingface import token_loss
from hushgrad.sampling.batch import stamp
from hushgrad.train import Plan, make_private

warnings.filterwarnings("ignore")
PART, LENGTH, VOCABULARY = 8, 64, 2048
TARGETS = {"lora": (1.2, 1.1), "full": (1.3, 1.3)}  # time, peak memory above the imports
Step = Callable[[], None]


def model_of(mode: str, *, hidden: int = 256, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3 // 8 * 8, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    if mode == "lora":
        import peft

        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, target_modules="all-linear")
        model = peft.get_peft_model(model, adapter)
    return model.train()


def texts(count: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["input_ids"], shift=True
    )


def plain(model: nn.Module, size: int) -> Step:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = texts(size)

    def step() -> None:
        optimizer.zero_grad()
        for first in range(0, size, PART):
            part = {name: rows[first : first + PART] for name, rows in batch.items()}
            (loss_of(model, part) * (len(part["input_ids"]) / size)).backward()
        optimizer.step()

    return step


def private(model: nn.Module, size: int, *, users: bool = False) -> Step:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    unit = {"unit": "user"} if users else {}
    plan = Plan.dpsgd(
        noise_multiplier=1.0, delta=1e-6, max_grad_norm=1.0, batch_size=size, dataset_size=10**6, steps=10**6, **unit
    )
    run = make_private(model, optimizer, plan, seed=0)
    batch, owners = texts(size), torch.arange(size) // 4 if users else None

    def step() -> None:
        issued = stamp(batch, step=run.steps, examples=size, units=owners, issue=run._on_issue)
        run._on_issue(issued)  # what the loader does, without the data
        for part in run.split(issued, PART):
            loss_of(model, part).backward()
        optimizer.step()

    return step


def time_of(mode: str, rounds: int) -> tuple[float, float, float]:
    """Median CPU seconds of a step, plain and private, and the median of their quotients."""
    torch.set_num_threads(1)
    steps = {"plain": plain(model_of(mode), 32), "private": private(model_of(mode), 32)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    quotients = [b / a for a, b in zip(times["plain"], times["private"], strict=True)]
    return median(times["plain"]), median(times["private"]), median(quotients)


def peak_of(kind: str, mode: str, size: int, *, alive: bool, small: bool = False) -> float:
    """Megabytes, in a process of its own."""
    command = [sys.executable, __file__, "--peak", kind, "--mode", mode, "--size", str(size), *(["--small"] if small else [])]
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "100000"} if alive else {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return float(done.stdout.strip().splitlines()[-1])


def _peak(kind: str, mode: str, size: int, *, small: bool) -> float:
    torch.set_num_threads(1)
    if mode == "lora":
        import peft  # noqa: F401
    before = memory("VmRSS")
    model = model_of(mode, hidden=64, layers=2) if small else model_of(mode)
    step = plain(model, size) if kind == "plain" else private(model, size, users=kind == "users")
    step()
    step()
    return memory("VmHWM") - before


def sweep() -> dict[str, list[float]]:
    sizes = (64, 256, 1024, 4096)
    found = {}
    for mode in ("lora", "full"):
        for kind in ("private", "users"):
            peaks = [peak_of(kind, mode, size, alive=True, small=True) for size in sizes]
            data = [size * LENGTH * 16 / 2**20 for size in sizes]  # the batch itself: ids and mask
            own = [peak - held for peak, held in zip(peaks, data, strict=True)]
            found[f"{mode}, {kind}"] = own
            shown = ", ".join(f"{p:.1f}" for p in own)
            print(
                f"{mode}, {kind}: logical batch {sizes}: {shown} MB  {'PASS' if max(own) <= 1.05 * min(own) else 'MISS'}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="logical batches of 64 to 4,096 instead")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON")
    parser.add_argument("--peak", choices=["plain", "private", "users"], help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=32, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(_peak(args.peak, args.mode[0], args.size, small=args.small))
        return
    figures: dict[str, Any] = {"sweep": sweep()} if args.sweep else {}
    for mode in [] if args.sweep else args.mode:
        slow, large = TARGETS[mode]
        a, b, ratio = time_of(mode, args.rounds)
        print(
            f"{mode}: CPU s per step, plain {a:.3f}, private {b:.3f}, x {ratio:.2f}; target {slow}  {'PASS' if ratio <= slow else 'MISS'}"
        )
        figures[mode] = {"plain s": a, "private s": b, "time": ratio}
        for alive in () if args.no_memory else (False, True):
            one, other = (peak_of(kind, mode, 32, alive=alive) for kind in ("plain", "private"))
            title = "alive" if alive else "with the heap as it is"
            good = other <= large * one
            print(
                f"   MB {title}: plain {one:.0f}, private {other:.0f}, x {other / one:.2f}; target {large}  {'PASS' if good else 'MISS'}"
            )
            figures[mode][title] = [one, other]
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
