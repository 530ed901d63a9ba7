"""Whether rows of a batch have bits of their own: what a certified run checks on its first batch, and how it pads."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from patience import HANGS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.batch_invariance import PART, ROWS, invariant_rows, require_batch_invariance
from hushgrad.denoise import SVRG
from hushgrad.errors import CaptureError
from hushgrad.sampling.batch import Sizes
from hushgrad.sampling.batch_loader import Hands, stamp
from hushgrad.train import Plan, fit, make_private
from hushgrad.train.invariant_sizes import InvariantSizes


class _Mixed(nn.Module):
    """A last bit that depends on the neighbours."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y * (1 + (y[0] > 0).float() * 2.0**-23)


class _Backward(torch.autograd.Function):
    """Forward it is the identity; backward the first row has another last bit: its place tells."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        g[0] *= 1 + 2.0**-22
        return g


class _MixedBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Scale()

    def forward(self, x):
        return _Backward.apply(self.layer(x))


class _OtherKernel(nn.Module):
    """Other roundings for few rows, as libraries have them."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, x):
        y = x.sin()
        return y if len(x) >= self.least else y * (1 + 2.0**-22)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale


SIZES = [
    (1, False),
    (4, False),
    (ROWS, False),
    (ROWS + 1, True),
    (2 * ROWS + 1, True),
    (3 * ROWS + 1, True),
    (4 * ROWS + 1, False),
]


@pytest.mark.parametrize(("least", "refused"), SIZES)
def test_sizes_that_padding_does_not_reach_are_refused(least, refused):
    torch.manual_seed(0)
    model, x = _OtherKernel(least), torch.randn(3 * ROWS, 6)
    if refused:
        with pytest.raises(CaptureError, match=r"rows in its batch"):
            require_batch_invariance(model, x)
    else:
        require_batch_invariance(model, x)
    assert model.training


@pytest.mark.parametrize("model", [_Mixed(_Scale()), _MixedBackward()], ids=["forward", "backward"])
def test_bits_that_depend_on_neighbours_are_refused(model):
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="last bits"):
        require_batch_invariance(model, torch.randn(16, 6))
    assert all(p.grad is None for p in model.parameters())


class _Inside(nn.Module):
    """Its layer sees all positions of all examples in one list, or time first; its output shows neither."""

    def __init__(self, layout: str, layer: nn.Module) -> None:
        super().__init__()
        self.layout, self.inner, self.layer = layout, _Scale(), layer

    def forward(self, x):
        h = self.inner(x.flatten(0, 1) if self.layout == "flat" else x.transpose(0, 1))
        h = self.layer(h)
        return (h.view(x.shape) if self.layout == "flat" else h.transpose(0, 1)).round()


class _FewNumbers(_OtherKernel):
    """The same for few numbers."""

    def forward(self, x):
        return x if x.numel() >= self.least else x * (1 + 2.0**-22)


@pytest.mark.parametrize("layout", ["flat", "time first"])
def test_layers_that_see_positions_of_all_examples_are_compared(layout):
    torch.manual_seed(0)
    x = torch.randn(ROWS, 5, 6)
    require_batch_invariance(_Inside(layout, nn.Tanh()), x)
    with pytest.raises(CaptureError, match="last bits"):
        require_batch_invariance(_Inside(layout, nn.Sequential(_FewNumbers(x.numel() + 1), _Scale())), x)


