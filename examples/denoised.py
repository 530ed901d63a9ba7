"""Denoising: filters on the privatised gradients. They are post-processing and cost no privacy.

python examples/denoised.py
"""

import torch
from torch import nn

from hushgrad import denoise
from hushgrad.recipes import DATA, evaluate
from hushgrad.train import Plan, fit


def main() -> dict[str, float]:
    data = DATA["digits"]()
    accuracies = {}
    for name, filter_ in {"none": None, "Laplacian smoothing": denoise.Laplacian(1.0), "Kalman (DiSK)": denoise.Kalman()}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        plan = Plan.dpsgd(epsilon=1, delta=1e-4, max_grad_norm=1.0, batch_size=256, dataset_size=1438, steps=100, denoise=filter_)
        guarantee = fit(model, nn.CrossEntropyLoss(), optimizer, data.train, plan, progress=False)
        accuracies[name] = evaluate(model, data.test)["test_accuracy"]
        print(f"{name:20} test accuracy {accuracies[name]:.1%}   epsilon {guarantee.epsilon:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
