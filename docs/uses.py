"""What a user does with each extra, as small programs that ``installed.py`` runs where the extra was installed.

What the documentation prints is taken from its pages as it stands there.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def printed(page: str, *numbers: int) -> str:
    """These blocks of a page's Python, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.S)
    return "\n".join(blocks[number] for number in numbers)


PLAN = """
import torch
from hushgrad.train import Plan
plan = Plan.dpsgd(epsilon=3, delta=1e-3, max_grad_norm=1.0, batch_size=16, dataset_size=64, epochs=3)
"""
SKLEARN = """
import numpy as np, hushgrad
X = np.random.default_rng(0).normal(size=(200, 3))
y = (X[:, 0] > 0).astype(int)
hushgrad.estimators.DPLogisticRegression(epsilon=1.0, delta=1e-6, data_norm=4.0).fit(X, y).predict(X)
"""
TRL = """
import torch, transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig
from hushgrad.integrations.trl import PrivateSFTTrainer

words = {"[PAD]": 0, "[EOS]": 1, **{f"w{i}": i for i in range(2, 50)}}
made = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, pad_token_id=0, eos_token_id=1, **sizes))
pairs = Dataset.from_list([{"prompt": f"w{2 + i % 40} w3", "completion": f" w{3 + i % 40} w5"} for i in range(64)])
args = SFTConfig("out", save_strategy="no", max_length=32, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False)
trainer = PrivateSFTTrainer(model, args, plan, train_dataset=pairs, processing_class=tokenizer)
trainer.train()
assert trainer.private.steps == plan.steps
print(trainer.spent())
"""
TENSORBOARD = """
from pathlib import Path
import torch, hushgrad
from hushgrad.train.callbacks import TensorBoard
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hushgrad.fit(model, torch.nn.CrossEntropyLoss(), optimizer, data, plan, callbacks=[TensorBoard("logs")], progress=False)
assert [file for file in Path("logs").iterdir() if "tfevents" in file.name and file.stat().st_size > 200]
"""
IMAGES = """
from pathlib import Path
from PIL import Image
from hushgrad.cli.main import main
for i in range(64):
    place = Path("pictures") / "cd"[i % 2]
    place.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), 40 + 150 * (i % 2)).save(place / f"{i}.png")
Path("pictures.toml").write_text('[model]\\nname = "logistic"\\n[data]\\nname = "images"\\npath = "pictures"\\nclasses = ["c", "d"]\\n'
    'height = 8\\nwidth = 8\\nchannels = 1\\n[plan]\\nnoise_multiplier = 1.0\\ndelta = 1e-3\\nbatch_size = 16\\nsteps = 5\\n')
assert main(["train", "pictures.toml", "--out", "seen", "--quiet"]) == 0
"""
TRITON = """
from hushgrad.testing.doctor import _triton
assert _triton().startswith("equal"), _triton()
"""
SERVER = """
from hushgrad.budget import Ledger
from hushgrad.events import PureDP
ledger = Ledger.create({url!r})
ledger.add("people", epsilon=1.0, delta=1e-6)
run = ledger.reserve("people", PureDP(0.5))
ledger.begin(run)
ledger.commit(run, PureDP(0.5))
assert Ledger({url!r}).verify().ok and Ledger({url!r}).status("people").epsilon >= 0.5
"""

USES = {
    "sklearn": SKLEARN,
    "hf": printed("integrations.md", 0, 1),
    "trl": PLAN + TRL,
    "lightning": PLAN + printed("integrations.md", 2),
    "federated": printed("federated.md", 0, 1),
    "tensorboard": PLAN + TENSORBOARD,
    "images": IMAGES,
    "triton": TRITON,
}
