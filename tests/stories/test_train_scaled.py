"""A GradScaler is refused in one sentence, whichever way it is used; a factor of the user's own is part of the loss."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.train import Plan, make_private

F = nn.functional
SENTENCE = "A GradScaler scales this run's loss.*Train in bfloat16"


def data():
    g = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(40, 4, generator=g), torch.randint(2, (40,), generator=g))


def run(model=None, **adam):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, batch_size=10, dataset_size=40, steps=3)
    return make_private(model, torch.optim.Adam(model.parameters(), lr=0.1, **adam), plan, seed=1)


def weights(private):
    return torch.cat([p.detach().flatten() for p in private.model.parameters()]).clone()


def used():
    """A scaler that has scaled somebody else's loss already."""
    scaler, other = torch.amp.GradScaler("cpu"), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler.scale(other(torch.ones(3, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler


def swallowed(scaler, loss):
    with suppress(CaptureError):
        scaler.scale(loss()).backward()


def stepped(scaler, loss, optimizer):
    swallowed(scaler, loss)
    optimizer.step()


def stepped_by_scaler(scaler, loss, optimizer):
    swallowed(scaler, loss)
    scaler.step(optimizer)


def unscaled_before(scaler, loss, optimizer):
    swallowed(scaler, loss)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    scaler.step(optimizer)


def unscaled_and_stepped(scaler, loss, optimizer):
    swallowed(scaler, loss)
    scaler.unscale_(optimizer)
    optimizer.step()


def not_scaled_but_stepped(scaler, loss, optimizer):
    loss().backward()
    scaler.step(optimizer)


def not_scaled_but_unscaled(scaler, loss, optimizer):
    loss().backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def in_a_closure(scaler, loss, optimizer):
    optimizer.step(lambda: scaler.scale(loss()).backward())


WAYS = [
    lambda scaler, loss, optimizer: scaler.scale(loss()).backward(),
    lambda scaler, loss, optimizer: sum(scaler.scale([loss(), torch.ones(())])).backward(),
    lambda scaler, loss, optimizer: sum(scaler.scale(part for part in [loss()])).backward(),
    lambda scaler, loss, optimizer: (0.5 * scaler.scale(loss())).backward(),
    stepped,
    stepped_by_scaler,
    unscaled_before,
    unscaled_and_stepped,
    not_scaled_but_stepped,
    not_scaled_but_unscaled,
    in_a_closure,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fused", "own"), [(False, False), (True, True)], ids=["ordinary", "fused, loss of the run"])
def test_every_way_ends_in_the_sentence_and_the_run_goes_on_without(way, fused, own):
    private, scaler = run(fused=fused), used()
    fn = private.loss(F.cross_entropy) if own else F.cross_entropy
    before = weights(private)
    x, y = next(iter(private.loader(data())))
    with pytest.raises(CaptureError, match=SENTENCE):
        way(scaler, lambda: fn(private.model(x), y), private.optimizer)
    assert torch.equal(weights(private), before) and private.steps == 0
    for x, y in private.loader(data()):
        fn(private.model(x), y).backward()
        private.optimizer.step()
    assert private.steps == 3
    private.detach()


def test_it_leaves_nothing_behind_and_nobody_else_notices():
    gc.collect()  # runs of other tests
    scale, plain = torch.amp.GradScaler.scale, torch.optim.Adam(nn.Linear(1, 1).parameters())
    private = run()
    used()  # an ordinary model beside the private one
    private.detach()
    assert torch.amp.GradScaler.scale is scale
    assert vars(private.optimizer).keys() == vars(plain).keys()
    fused = run(fused=True)
    fused.detach()
    assert fused.optimizer._step_supports_amp_scaling


def test_a_factor_of_the_users_own_and_a_scaler_that_is_off_are_taken():
    private, off = run(), torch.amp.GradScaler("cpu", enabled=False)
    for x, y in private.loader(data()):
        off.scale(2.0**16 * F.cross_entropy(private.model(x), y)).backward()
        off.unscale_(private.optimizer)
        off.step(private.optimizer)
        off.update()
    assert private.steps == 3
    private.detach()


def test_accelerate():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'hushgrad[hf]'")
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator, private = accelerate.Accelerator(cpu=True), run()
    accelerator.scaler = used()  # what mixed_precision="fp16" makes, which needs a GPU
    optimizer = AcceleratedOptimizer(private.optimizer, scaler=accelerator.scaler)
    x, y = next(iter(private.loader(data())))
    with pytest.raises(CaptureError, match=SENTENCE):
        accelerator.backward(F.cross_entropy(private.model(x), y))
    with pytest.raises(CaptureError, match=SENTENCE):
        optimizer.step()
    assert private.steps == 0
    private.detach()


def _lightning(given):
    """Lightning with a scaler, in a module that makes itself private."""
    lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'hushgrad[lightning]'")
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.private = run(self.layer)

        def training_step(self, batch, _):
            x, y = batch
            return F.cross_entropy(self.layer(x), y)

        def configure_optimizers(self):
            return self.private.optimizer

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Module(), lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, plugins=[plugin], **quiet, **given)


def test_lightning():
    module, trainer = _lightning({})
    with pytest.raises(CaptureError, match=SENTENCE):
        trainer.fit(module, DataLoader(data(), batch_size=10))
    assert module.private.steps == 0
    module.private.detach()


def test_lightnings_callback_refuses_at_the_start():
    from hushgrad.integrations.lightning import PrivateFit

    module, _ = _lightning({})
    module.private.detach()
    _, trainer = _lightning({"callbacks": [PrivateFit(module.private.plan, data())]})
    with pytest.raises(ArgumentError, match="16-mixed"):
        trainer.fit(module, DataLoader(data(), batch_size=10))
