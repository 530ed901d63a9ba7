"""DP-FTRL with BLT noise on several processes; parameters, optimizer state and noise buffers are sharded.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed/fsdp.py runs/fsdp

Kill one of the processes: the others end with one error, torchrun starts them all again, and the run goes on where its last
checkpoint was. Or stop it and go on with another --nproc-per-node: the noise is the same, bit for bit. Without torchrun the
same script trains on one process.
"""

import datetime
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hushgrad.noise import BLT
from hushgrad.recipes import DATA
from hushgrad.train import Checkpoint, Plan, make_private

PLAN = Plan.dpftrl(epsilon=8, delta=1e-4, max_grad_norm=1.0, batch_size=256, dataset_size=1438, epochs=8, noise=BLT(buffers=3))


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 65), nn.ReLU(), nn.Linear(65, 10))
    if dist.is_initialized():
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    return model


def main(directory: str | None = None) -> float:
    data = DATA["digits"]()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    private = make_private(model, optimizer, PLAN)
    checkpoint = None if directory is None else Checkpoint(directory, private)  # in a directory that all processes see
    if checkpoint is not None and checkpoint.resumed:
        print(f"goes on at step {private.steps}")
    for batch in private.loader(data.train) if private.steps < PLAN.steps else ():
        optimizer.zero_grad()
        for x, y in private.split(batch, 64):  # equally many parts in every process; those of nobody are run as well
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if checkpoint is not None:
            checkpoint.save()
    x, y = (
        torch.stack(column) if isinstance(column[0], torch.Tensor) else torch.tensor(column)
        for column in zip(*data.test, strict=True)
    )
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"test accuracy {accuracy:.3f}; {private.spent()}")
    return accuracy


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as here:
            main(None if dist.is_initialized() else here)
    if dist.is_initialized():
        dist.destroy_process_group()
