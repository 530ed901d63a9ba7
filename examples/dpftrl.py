"""DP-FTRL: correlated noise. The data are passed in one fixed order; nothing about the batches needs to be random.

python examples/dpftrl.py
"""

import torch
from torch import nn

from hushgrad import noise
from hushgrad.recipes import DATA, evaluate
from hushgrad.train import Plan, fit


def main() -> float:
    data = DATA["digits"]()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)

    # Four buffers of noise are carried from step to step, so that later noise takes back a part of earlier noise.
    plan = Plan.dpftrl(
        epsilon=8, delta=1e-4, max_grad_norm=1.0, batch_size=180, dataset_size=1438, epochs=8, noise=noise.BLT(buffers=4)
    )
    print(plan)
    print(fit(model, nn.CrossEntropyLoss(), optimizer, data.train, plan))

    accuracy = evaluate(model, data.test)["test_accuracy"]
    print(f"Test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
