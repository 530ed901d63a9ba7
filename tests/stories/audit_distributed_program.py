"""A deep audit in several processes: the program that ``test_audit_loops`` starts."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import nullcontext
from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.noise import BLT
from hushgrad.testing.defects import DEFECTS
from hushgrad.train import Plan, make_private


def main(options: dict) -> dict:
    numbers = count(1000 * dist.get_rank())
    secrets.token_bytes = lambda size: hashlib.blake2b(next(numbers).to_bytes(4, "little"), digest_size=size).digest()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 6), torch.randint(3, (60,)))
    plan = Plan.dpftrl(noise_multiplier=2.0, delta=1e-5, batch_size=6, dataset_size=60, epochs=2, noise=BLT(buffers=2))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    private = make_private(model, torch.optim.Adam(model.parameters(), lr=0.02), plan)
    found = {}
    for name in (None, *options["defects"]):
        with nullcontext() if name is None else DEFECTS[name].plant():
            report = private.audit(data, nn.functional.cross_entropy)
        found[str(name)] = {"refuted_by": list(report.refuted_by), "text": str(report)}
    return found
