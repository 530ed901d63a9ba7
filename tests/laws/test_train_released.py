"""Everything that leaves a run is watched: what the forward pass writes into the state_dict is refused before a step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.errors import CaptureError, HushgradError
from hushgrad.train import Plan, make_private

N = 16


class _Keeper(nn.Module):
    """A linear layer beside something that ``keep`` writes to in the forward pass."""

    def __init__(self, keep):
        super().__init__()
        self.last, self.keep = nn.Linear(6, 2), keep
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(6))
        self.register_buffer("cache", torch.zeros(6), persistent=False)
        self.extra = None

    def forward(self, x):
        if self.training:
            self.keep(self, x.detach().mean(0))
        return self.last(x)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@torch.no_grad()
def _copied(module, mean):
    module.frozen.copy_(mean)


def _assigned(module, mean):
    module.frozen.data = mean


def _replaced(module, mean):
    module.frozen = nn.Parameter(mean, requires_grad=False)


def _registered(module, mean):
    if "late" not in dict(module.named_parameters()):
        module.late = nn.Parameter(mean, requires_grad=False)


def _said(module, mean):
    module.extra = {"seen": mean}


def _counted(module, mean):
    module.extra = int(mean[0] > 0) + (module.extra or 0) + 1


KEPT = {
    "frozen, copy_": _copied,
    "frozen, .data.mul_": lambda module, mean: module.frozen.data.mul_(0.9).add_(0.1 * mean),
    "frozen, .data =": _assigned,
    "frozen, replaced": _replaced,
    "frozen, registered late": _registered,
    "buffer, .data": lambda module, mean: module.buffer.data.copy_(mean),
    "buffer, in place": lambda module, mean: module.buffer.copy_(mean),
    "extra state, a tensor": _said,
    "extra state, a number": _counted,
    "trained, .data": lambda module, mean: module.last.weight.data[0].add_(mean),
}


def _run(model, data, steps=3, every=1):
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=N, steps=steps)
    private = make_private(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), plan, seed=0)
    try:
        for x, y in private.loader(data):
            private.optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            private.optimizer.step()
    finally:
        private.detach()
        model.taken = private.steps


def _numbers():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(N, 6), torch.randint(2, (N,)))


@pytest.mark.parametrize("how", KEPT)
def test_what_the_data_writes_into_the_state_dict_is_refused_before_anything_is_released(how):
    model = _Keeper(KEPT[how])
    with pytest.raises(HushgradError):
        _run(model, _numbers())
    assert model.taken == 0


def test_a_cache_outside_the_state_dict_may_be_filled():
    model = _Keeper(lambda module, mean: module.cache.copy_(torch.arange(6.0)))
    _run(model, _numbers())
    assert model.taken == 3


class _Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.passes += 1
        return x


@pytest.mark.parametrize("kept", ["a counter", "vectors"])
def test_what_says_nothing_of_the_data_may_stay_outside_the_state_dict_as_the_refusal_says(kept):
    first = nn.Linear(6, 4)
    model = nn.Sequential(_Count() if kept == "a counter" else nn.Identity(), first, nn.Tanh(), nn.Linear(4, 2))
    if kept == "vectors":
        nn.utils.parametrizations.spectral_norm(first)
    for _ in range(3):
        try:
            _run(model, _numbers())
            break
        except CaptureError as refused:
            code = str(refused).partition("before make_private, call ")[2].rstrip(".")
        eval(code)  # what a person would paste
    assert model.taken == 3 and not any("_u" in name or "passes" in name for name in model.state_dict())


def test_what_is_written_with_the_same_value_is_no_change():
    model = _Keeper(lambda module, mean: (module.buffer.copy_(torch.zeros(6)), module.frozen.data.zero_()))
    _run(model, _numbers())
    assert model.taken == 3


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_a_frozen_table_that_is_renormed_by_the_data_is_refused(layer):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.last = layer(20, 4, max_norm=0.5), nn.Linear(4, 2)
            self.table.weight.requires_grad_(False)

        def forward(self, ids):
            out = self.table(ids)
            return self.last(out if out.dim() == 2 else out.mean(1))

    torch.manual_seed(0)
    model = Table()
    with pytest.raises(HushgradError):
        _run(model, TensorDataset(torch.randint(3, (N, 5)), torch.randint(2, (N,))))
    assert model.taken == 0


def test_a_writer_that_begins_late_is_found_at_the_next_look_by_value():
    calls = [0]

    def late(module, mean):
        calls[0] += 1
        if calls[0] > 20:
            module.frozen.data.add_(mean)

    model = _Keeper(late)
    with pytest.raises(CaptureError, match="frozen"):
        _run(model, _numbers(), steps=64)
    assert model.taken <= 32


def test_lora_like_models_with_frozen_parts_train():
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    data = _numbers()
    before = model[0].weight.clone()
    model.taken = 0
    _run(model, data)
    assert model.taken == 3 and torch.equal(before, model[0].weight)
