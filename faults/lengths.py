"""How far a long text moves a clipped sum where all texts are padded to the longest of their batch.

    python faults/lengths.py --tries 400 --seed 7           # single precision
    python faults/lengths.py --tries 40 --half               # what a run refuses

Each try is a random small language model (Llama or GPT-2: attention, norms, rotary or learned positions), 1 to 24 other texts, of which
all are alike in every other try (so that their roundings add up), and one long text that comes or does not come. Attention masks the
padding, so that in real numbers nobody else moves. The figure is ‖S(D) - S(D - r)‖ / C, at most 1 in real numbers.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hushgrad.clipping import Capture
from hushgrad.clipping.flat import Flat
from hushgrad.train.invariant_sizes import InvariantSizes

TOKENS = 40
EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def model_of(lot: random.Random) -> nn.Module:
    """A random small language model, with weights of a random size."""
    heads, layers = lot.choice((1, 2, 4)), lot.choice((1, 2, 3))
    width = heads * lot.choice((8, 16, 20))
    torch.manual_seed(lot.randrange(2**31))
    spread = lot.choice((0.02, 0.1, 0.3))
    if lot.random() < 0.5:
        off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 256}
        return GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, initializer_range=spread, **EAGER, **sizes, **off))
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": heads}
    tied = lot.random() < 0.5
    return LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, initializer_range=spread, tie_word_embeddings=tied, **EAGER, **sizes))


def texts_of(lot: random.Random) -> tuple[list[list[int]], list[int]]:
    """The others, and a long one."""
    most = lot.choice((6, 20, 60))
    others = [[lot.randrange(TOKENS) for _ in range(lot.randint(3, most))] for _ in range(lot.choice((1, 3, 5, 11, 24)))]
    if lot.random() < 0.5:
        others = [others[0]] * len(others)
    return others, [lot.randrange(TOKENS) for _ in range(most + lot.choice((1, 3, 8, 40)))]


def hidden(mask: Tensor) -> Tensor:
    """What is added to a text's scores: nothing where an earlier token is read.

    Transformers leaves a mask of two dimensions out where it hides nothing, which is a branch by the data.
    """
    seen = mask[:, None, None, :].bool() & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def summed(model: nn.Module, texts: list[list[int]], clip: float, *, half: bool) -> dict[str, Tensor]:
    """The clipped sum over these texts, each one's loss the mean over its own tokens."""
    counted = len(texts)
    texts = texts + texts[:1] * (InvariantSizes.of(model).sizes.rows(counted) - counted)  # as a run fills them up
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    capture = Capture(model, loss_reduction="sum", check_isolation=False)
    capture.attach()
    capture.examples(len(texts), padding=len(texts) - counted)
    with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        scores = model(input_ids=ids, attention_mask=hidden(mask)).logits.float()
    losses = nn.functional.cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]
    (losses.sum(1) / mask[:, 1:].sum(1)).sum().backward()
    made = dict(capture.collect(Flat(clip)).raw_sums)
    capture.detach()
    return made


def moved(tries: int, seed: int, *, half: bool) -> Iterator[float]:
    """By how many times C the long text moves the sum, a number for each try."""
    lot = random.Random(seed)
    for _ in range(tries):
        model, (others, record) = model_of(lot), texts_of(lot)
        clip = 10.0 ** lot.uniform(-3, 0)
        place = lot.randrange(len(others) + 1)
        there = summed(model, [*others[:place], record, *others[place:]], clip, half=half)
        gone = summed(model, others, clip, half=half)
        apart = sum(float((there[name].double() - gone[name].double()).square().sum()) for name in there)
        yield apart**0.5 / clip


def main() -> None:
    """Say how far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--half", action="store_true")
    options = parser.parse_args()
    found = sorted(moved(options.tries, options.seed, half=options.half))
    print(f"{len(found)} tries, seed {options.seed}: at most {found[-1]:.7f} C, median {found[len(found) // 2]:.7f} C")


if __name__ == "__main__":
    main()
