"""Losses of a private run: what is a mean over the examples is taken as it is, what is not is noticed on the first batch."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.errors import ArgumentError, NotIsolated
from hushgrad.train import Plan, fit, make_private
from hushgrad.train.loss import VOUCHED

N, CLASSES = 24, 3


def _data(seed):
    torch.manual_seed(seed)
    return TensorDataset(torch.randn(N, 5), torch.randint(CLASSES, (N,)))


def _run(loss=None, *, seed=0, steps=3, step=None, **options):
    """A loop with a loss of the run's own, or with ``step(private, model, x, y)`` as a user writes it: (private, the weights)."""
    data = _data(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=12, dataset_size=N, steps=steps)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=1)
    own = None if loss is None else private.loss(loss, **options)
    for x, y in private.loader(data):
        if step is None:
            own(model(x), y).backward()
        else:
            step(private, model, x, y, own)
        private.optimizer.step()
    private.detach()
    return private, torch.cat([p.detach().flatten() for p in model.parameters()])


def _contrast(out, y):
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def _mixup(out, y):
    other = torch.randperm(len(y))
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[other])


MIXING = {
    "class weights": partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 10.0])),
    "a module's class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 10.0])),
    "ignore_index": partial(F.cross_entropy, ignore_index=0),
    "contrast": _contrast,
    "mixup": _mixup,
    "maximum": lambda out, y: F.cross_entropy(out, y, reduction="none").max(),
    "sum": partial(F.cross_entropy, reduction="sum"),
    "softmax over the batch": lambda out, y: -out.log_softmax(0).gather(1, y[:, None]).mean(),
    "weights from the batch, detached": lambda out, y: (
        F.cross_entropy(out, y, reduction="none") * out.detach().norm(dim=1) / out.detach().norm()
    ).mean(),
}
SEPARATE = {
    "cross entropy": F.cross_entropy,
    "label smoothing": partial(F.cross_entropy, label_smoothing=0.1),
    "a module": nn.CrossEntropyLoss(),
    "class weights, one loss for each": partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 10.0]), reduction="none"),
    "soft labels": lambda out, y: F.cross_entropy(out, F.one_hot(y, CLASSES).float() * 0.9 + 0.1 / CLASSES),
    "squares": lambda out, y: (out[:, 0] - y).square().mean(),
    "one loss for each class": lambda out, y: F.binary_cross_entropy_with_logits(
        out, F.one_hot(y, CLASSES).float(), reduction="none"
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_examples_is_refused_on_the_first_batch(name):
    with pytest.raises(NotIsolated, match="not the mean of its examples' own losses"):
        _run(MIXING[name])


@pytest.mark.parametrize("name", ["class weights", "a module's class weights", "ignore_index"])
def test_the_per_example_form_is_offered_where_there_is_one(name):
    with pytest.raises(NotIsolated, match='reduction="none"'):
        _run(MIXING[name])
    fn = MIXING[name]
    form = partial(fn, reduction="none") if isinstance(fn, partial) else nn.CrossEntropyLoss(weight=fn.weight, reduction="none")
    private, _ = _run(form)
    assert VOUCHED not in private.spent().notes


@pytest.mark.parametrize("name", SEPARATE)
def test_a_mean_over_the_examples_is_taken_as_it_is(name):
    fn = SEPARATE[name]
    private, weights = _run(fn)

    def plain(private, model, x, y, own):
        fn(model(x), y).mean().backward()

    vouched, expected = _run(step=plain)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-5)
    assert VOUCHED not in private.spent().notes and VOUCHED in vouched.spent().notes


def test_a_loss_stays_per_example_when_later_batches_would_mix():
    """No label is ignored in the first batch: the comparison cannot see it, and need not."""
    data, seen = _data(0), []
    model = nn.Linear(5, CLASSES)
    plan = Plan.dpgd(noise_multiplier=1e-6, delta=1e-5, dataset_size=N, steps=2)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), plan, seed=1)
    loss = private.loss(F.cross_entropy)
    for step, (x, y) in enumerate(private.loader(data)):
        y = torch.where(torch.arange(N) < 20, -100, y) if step else y
        loss(model(x), y).backward()
        private.optimizer.step()
        seen.append(private.raw_norms.clone())
    private.detach()
    # A mean over the four labels that are left would make each of them six times as large.
    torch.testing.assert_close(seen[1][20:], seen[0][20:])
    assert not seen[1][:20].any()  # examples without a label have no say