class _Positions(nn.Module):
    """Beside its examples it reads a table of as many positions as a batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.places = _Scale(), _Scale()
        self.register_buffer("table", torch.randn(ROWS, 6))

    def forward(self, x):
        return self.scale(x) + self.places(self.table).sum(0)


def test_what_all_examples_share_is_no_row_of_theirs():
    require_batch_invariance(_Positions(), torch.randn(ROWS, 6))


def test_examples_in_another_dimension_are_compared_there():
    torch.manual_seed(0)
    x = torch.randn(7, ROWS, 6)
    require_batch_invariance(_Cumulated(), x, dim=1)
    with pytest.raises(CaptureError, match="last bits"):
        require_batch_invariance(_Cumulated(2.0**-23), x, dim=1)


class _Cumulated(nn.Module):
    """Sums over positions, which are the first dimension; the first example mixes."""

    def __init__(self, mixed: float = 0.0) -> None:
        super().__init__()
        self.scale, self.mixed = _Scale(), mixed

    def forward(self, x):
        y = self.scale(x).cumsum(0)
        return y * (1 + (y[:, :1] > 0).float() * self.mixed)


class _Cast(_Scale):
    """Under autocast its rows depend on each other."""

    def forward(self, x):
        mixed = torch.is_autocast_enabled("cpu")
        return super().forward(x) * (1 + (x[0].sum() > 0).float() * 2.0**-23 * mixed)


@pytest.mark.parametrize("how", ["a new size", "a setting of torch"])
def test_a_certified_run_looks_again(how):
    """At whatever may choose another kernel: a number of rows that no earlier batch had, autocast."""
    torch.manual_seed(0)
    least = invariant_rows(torch.get_num_threads())
    model = nn.Sequential(_Scale(), _OtherKernel(2 * least + 1) if how == "a new size" else _Cast())
    plan = Plan.dpsgd(
        noise_multiplier=1.0, delta=1e-5, batch_size=least * 9 // 10, dataset_size=4 * least, steps=60, certified=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, seed=3, loss_reduction="sum", check_isolation=False)
    rows = []
    with pytest.raises(CaptureError, match="last bits"):
        for (x,) in private.loader(TensorDataset(torch.randn(4 * least, 6))):
            with torch.autocast("cpu", enabled=how != "a new size" and private.steps > 3):
                model(x).square().sum().backward()
            rows.append(len(x))
            optimizer.step()
    private.detach()
    assert private.steps > 3 if how != "a new size" else {*rows} == {least}


def test_a_certified_run_looks_at_its_first_batch():
    torch.manual_seed(0)
    model = nn.Sequential(_Scale(), nn.Dropout(0.5))  # no matrix product: the same bits on every machine
    for network, refused in ((model, False), (_Mixed(model), True)):
        plan = Plan.dpgd(noise_multiplier=1.0, delta=1e-5, dataset_size=20, steps=1, certified=True)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        private = make_private(network, optimizer, plan, seed=0, loss_reduction="sum", check_isolation=False)
        ((x,),) = list(private.loader(TensorDataset(torch.randn(20, 6))))[:1]
        if refused:
            with pytest.raises(CaptureError, match="last bits"):
                network(x)
        else:
            network(x).square().sum().backward()
            optimizer.step()
            assert "rows" in str(private.spent())
        private.detach()


SHAPES = """
import random
import torch
from torch import nn
from torch.nn import functional as F
from hushgrad.clipping.batch_invariance import invariant_rows, request_batch_invariance, require_batch_invariance
request_batch_invariance()

def look(threads):
    torch.set_num_threads(threads)
    for wide in (1, 2, 3, 5, 7, 9, 18, 33):
        for out in (1, 2, 4, 7, 10):
            model = nn.Sequential(nn.Linear(wide, out), nn.Tanh(), nn.Linear(out, 3))
            require_batch_invariance(model, torch.randn(40 * threads, wide), multiple=invariant_rows(threads))
    for wide in (1, 3, 5):  # functions of single numbers, of which the last ones of a tensor are computed by another formula
        for layer in (nn.SiLU(), nn.Softplus(), nn.Mish(), nn.Sigmoid(), nn.GELU("tanh"), nn.ELU(), nn.GELU()):
            require_batch_invariance(
                nn.Sequential(nn.Linear(6, wide), layer), torch.randn(64 * threads, 6), multiple=invariant_rows(threads)
            )
    for model, size in (
        (nn.Conv2d(7, 5, 1), (7, 5, 5)),
        (nn.Conv2d(32, 64, 1), (32, 1, 1)),
        (nn.Conv2d(1, 1, 1), (1, 9, 9)),
        (nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2)), (1, 8, 8)),
        (nn.Sequential(nn.Conv2d(1, 16, 8, 2), nn.MaxPool2d(2, 1), nn.Conv2d(16, 8, 4, 2), nn.Flatten(), nn.Linear(128, 9)), (1, 28, 28)),
        (nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), (784,)),
    ):
        require_batch_invariance(model, torch.randn(128, *size), multiple=invariant_rows(threads))
    draw = random.Random(threads)
    for _ in range(40):
        wide, out = (int(2 ** draw.uniform(0, 11)) for _ in range(2))
        model = nn.Sequential(nn.Linear(wide, out), nn.Tanh(), nn.Linear(out, 3))
        require_batch_invariance(model, torch.randn(8 * threads * draw.randint(1, 6), wide), multiple=invariant_rows(threads))

for threads in (4, 1, 2):
    look(threads)
