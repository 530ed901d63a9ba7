"""Privacy of whole users: all examples of a person count as one, however many they are.

python examples/user_level.py
"""

import numpy as np
import torch
from torch import nn

from hushgrad.recipes import DATA, evaluate
from hushgrad.train import Plan, make_private


def main() -> float:
    data = DATA["digits"]()
    users = 400
    owner = np.random.default_rng(0).integers(users, size=len(data.train))  # who wrote which image; here invented

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    # dataset_size and batch_size count users now: each user's gradients are summed, and the sum is clipped.
    plan = Plan.dpsgd(epsilon=8, delta=1e-4, max_grad_norm=1.0, batch_size=80, dataset_size=users, epochs=10, unit="user")
    private = make_private(model, optimizer, plan)
    for x, y in private.loader(data.train, groups=owner):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    print(private.spent())  # ... per user
    accuracy = evaluate(model, data.test)["test_accuracy"]
    print(f"Test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