def test_per_example_takes_the_mean_over_single_examples_of_anything():
    private, _ = _run(_contrast, per_example=True)
    assert VOUCHED not in private.spent().notes


def test_a_loss_that_cannot_be_vectorised_is_taken_one_by_one():
    def branching(out, y):
        return F.cross_entropy(out, y) * (2.0 if y.sum().item() % 2 else 1.0)

    with pytest.raises(NotIsolated):
        _run(branching)
    private, _ = _run(branching, per_example=True)
    assert VOUCHED not in private.spent().notes


def test_a_loss_of_the_model_and_the_batch_is_tried():
    _, weights = _run(lambda model, x, y: F.cross_entropy(model(x), y), step=lambda p, m, x, y, own: own(m, x, y).backward())
    _, expected = _run(F.cross_entropy)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-5)

    def mixed_inputs(model, x, y):
        other = torch.randperm(len(x))
        return F.cross_entropy(model(0.7 * x + 0.3 * x[other]), y)

    for name, fn in {**{k: lambda m, x, y, f=f: f(m(x), y) for k, f in MIXING.items()}, "mixed inputs": mixed_inputs}.items():
        with pytest.raises(NotIsolated):
            _run(fn, step=lambda p, m, x, y, own: own(m, x, y).backward())
            pytest.fail(name)


def test_one_step_without_it_is_enough_for_the_note():
    def sometimes(private, model, x, y, own):
        (own if private.steps != 1 else F.cross_entropy)(model(x), y).backward()

    private, _ = _run(F.cross_entropy, step=sometimes)
    assert VOUCHED in private.spent().notes and "vouched for by the user" in str(private.spent())


def test_the_note_survives_a_checkpoint():
    private, _ = _run(F.cross_entropy, step=lambda p, m, x, y, own: F.cross_entropy(m(x), y).backward())
    fresh = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    again = make_private(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), private.plan, seed=1)
    again.load_state_dict(private.state_dict())
    assert VOUCHED in again.spent().notes
    again.detach()


def test_micro_batches_and_probes_count_as_covered():
    data, model = _data(0), nn.Linear(5, CLASSES)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=12, dataset_size=N, steps=3)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=1)
    loss = private.loss(F.cross_entropy)
    for batch in private.loader(data):
        for x, y in batch.split(5):
            loss(model(x), y).backward()
        private.optimizer.step()
    private.detach()
    assert VOUCHED not in private.spent().notes


def test_tensors_without_a_row_for_each_example_are_refused():
    with pytest.raises(ArgumentError, match="rows, one for each example"):
        _run(lambda out, y, w: F.cross_entropy(out, y, weight=w), step=lambda p, m, x, y, own: own(m(x), y, torch.ones(2)))


def test_fit_takes_the_loss_of_each_example_alone():
    data = _data(0)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=12, dataset_size=N, steps=2)

    def trained(model, loss):
        return fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), data, plan, progress=False)

    assert VOUCHED not in trained(nn.Linear(5, CLASSES), F.cross_entropy).notes
    with pytest.raises(NotIsolated):
        trained(nn.Linear(5, CLASSES), MIXING["class weights"])


class _WithState(nn.Module):
    """Gives something that has no row for each example, as recurrent layers do."""

    def __init__(self):
        super().__init__()
        self.gru, self.last = nn.GRU(1, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x):
        _, state = self.gru(x[:, :, None])
        return self.last(state[-1]), state


def test_fit_tries_a_loss_of_outputs_that_have_no_rows():
    data = _data(0)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=12, dataset_size=N, steps=2)
    for weight, refused in ((None, False), (torch.tensor([1.0, 5.0, 10.0]), True)):
        model = _WithState()

        def loss(out, y, weight=weight):
            return F.cross_entropy(out[0], y, weight=weight)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if refused:
            with pytest.raises(NotIsolated):
                fit(model, loss, optimizer, data, plan, progress=False)
        else:
            assert VOUCHED not in fit(model, loss, optimizer, data, plan, progress=False).notes
