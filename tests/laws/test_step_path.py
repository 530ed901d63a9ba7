"""The walk of one batch: the ten stages, each once and in their order, over no more calls than before."""

import sys
from collections.abc import Callable
from itertools import pairwise
from operator import le
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hushgrad

HOME = str(Path(hushgrad.__file__).parent)
STAGES = [
    ("sampling/draws.py", "poisson_subset"),  # 1 who takes part
    ("train/stepping.py", "_on_issue"),  # 2 a batch, stamped
    ("clipping/site.py", "_after"),  # 3 inputs are kept
    ("clipping/site.py", "prepare"),  # 4 norms while gradients are hot
    ("train/stepping.py", "_check_passes"),  # 5 reconcile,
    ("clipping/record.py", "clipped"),  # norms to weights,
    ("clipping/rules/linear.py", "add_weighted"),  # one weighted pass
    ("noise/noise_rows.py", "rows"),  # 7 noise
    ("release/core.py", "add_up"),  # 6 over the processes, which share the noise, too
    ("train/guard.py", "charge"),  # charged before it is released
    ("release/core.py", "gradients"),  # 8 a fresh p.grad
    ("train/stepping.py", "_after_step"),  # 10
]
BY_LAYER = ("_after", "prepare", "add_weighted")
AT_MOST = {1: (110, 17, 55), 2: (130, 17, 64)}  # layers: calls, files, changes of file; they may shrink


def _walked(work: Callable[[], None]) -> list[tuple[str, str]]:
    """Every call inside hushgrad: (file, function)."""
    seen: list[tuple[str, str]] = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            seen.append((frame.f_code.co_filename[len(HOME) + 1 :], frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return seen


@pytest.fixture
def one_thread():
    """With several, noise asks whether they pay: one call more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("layers", AT_MOST)
def test_one_batch_walks_through_the_ten_stages_once(one_thread, layers):
    torch.manual_seed(0)
    model = nn.Linear(8, 3) if layers == 1 else nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hushgrad.Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=16, dataset_size=64, steps=6)
    private = hushgrad.make_private(model, optimizer, plan, seed=0)
    batches = iter(private.loader(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(4):  # proofs, and what else happens at powers of two
        step()
    seen = _walked(step)
    private.detach()
    places = [seen.index(stage) for stage in STAGES]
    assert places == sorted(places)
    assert all(seen.count(stage) == (layers if stage[1] in BY_LAYER else 1) for stage in STAGES)
    files = [file for file, _ in seen]
    changes = sum(a != b for a, b in pairwise(files))
    walked = len(seen), len(set(files)), changes
    assert all(map(le, walked, AT_MOST[layers])), walked