"""


def test_rows_have_bits_of_their_own_once_they_were_asked_for():
    """In a process of its own: MKL listens before its first product only, whatever threads come. Without MKL nothing is promised."""
    if not torch.backends.mkl.is_available():
        pytest.skip("no MKL")
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run([sys.executable, "-c", SHAPES], env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-800:]


# Padding ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 8, 13])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_parts_are_filled_up_with_copies_of_their_first_row(count, size):
    x, words = torch.arange(float(count)), [str(i) for i in range(count)]
    batch = stamp({"x": x, "words": words, "mask": torch.ones(50, 9)}, step=0, examples=count, sizes=Sizes(ROWS))
    seen = []
    for part in batch.split(size):
        counted = part.examples - part.padding
        assert (
            part.examples % (ROWS if size > 1 else 1) == 0
            and len(part["x"]) == len(part["words"]) == part.examples
            and part["mask"].shape == (50, 9)
        )
        assert part["x"][counted:].tolist() == [float(part["x"][0])] * part.padding if counted else part.padding == 0
        assert part["words"] == [str(int(value)) for value in part["x"]]
        seen += part["x"][:counted].tolist()
    assert seen == x.tolist()


def _sums(rows, padding, *, how, value):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 9))
    capture = Capture(model, loss_reduction="sum", check_isolation=False)
    capture.attach()
    x, units = torch.randn(5, 6), torch.tensor([4, 4, 7, 1, 1])
    x[0, 0] = x[0, 0] if value is None else value  # the row that is copied
    x = torch.cat([x[:rows], x[:1].expand(padding, 6)])
    for sign in (1.0, -0.5) if how == "probes" else (1.0,):
        with capture.probe(sign) if how == "probes" else torch.enable_grad():
            capture.examples(len(x), padding=padding)
            if how == "users":
                capture.units(torch.cat([units[:rows], units[:1].expand(padding)]))
            (model(x) * 3 * sign).square().sum().backward()
    if how == "folded":
        capture.fold(Flat(0.5))
    assert capture.check() == (rows if how != "users" else len(units[:rows].unique()))
    return capture.collect(Flat(0.5))


@pytest.mark.parametrize("how", ["plain", "users", "probes", "folded"])
@pytest.mark.parametrize("value", [None, float("nan")])
def test_padding_adds_nothing(how, value):
    bare, filled = (_sums(5, padding, how=how, value=value) for padding in (0, 3))
    assert bare.raw_norms.shape == filled.raw_norms.shape and torch.allclose(
        bare.raw_norms, filled.raw_norms, rtol=1e-5, equal_nan=True
    )
    for name, total in bare.raw_sums.items():
        assert torch.allclose(total, filled.raw_sums[name], atol=1e-6)


RUNS = {"examples": {}, "users": {"unit": "user"}, "probes": {"denoise": SVRG(period=2)}}
# Every pair of choices in six runs; all twelve in `make test-all`.
PAIRS = {("examples", None, True), ("examples", 3, False), ("users", None, False), ("users", 3, True)}
PAIRS |= {("probes", None, True), ("probes", 3, False)}
ALL = [(name, micro, secure) for name in RUNS for micro in (None, 3) for secure in (False, True)]


@pytest.mark.parametrize(
    ("name", "micro", "secure"), [pytest.param(*one, marks=() if one in PAIRS else pytest.mark.slow) for one in ALL]
)
def test_a_certified_run_pads_and_is_the_run_that_does_not(name, micro, secure, monkeypatch):
    """Batches of 0 to 8: the weights are those of an ordinary run, but for rounding."""
    monkeypatch.setattr(
        "hushgrad.train.batch_invariance.require_batch_invariance", lambda *args, **named: None
    )  # that is the machine's
    data = TensorDataset(torch.randn(40, 9), torch.randint(3, (40,)))
    weights, seen, examples = [], [], Capture.examples

    def noted(self, count, *, padding=0, dim=None, usual=None):
        examples(self, count, padding=padding, dim=dim, usual=usual)
        if self._certificate is not None:
            seen.append((count, padding))

    monkeypatch.setattr(Capture, "examples", noted)
    for certified in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3))
        plan = Plan.dpsgd(
            noise_multiplier=1e-3,
            delta=1e-5,
            batch_size=3,
            dataset_size=40,
            steps=6,
            certified=certified,
            secure=certified and secure,
            **RUNS[name],
        )
        groups = [i // 2 for i in range(40)] if name == "users" else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(
            model,
            nn.functional.cross_entropy,
            optimizer,
            data,
            plan,
            seed=0,
            groups=groups,
            max_physical_batch=micro,
            progress=False,
        )
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    filled = PART if micro else ROWS
    assert {(n % filled, n >= padding) for n, padding in seen} == {(0, True)} and any(padding for _, padding in seen)
    assert torch.allclose(*weights, atol=2e-3 if secure else 1e-5)  # secure noise is other noise


def test_a_certified_loop_with_a_loss_of_unknown_reduction_is_refused(monkeypatch):
    monkeypatch.setattr("hushgrad.train.batch_invariance.require_batch_invariance", lambda *args, **named: None)
    model = nn.Linear(9, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpgd(noise_multiplier=1.0, delta=1e-5, dataset_size=16, steps=2, secure=True)
    assert plan.certified and "certified" in str(plan)
    private = make_private(model, optimizer, plan, seed=0)
    for (x,) in private.loader(TensorDataset(torch.randn(16, 9))):
        model(x).square().mean().backward()
        with pytest.raises(CaptureError, match=r"private.loss\(fn\)"):
            optimizer.step()
        break
    assert private.steps == 0


@pytest.mark.parametrize("inputs, outputs", [(5, 1), (30, 1), (1, 8), (8, 8)])
def test_rows_of_a_batch_that_is_filled_up_have_the_bits_of_larger_ones(inputs, outputs):
    """Of one output, two kernels agree by chance in most rows: a single draw took sizes for alike that are not."""
    found = InvariantSizes.of(nn.Linear(inputs, outputs))
    if found.notes:
        pytest.skip("this machine says that it cannot")
    generator, other = torch.Generator().manual_seed(1), set()
    for _ in range(8):
        weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(128, inputs, generator=generator)
        whole = nn.functional.linear(x, weight)
        sizes = {found.sizes.rows(count) for count in range(1, 100)}
        other |= {n for n in sizes if not torch.equal(nn.functional.linear(x[:n].clone(), weight), whole[:n])}
    assert not other


def test_images_of_a_batch_that_is_filled_up_have_the_bits_of_larger_ones():
    """Torch computes fewer than sixteen of them by another library."""
    draw, generator = random.Random(3), torch.Generator().manual_seed(1)
    for _ in range(24):
        kind, wide, out, kernel = (
            draw.choice((nn.Conv1d, nn.Conv2d)),
            draw.randint(1, 33),
            draw.randint(1, 33),
            draw.choice((1, 1, 3)),
        )
        layer = kind(wide, out, kernel, stride=draw.choice((1, 1, 2)))
        found = InvariantSizes.of(layer)
        if found.notes:
            continue  # this machine says that it cannot
        x = torch.randn(48, wide, *([draw.randint(3, 7)] * (1 if kind is nn.Conv1d else 2)), generator=generator)
        whole = layer(x)
        assert not [
            n for n in {found.sizes.rows(count) for count in range(48)} if not torch.equal(layer(x[:n].clone()), whole[:n])
        ]
        assert {found.sizes.rows(count, cut=5) for count in range(6)} == {5}
        loaded = Hands(range(48), None, list, sizes=found.sizes)
        assert all(len(loaded[0, np.arange(count)].data) == found.sizes.rows(count) for count in (1, 5, 15, 16, 17))


class _Unknown(nn.Module):
    """Unknown functions of what a narrow layer makes."""

    def __init__(self, wide: int, function) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(3, wide), nn.Linear(wide, 2), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


FUNCTIONS = (
    torch.sinh,
    torch.sigmoid,
    F.silu,
    F.softplus,
    F.mish,
    F.elu,
    lambda h: h.abs().pow(1.7),
    lambda h: F.gelu(h, approximate="tanh"),
)


def test_functions_of_single_numbers_have_no_remainder_in_a_batch_that_is_filled_up():
    draw, generator = random.Random(5), torch.Generator().manual_seed(2)
    for function in FUNCTIONS:
        wide, positions = draw.randint(1, 40), draw.randint(1, 7)
        sizes = InvariantSizes.of(_Unknown(wide, function)).sizes
        for count in draw.sample(range(1, 90), 12):
            rows = sizes.rows(count)
            x = torch.randn(rows, positions, wide, generator=generator)
            assert torch.equal(function(x.flip(0)).flip(0), function(x))  # wherever a row is
            assert torch.equal(function(torch.cat([x, x[: sizes.multiple]]))[:rows], function(x))


@pytest.mark.parametrize(
    ("model", "free"),
    [
        (nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 10)), True),
        (nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Softmax(1), nn.Linear(20, 10)), True),
        (nn.Sequential(nn.Linear(6, 128), nn.SiLU(), nn.Linear(128, 64)), True),
        (_Unknown(128, torch.sinh).requires_grad_(False), False),  # its last layer makes two numbers
    ],
)
def test_batches_of_wide_or_plain_models_are_not_filled_up(model, free):
    assert (InvariantSizes.of(model).sizes.fine is not None) is free
