"""Lightning's Trainer and Fabric with a plan: their steps are those of a plain loop."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'hushgrad[lightning]'")

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy  # noqa: E402

from hushgrad.errors import ArgumentError, CaptureError, NotIsolated  # noqa: E402
from hushgrad.integrations.lightning import PrivateFit, PrivateProcesses, _require_strategy  # noqa: E402
from hushgrad.train import Plan, make_private  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*(num_workers|dataloader|val_dataloader|Checkpoint directory)")


class Classifier(lightning.LightningModule):
    def __init__(self, *hidden, direct=False, optimizers=1):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), *hidden, nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
        self.direct, self.optimizers_wanted = direct, optimizers

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x) if self.direct else self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if self.optimizers_wanted == 2:
            return [optimizer, torch.optim.SGD(self.parameters(), lr=0.1)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data():
    rng = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(12, 4, generator=rng), torch.randint(3, (12,), generator=rng))


def a_plan(steps=10):
    return Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, max_grad_norm=0.5, batch_size=2, dataset_size=12, steps=steps)


def trainer(*callbacks, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(callbacks=list(callbacks), accelerator="cpu", devices=1, **{"max_epochs": 1, **quiet, **options})


def same(one, other):
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def plain_loop(module):
    """The same run without Lightning's Trainer."""
    config = module.configure_optimizers()
    optimizer, schedule = config["optimizer"], config["lr_scheduler"]["scheduler"]
    private = make_private(module, optimizer, a_plan(), seed=2)
    torch.manual_seed(1)  # for the dropout
    sizes = []
    for batch in private.loader(data()):
        sizes.append(batch.examples - batch.padding)
        optimizer.zero_grad()
        x, y = batch
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        schedule.step()
    assert 0 in sizes  # an empty batch was among them
    return private


class Seeded(lightning.Callback):
    def on_train_start(self, trainer, pl_module):
        torch.manual_seed(1)


def test_fit_is_a_plain_loop():
    module, private = Classifier(), PrivateFit(a_plan(), data(), seed=2)
    plain = copy.deepcopy(module)
    fit = trainer(private, Seeded())
    fit.fit(module, private.loader)
    expected = plain_loop(plain)
    assert same(module, plain)
    assert private.private.steps == fit.global_step == 10
    assert private.spent() == expected.spent()
    assert fit.logged_metrics["epsilon"] == pytest.approx(private.spent().epsilon)
    # The model is an ordinary one again.
    make_private(module, torch.optim.SGD(module.parameters(), lr=0.1), a_plan()).detach()
    with pytest.raises(ArgumentError, match="a PrivateFit for each fit"):
        trainer(private).fit(module, private.loader)


def test_a_budget_ends_the_fit():
    budget = a_plan(4).guarantee().epsilon * 1.0001
    module, private = Classifier(), PrivateFit(a_plan(), data(), seed=2, max_epsilon=budget)
    trainer(private).fit(module, private.loader)
    assert private.private.steps == 4
    assert private.spent().epsilon <= budget


