"""With fully_shard: averages that are looked at between steps, and an interrupt in a probe; against runs of a whole model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hushgrad.denoise import Kalman
from hushgrad.train import Plan, make_private


class Stop(torch.autograd.Function):
    """Ctrl-C at the call with this number."""

    at = 0

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        Stop.at -= 1
        if Stop.at == 0:
            raise KeyboardInterrupt
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Stop.apply(torch.tanh(self.a(x))))


def _private(sharded: bool, **options):
    torch.manual_seed(0)
    model = Net()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = Plan.dpsgd(noise_multiplier=0.5, delta=1e-5, batch_size=6, dataset_size=24, steps=4, **options)
    return make_private(model, optimizer, plan, seed=3)


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator))


def _weights(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if isinstance(p, torch.distributed.tensor.DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole]).tolist()


def _averaged(sharded: bool) -> tuple[list[float], list[float]]:
    private, data = _private(sharded, average="ema"), _data()
    model, seen = private.model, []
    for x, y in private.loader(data):
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        private.optimizer.step()
        with torch.no_grad():
            model(data.tensors[0][:4])  # after which FSDP leaves the root's parameters whole
        with private.averaged(), torch.no_grad():
            seen.append(float(model(data.tensors[0][:4]).sum()))
    private.detach()
    return _weights(model), seen


def _interrupted(sharded: bool, at: int) -> list[float]:
    private = _private(sharded, denoise=Kalman(0.5, 0.5))
    for step, (x, y) in enumerate(private.loader(_data())):
        if step == 2:
            Stop.at = at

        def passes(x=x, y=y) -> None:
            private.optimizer.zero_grad()
            nn.functional.cross_entropy(private.model(x), y).backward()

        try:
            private.optimizer.step(passes)
        except KeyboardInterrupt:
            private.optimizer.step(passes)
    private.detach()
    return _weights(private.model)


def main(options: dict) -> dict:
    return {
        "averaged": [_averaged(sharded) for sharded in (False, True)],
        "interrupted": [_interrupted(False, 0), *(_interrupted(True, at) for at in (1, 2))],
    }
