"""Losses of a private run: what is a mean over the examples is taken as it is, what is not is noticed on the first batch."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.errors import ArgumentError, CaptureError, NotIsolated
from hushgrad.sampling import FullBatch
from hushgrad.train import Plan, fit, make_private
from hushgrad.train.loss_tracking import ROUNDED, VOUCHED

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


LINES = {  # where a loop calls its loss
    "inside of autocast": lambda own, model, x, y: own(_half(model, x), y),
    "with the model": lambda own, model, x, y: own(model(x), y),
}


def _half(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", [*SEPARATE, "a product", "by loop"])
@pytest.mark.parametrize("seed", range(2))
def test_a_loss_under_autocast_is_computed_in_single_precision(name, line, seed):
    """Autocast does not act inside of vmap: there a loss of half precision would be computed in half precision."""
    weights = torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(seed))
    more = {
        "a product": lambda out, y: F.cross_entropy(out @ weights.to(out.dtype), y),
        "by loop": lambda out, y: F.cross_entropy(out, y) * (1.0 if out.sum().item() > 0 else 2.0),
    }
    fn, each = (SEPARATE | more)[name], {"per_example": name == "by loop"}

    def inside(private, model, x, y, own):
        with torch.autocast("cpu", torch.bfloat16):
            loss = LINES[line](own, model, x, y)
        loss.backward()

    def outside(private, model, x, y, own):
        own(_half(model, x).float(), y).backward()

    private, found = _run(fn, seed=seed, step=inside, **each)
    _, expected = _run(fn, seed=seed, step=outside, **each)
    assert torch.equal(found, expected)
    assert VOUCHED not in private.spent().notes


@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_examples_is_refused_under_autocast(name):
    def inside(private, model, x, y, own):
        with torch.autocast("cpu", torch.bfloat16):
            own(model(x), y).backward()

    with pytest.raises(NotIsolated, match="not the mean of its examples' own losses"):
        _run(MIXING[name], step=inside)


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


# Nobody's gradient depends, by rounding, on how many others there are --------------------------------------------------------------


def _squares(out, y):
    return (out - y).square().flatten(1).sum(1).mean()


def _cancelling():
    """Twelve sequences whose labels cancel over the positions: what is left of their gradients is rounding."""
    x = torch.randn(12, 1, 8).mul(0.1).expand(-1, 16, -1).contiguous()
    y = torch.full((12, 16, 8), 1e9)
    y[:, 8:] *= -1
    return lambda: nn.Linear(8, 8, bias=False), _squares, x, y


def _alike():
    """In half precision a gradient divided by 100 and one divided by 101 differ by up to 0.4 %, all in the same direction."""
    x = torch.randn(1, 16) + 1e-3 * torch.randn(101, 16)
    return lambda: nn.Linear(16, 8), F.cross_entropy, x, torch.zeros(101, dtype=torch.long)


def _released(case, count, loss=None, half=False):
    """The sum over the first examples, times 100, without noise; and the notes."""
    make, fn, x, y = case
    torch.manual_seed(0)
    model, summed = make(), []
    plan = Plan.dpgd(noise_multiplier=0.0, delta=1e-5, dataset_size=100, steps=1, max_grad_norm=0.01)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=1)
    private.optimizer.register_step_pre_hook(lambda *_: summed.extend(p.grad.clone() for p in model.parameters()))
    loss = loss or private.loss(fn)
    for bx, by in private.loader(TensorDataset(x[:count], y[:count])):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = model(bx)
        loss(out.float(), by).backward()
        private.optimizer.step()
    notes = private.spent().notes
    private.detach()
    return torch.cat([g.flatten() for g in summed]).double() * 100 / 0.01, notes


@pytest.mark.parametrize(("make", "half"), [(_cancelling, False), (_alike, True)])
def test_one_example_less_leaves_everybody_elses_gradient_as_it_is(make, half):
    torch.manual_seed(0)
    case = make()
    count = len(case[2])
    (all_, notes), (rest, _) = (_released(case, n, half=half) for n in (count, count - 1))
    assert float((all_ - rest).norm()) <= 1 + 1e-4
    assert ROUNDED not in notes


def test_a_mean_in_half_precision_is_said_to_be_one():
    _, notes = _released(_alike(), 8, F.cross_entropy, half=True)
    assert ROUNDED in notes and ROUNDED not in _released(_alike(), 8, F.cross_entropy)[1]


def test_a_backward_beside_that_of_the_loss_is_refused():
    model = nn.Linear(16, 8)
    plan = Plan.dpgd(noise_multiplier=1.0, delta=1e-5, dataset_size=8, steps=1)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=1)
    loss = private.loss(F.cross_entropy)
    _, _, x, y = _alike()
    for bx, by in private.loader(TensorDataset(x[:8], y[:8])):
        out = model(bx)
        loss(out, by).backward(retain_graph=True)
        out.square().mean().backward()
        with pytest.raises(CaptureError, match="two backward passes"):
            private.optimizer.step()
    private.detach()


@pytest.mark.parametrize("options", [{}, {"certified": True}])
def test_what_is_added_to_a_loss_of_the_run_is_not_vouched_for_by_it(options):
    model = nn.Linear(16, 8)
    plan = Plan.dpgd(noise_multiplier=1.0, delta=1e-5, dataset_size=8, steps=1, **options)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=1)
    loss = private.loss(F.cross_entropy)
    _, _, x, y = _alike()
    for bx, by in private.loader(TensorDataset(x[:8], y[:8])):
        out = model(bx)
        (loss(out, by) + _contrast(out, by)).backward()
        if options:
            with pytest.raises(CaptureError, match="needs the sum"):
                private.optimizer.step()
        else:
            private.optimizer.step()
    assert options or VOUCHED in private.spent().notes
    private.detach()


SEEN = []


class _Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES))
        self.calls = 0

    def forward(self, out, y):
        made = F.cross_entropy(out - (self.centre if self.calls > 1000 else 0), y)
        self.centre.mul_(0.9).add_(0.1 * out.detach().mean(0))
        self.calls += 1
        return made


class _Slots:
    __slots__ = ("last",)

    def __call__(self, out, y):
        self.last = out.detach()
        return F.cross_entropy(out, y)


def _running(by):
    state = {"mean": 1.0, "counts": [0] * CLASSES, "array": np.zeros(CLASSES)}

    def loss(out, y):
        made = F.cross_entropy(out, y)
        by(state, made, y)
        return made

    return loss


def _globally(out, y):
    [SEEN.append(row.detach()) for row in out]
    return F.cross_entropy(out, y)


def _average(state, made, y):
    state["mean"] = 0.9 * state["mean"] + 0.1 * made.item()


def _count(state, made, y):
    state["counts"][int(y[0])] += 1


def _array(state, made, y):
    state["array"][int(y[0])] += 1


REMEMBERS = {
    "a buffer": _Centre,
    "a slot": _Slots,
    "a closure": lambda: _running(_average),
    "counts of classes": lambda: _running(_count),
    "an array": lambda: _running(_array),
    "a global": lambda: _globally,
}


@pytest.mark.parametrize("name", REMEMBERS)
def test_a_loss_that_remembers_is_vouched_for(name):
    assert VOUCHED in _run(REMEMBERS[name](), per_example=True)[0].spent().notes


class _Counting:
    """Knows how often it was called, and nothing of whom."""

    def __init__(self):
        self.calls, self.weights = 0, [torch.ones(CLASSES)]

    def __call__(self, out, y):
        self.calls += 1
        return F.cross_entropy(out, y, reduction="none")


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(), _Counting(), partial(F.cross_entropy, label_smoothing=0.1)]
)
def test_a_loss_that_keeps_nothing_is_not(loss):
    assert VOUCHED not in _run(loss)[0].spent().notes


def _moved_by(begin, count):
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2).double(), TensorDataset(torch.randn(count, 3).double(), torch.randn(count, 2).double())
    plan = Plan.dpsgd(
        noise_multiplier=1.0, delta=1e-5, max_grad_norm=100.0, batch_size=count, dataset_size=count, sampling=FullBatch(steps=1)
    )
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=1)
    for x, y in private.loader(data):
        begin(private.loss(F.mse_loss)(model(x), y))
        private.optimizer.step()
    private.detach()
    return len(x), torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 13])
@pytest.mark.parametrize(
    "begin", [lambda loss: torch.autograd.backward(loss), lambda loss: (loss * 1.0).backward()], ids=["torch's", "a term"]
)
def test_a_loss_weighs_the_same_however_it_is_begun_and_however_many_rows_fill_the_batch_up(begin, count):
    # It was divided by the examples and multiplied by the rows: a fourth record took a quarter of everybody else's gradient.
    rows, expected = _moved_by(lambda loss: loss.backward(), count)
    assert rows >= 4
    torch.testing.assert_close(_moved_by(begin, count)[1], expected, rtol=1e-12, atol=1e-12)


class _OwnVmap(torch.autograd.Function):
    """Looks at all examples where they are evaluated at once."""

    @staticmethod
    def forward(out):
        return out.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, dims, out):
        return out * out.detach().abs().amax(), 0


def _of_base(out, y):
    y.sum().item()  # so that rows are taken one by one
    return F.cross_entropy(out, y) * (out if out._base is None else out._base).detach().abs().max()


@pytest.mark.parametrize("loss", [lambda out, y: F.cross_entropy(_OwnVmap.apply(out), y), _of_base], ids=["vmap", "rows"])
def test_an_example_by_itself_does_not_see_its_batch(loss):
    """By a rule of its own for many at once, or as a view of all outputs."""
    if loss is _of_base:
        seen = []
        _run(lambda out, y: (seen.append(0 if out._base is None else out._base.numel()), _of_base(out, y))[1], per_example=True)
        assert max(seen[1:]) <= CLASSES  # the first is asked of all at once, which it cannot be
    else:
        with pytest.raises(NotIsolated, match="vmap"):
            _run(loss)


def test_losses_that_draw_are_not_compared_with_themselves():
    _run(lambda out, y: F.cross_entropy(out + torch.randn_like(out), y), steps=1)


def _written(name, where):
    """A loss that writes into its outputs or targets: before it computes with them, or afterwards."""

    def loss(out, y):
        t = out if name == "outputs" else y
        if where == "before":
            t.clamp_(0, 1)
        if where == "by loop":
            t.clamp_(0, 1)
            assert out.sum().item() < 1e9
        made = out.square() * F.one_hot(y, CLASSES) if name == "outputs" else -out.log_softmax(-1).gather(1, y[:, None])
        if where == "afterwards":
            t.clamp_(0, 1)
        return made.sum(-1)

    return loss


@pytest.mark.parametrize("name", ["outputs", "targets"])
@pytest.mark.parametrize("where", ["before", "by loop"])
def test_a_loss_may_write_into_what_it_is_given_before_it_uses_it(name, where):
    fn = _written(name, where)

    def plain(private, model, x, y, own):
        fn(model(x), y).mean().backward()

    private, weights = _run(fn)
    torch.testing.assert_close(weights, _run(step=plain)[1], atol=1e-5, rtol=1e-5)
    assert VOUCHED not in private.spent().notes


@pytest.mark.parametrize("name", ["outputs", "targets"])
@pytest.mark.parametrize("of_batch", [False, True])
def test_a_loss_that_writes_into_what_it_has_used_is_refused_in_a_sentence(name, of_batch):
    fn = _written(name, "afterwards")

    def step(private, model, x, y, own):
        private.loss(lambda model, x, y: fn(model(x), y).mean())(model, x, y).backward()

    with pytest.raises(CaptureError, match=r"t = t\.clone\(\)"):
        _run(None if of_batch else fn, step=step if of_batch else None)
