"""The smallest private training run: an ordinary PyTorch loop and three lines more.

python examples/minimal.py
"""

import torch
from torch import nn

from hushgrad.recipes import DATA, evaluate
from hushgrad.train import Plan, make_private


def main() -> float:
    data = DATA["digits"]()  # 1,438 images of hand-written digits to train on, 359 to test on
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    # What to spend, and on what. The plan chooses the noise; it is public and can be printed, stored and sent.
    plan = Plan.dpsgd(epsilon=3, delta=1e-4, max_grad_norm=1.0, batch_size=256, dataset_size=1438, epochs=20)
    print(plan)

    # From here on, optimizer.step() sees privatised gradients only. Model and optimizer keep their types.
    private = make_private(model, optimizer, plan)

    # One loop over the loader is the whole run, all epochs. Batches are random, so their sizes vary.
    for x, y in private.loader(data.train):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()

    print(private.spent())
    accuracy = evaluate(model, data.test)["test_accuracy"]
    print(f"Test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
