"""Large batches in little memory: a batch is cut into parts, each runs forward and backward, then one step is taken.

python examples/microbatches.py
"""

import torch
from torch import nn

from hushgrad.recipes import DATA, evaluate
from hushgrad.train import Plan, make_private


def main() -> float:
    data = DATA["digits"]()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    plan = Plan.dpsgd(epsilon=3, delta=1e-4, max_grad_norm=1.0, batch_size=600, dataset_size=1438, steps=60)
    private = make_private(model, optimizer, plan)

    for batch in private.loader(data.train):
        optimizer.zero_grad()
        for x, y in batch.split(64):  # at most 64 examples at a time; the result is that of the whole batch
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    print(private.spent())
    accuracy = evaluate(model, data.test)["test_accuracy"]
    print(f"Test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
