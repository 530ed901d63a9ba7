"""What the loop does between a pass and its backward: hooks on nodes of the graph, and state that it puts back before anybody looks."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.data import TensorDataset

import hushgrad


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, model):
        ctx.model = model
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.model.scale, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head, self.scale = nn.Linear(4, 8), nn.Linear(8, 2), 1.0

    def forward(self, x):
        return self.head(Scaled.apply(self.layer(x), self).tanh())


def centred(g):
    return g - g.mean(0)


def scaled(model, made):
    model.scale = float(made.detach().abs().mean())


BETWEEN = {
    "nothing": lambda model, made: None,
    "before the last node": lambda model, made: made.grad_fn.register_prehook(lambda gs: tuple(map(centred, gs))),
    "after the last node": lambda model, made: made.grad_fn.register_hook(lambda gs, _: tuple(g and g for g in gs[:0]) or None),
    "further down": lambda model, made: made.grad_fn.next_functions[1][0].register_prehook(lambda gs: tuple(map(centred, gs))),
    "several tensors": lambda model, made: register_multi_grad_hook([made], lambda gs: gs[0].copy_(centred(gs[0]))),
    "state that is put back": scaled,
}


@pytest.mark.parametrize("between", BETWEEN)
def test_what_the_loop_does_between_a_pass_and_its_backward_is_vouched_for(between):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hushgrad.Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=24, steps=4)
    private = hushgrad.make_private(model, optimizer, plan)
    loss = private.loss(nn.CrossEntropyLoss())
    for x, y in private.loader(TensorDataset(torch.randn(24, 4), torch.randint(2, (24,)))):
        optimizer.zero_grad()
        made = model(x)
        BETWEEN[between](model, made)
        loss(made, y).backward()
        model.scale = 1.0
        optimizer.step()
    notes = [note for note in private.spent().notes if "vouched for by the user" in note]
    private.detach()
    assert bool(notes) == (between != "nothing"), notes


def written(model, by):
    with torch.no_grad():
        model.head.weight.mul_(by)


def unseen(model, by):
    model.head.weight.data.mul_(by)


def elsewhere(model, by):
    model.head.weight.data = model.head.weight.data * by


WRITES = [(at, write) for at in ("before the pass", "before the backward") for write in (None, written, unseen, elsewhere)]
WRITES.remove(("before the backward", written))  # torch refuses that


@pytest.mark.parametrize(("at", "write"), WRITES, ids=lambda one: getattr(one, "__name__", str(one)))
@pytest.mark.parametrize("parts", [False, True])
def test_weights_that_the_loop_puts_back_before_the_step_are_vouched_for(at, write, parts):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = hushgrad.Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=16, dataset_size=24, steps=4)
    private = hushgrad.make_private(model, optimizer, plan)
    loss = private.loss(nn.CrossEntropyLoss())
    for batch in private.loader(TensorDataset(torch.randn(24, 4), torch.randint(2, (24,)))):
        optimizer.zero_grad()
        for x, y in batch.split(5) if parts else [batch]:
            kept = model.head.weight.detach().clone()
            if write is not None and at == "before the pass":
                write(model, 1.0 + float(x.abs().max()))
            made = loss(model(x), y)
            if write is not None and at == "before the backward":
                write(model, 1.0 + float(x.abs().max()))
            made.backward()
            model.head.weight.data.copy_(kept)
        optimizer.step()
    notes = [note for note in private.spent().notes if "vouched for by the user" in note]
    private.detach()
    assert bool(notes) == (write is not None), notes