class Interrupt(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            raise RuntimeError("the power is gone")


def test_an_interrupted_fit_goes_on_bit_for_bit(tmp_path):
    def run(folder, *callbacks):
        module = Classifier()
        private = PrivateFit(a_plan(), data(), seed=2, checkpoint=tmp_path / folder, save_every=2)
        trainer(private, *callbacks).fit(module, private.loader)
        return module, private

    whole, first = run("whole")
    with pytest.raises(RuntimeError, match="the power is gone"):
        run("parts", Interrupt())
    resumed, second = run("parts")
    assert same(whole, resumed)
    assert first.spent() == second.spent()
    again, third = run("parts")  # nothing is left to do
    assert same(whole, again)
    assert third.private.steps == 10


def test_fabric_is_a_plain_loop():
    module = Classifier()
    plain = copy.deepcopy(module)
    config = module.configure_optimizers()
    schedule = config["lr_scheduler"]["scheduler"]
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    private = make_private(module, config["optimizer"], a_plan(), seed=2)
    model, optimizer = fabric.setup(module, config["optimizer"])
    torch.manual_seed(1)
    for x, y in private.loader(data()):
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        schedule.step()
    expected = plain_loop(plain)
    assert same(module, plain)
    assert private.spent() == expected.spent()


def test_fabric_cannot_deal_the_batches_anew():
    module = Classifier()
    private = make_private(module, torch.optim.SGD(module.parameters(), lr=0.1), a_plan())
    with pytest.raises(TypeError, match="DataLoader"):  # Fabric's own refusal: ours is no DataLoader
        lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(private.loader(data()))


REFUSED = {
    "gradient_clip_val=1.0 to be left out. The plan clips": {"gradient_clip_val": 1.0},
    "accumulate_grad_batches=2 to be 1": {"accumulate_grad_batches": 2},
    "max_epochs=3 to be 1. One loop": {"max_epochs": 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_change_the_plan_is_refused(message):
    private = PrivateFit(a_plan(), data())
    with pytest.raises(ArgumentError, match=message):
        trainer(private, **REFUSED[message]).fit(Classifier(), private.loader)


def test_more_refusals(tmp_path):
    private = PrivateFit(a_plan(), data())
    with pytest.raises(ArgumentError, match=r"Trainer\.fit to have begun"):
        private.spent()
    with pytest.raises(ArgumentError, match="optimizers=2 to be one"):
        module = Classifier(optimizers=2)
        module.automatic_optimization = False
        trainer(private).fit(module, private.loader)
    with pytest.raises(ArgumentError, match="automatic_optimization=False to be True"):
        module = Classifier()
        module.automatic_optimization = False
        trainer(private).fit(module, private.loader)
    with pytest.raises(ArgumentError, match=r"fit\(module, private.loader\)"):
        trainer(PrivateFit(a_plan(), data())).fit(Classifier(), DataLoader(data(), batch_size=2))
    with pytest.raises(ArgumentError, match="to be of type Plan"):
        PrivateFit("plan", data())

    module, saved = Classifier(), tmp_path / "lightning.ckpt"
    ordinary = trainer(enable_checkpointing=True, default_root_dir=tmp_path)
    ordinary.fit(module, DataLoader(data(), batch_size=4))
    ordinary.save_checkpoint(saved)
    with pytest.raises(ArgumentError, match=r"ckpt_path=.* to be left out. Give PrivateFit checkpoint=FOLDER"):
        trainer(private).fit(module, private.loader, ckpt_path=saved)


def test_processes_that_share_an_example_or_raw_gradients_are_refused():
    strategy = ModelParallelStrategy()  # by default all processes are one for its tensors
    strategy._device_mesh = {"tensor_parallel": SimpleNamespace(size=lambda: 2)}
    with pytest.raises(ArgumentError, match=r"tensor_parallel_size=2 to be 1.*data_parallel_size=PROCESSES"):
        _require_strategy(strategy)
    for other in (DDPStrategy(), FSDPStrategy()):
        with pytest.raises(ArgumentError, match=r"not to wrap the module. Use PrivateProcesses\(\), or ModelParallelStrategy"):
            _require_strategy(other)
    _require_strategy(PrivateProcesses())


def test_examples_that_influence_each_other_are_found():
    mixing = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, batch_size=8, dataset_size=12, steps=10)
    private = PrivateFit(plan, data(), seed=1)
    with pytest.raises(NotIsolated, match="BatchNorm1d"):
        trainer(private).fit(Classifier(mixing), private.loader)
    assert private.private.steps == 0
    # A training_step that leads around the check is refused before its first step, unless the user vouches for it.
    private = PrivateFit(plan, data(), seed=1)
    with pytest.raises((ArgumentError, CaptureError), match=r"training_step to call self\(x\)|outside of model"):
        trainer(private).fit(Classifier(mixing, direct=True), private.loader)
    assert private.private.steps == 0
    private = PrivateFit(plan, data(), seed=1, check_isolation=False)
    trainer(private).fit(Classifier(direct=True), private.loader)
    assert private.private.steps == 10


class Weighted(Classifier):
    """Class weights, of which those of a batch are divided by their sum, or each is an example's own."""

    def __init__(self, reduction):
        super().__init__()
        self.reduction, self.logged = reduction, 0

    def training_step(self, batch):
        x, y = batch
        self.logged += 1
        self.log_dict({"logged": float(self.logged)})
        return {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 9.0]), reduction=self.reduction)(self(x), y).mean()}


def test_a_training_step_is_tried_without_a_trace():
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, batch_size=8, dataset_size=12, steps=3)
    private = PrivateFit(plan, data(), seed=1)
    with pytest.raises(NotIsolated, match=r"one example changes what another one counts\. It is that of training_step"):
        trainer(private).fit(Weighted("mean"), private.loader)
    assert private.private.steps == 0
    private, module = PrivateFit(plan, data(), seed=1), Weighted("none")
    fitted = trainer(private)
    fitted.fit(module, private.loader)
    assert private.private.steps == module.logged == fitted.logged_metrics["logged"] == 3
    private = PrivateFit(plan, data(), seed=1, check_isolation=False)
    trainer(private).fit(Weighted("mean"), private.loader)


class Reader(lightning.LightningModule):
    """Of texts of different lengths, which sees only what its mask shows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids):
        mask = (ids > 0).to(self.head.weight.dtype).unsqueeze(2)
        return self.head((self.table(ids) * mask).sum(1) / mask.sum(1))

    def training_step(self, ids, index):
        return nn.functional.cross_entropy(self(ids).float(), ids[:, 0], reduction="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


LENGTHS = {"bf16-mixed": {}, "bf16-true": {}, "32-true": {"certified": True}}


@pytest.mark.parametrize("precision", LENGTHS)
def test_texts_padded_to_the_longest_of_their_batch_are_refused_in_half_precision_and_in_certified_runs(precision):
    lot = torch.Generator().manual_seed(5)
    texts = [torch.randint(1, 11, (3 + i % 7,), generator=lot) for i in range(24)]
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, batch_size=8, dataset_size=24, steps=2, **LENGTHS[precision])

    def fitted(length, precision):
        def collate(records):
            size = length or max(map(len, records))
            return torch.stack([nn.functional.pad(r, (0, size - len(r))) for r in records])

        private = PrivateFit(plan, texts, seed=2, collate_fn=collate, loss_reduction="sum")
        try:
            trainer(private, precision=precision).fit(Reader(), private.loader)
        finally:
            taken = private.private.steps
        return taken

    with pytest.raises(NotIsolated, match=r"padded to the longest of their batch.*Pad all of them to one length"):
        fitted(None, precision)
    assert fitted(9, precision) == 2
    if not plan.certified:
        assert fitted(None, "32-true") == 2
