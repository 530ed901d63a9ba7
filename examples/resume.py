"""Checkpoints: a run that is stopped at any instant and resumed ends with the very same weights.

python examples/resume.py
"""

import itertools
import tempfile

import torch
from torch import nn

from hushgrad.recipes import DATA
from hushgrad.train import Checkpoint, Plan, make_private

PLAN = Plan.dpsgd(epsilon=3, delta=1e-4, max_grad_norm=1.0, batch_size=256, dataset_size=1438, steps=40)


def train(directory: str, key: bytes | None, steps: int) -> nn.Module:
    """Take up to ``steps`` steps, beginning where the checkpoint in ``directory`` ended."""
    data = DATA["digits"]()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    private = make_private(model, optimizer, PLAN, key=key)
    checkpoint = Checkpoint(directory, private)  # takes up the key and the state that it finds there
    for x, y in itertools.islice(private.loader(data.train), steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        checkpoint.save()
    print(f"after step {private.steps}: {private.spent()}")
    return model


def main() -> bool:
    key = bytes(range(32))  # given only to compare two runs; leave it out, and it comes from the operating system
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        whole = train(one, key, 40)
        train(two, key, 15)  # ... the machine goes down ...
        resumed = train(two, None, 25)
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    print(f"Bit-identical: {same}")
    return same


if __name__ == "__main__":
    main()
