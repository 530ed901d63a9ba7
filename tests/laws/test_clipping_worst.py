"""No record moves a clipped sum by more than (1 + 1e-4) C in the arithmetic that runs, on any path to the sum."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat, heavy_units, reduce
from hushgrad.clipping.rules import linear
from hushgrad.denoise import SVRG
from hushgrad.errors import NotIsolated
from hushgrad.sampling.batch import Sizes
from hushgrad.testing import worst_record
from hushgrad.train import Plan, make_private
from hushgrad.train.invariant_sizes import InvariantSizes

sys.path.insert(0, str(Path(__file__).parents[2] / "faults"))
import worst

_SLOW = ("fallback", "probes, fallback", "recurrent", "cell", "called often", "users with many examples")


@pytest.mark.parametrize("name", worst.PATHS)
def test_no_record_is_found_that_moves_a_sum_by_more_than_the_clip_norm(name):
    found = worst.search(name, tries=8 if name in _SLOW else 20, seed=0)
    assert 0.9 < found.moved <= worst.BOUND


def _no_cap(monkeypatch):
    """Part by part, as every sum was added once: tens of clip norms."""
    monkeypatch.setattr(heavy_units, "cap", lambda parts: math.inf)


def _one_of_two_uses(monkeypatch):
    """A tied weight is measured by its last use alone."""
    uses = reduce.joint_norms

    def last(group, shared, *, wide):
        return uses(group, {name: each[-1:] for name, each in shared.items()}, wide=wide)

    monkeypatch.setattr(reduce, "joint_norms", last)


def _narrow_norms(monkeypatch):
    """Squares in single precision: they underflow."""
    monkeypatch.setattr(linear, "_outer_sq_norms", lambda *a: None)
    monkeypatch.setattr(linear, "sq_norm", lambda G: G.float().square().sum(1).double())


@pytest.mark.parametrize(
    ("plant", "names", "tries"),
    [
        (_no_cap, ("positions, Gram", "probes", "called twice"), 40),
        (_one_of_two_uses, ("tied weights", "called twice"), 40),
        (_narrow_norms, ("one position, tiny C",), 400),
    ],
)
def test_the_search_finds_planted_defects(plant, names, tries, monkeypatch):
    plant(monkeypatch)
    for name in names:
        try:
            assert worst.search(name, tries=tries, seed=1).moved > 1.05
        except NotIsolated as found:  # by the proof that precedes the search: a gradient is not what the example has alone
            assert plant is _one_of_two_uses and "norm" in str(found)


@pytest.mark.parametrize(
    "name", ["few users, 1", "few texts, 1", "few users, cut to 2", "few texts, cut to 2", "few texts, cut to 3"]
)
def test_few_rows_that_are_not_filled_up_change_everybodys_bits(name, monkeypatch):
    """Where parts cancel, rounding is all that is left of them: without filling up one record more changes 1 to 3 % of C."""
    assert worst.search(name, tries=20, seed=1).moved <= worst.BOUND
    monkeypatch.setattr(worst.InvariantSizes, "of", lambda model, certified=False: InvariantSizes(Sizes(few=0)))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, 64, generator=generator) for count in (128, 64))
    if all(torch.equal(x[:n].clone() @ weight.T, (x @ weight.T)[:n]) for n in (1, 2, 3)):
        pytest.skip("this machine computes few rows as it computes many: there is nothing to fill up for")
    assert worst.search(name, tries=20, seed=1).moved > 1.005


def _moved(path, record, seed=0):
    sums = worst.Sums(path._replace(others=8), seed=seed)
    before, after = sums(None), sums(record)
    assert not sums.refused
    return math.sqrt(sum(float((after[n].double() - before[n].double()).square().sum()) for n in before))


def test_squares_that_underflow_in_single_precision_are_counted(monkeypatch):
    path = worst.PATHS["one position, small C"]
    record = torch.full((784,), 2.6e-23), torch.full((1,), 1.7e19)
    assert _moved(path, record) <= 1e-3 * worst.BOUND
    _narrow_norms(monkeypatch)
    assert _moved(path, record) > 5e-3  # norm 0, weight 1


def test_a_small_weight_does_not_hide_a_large_mass():
    """Its square, 1e-64, is 0 in single precision: then nothing would be heavy."""
    path = worst.PATHS["attention"]
    for size in (1e17, 1.15e18, 1e19):
        record = torch.full((6, 8), size), torch.full((6, 8), 3e-9)
        assert _moved(path, record, seed=7) <= worst.BOUND


def test_long_rows_lose_nothing():
    """Of 9e6 equal entries a sum in single precision loses 3e-4."""
    model = nn.Linear(3000, 3000, bias=False)
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    x = torch.full((1, 8, 3000), 0.1)
    model(x).sum().backward()
    moved = capture.collect(Flat(1.0)).raw_sums["weight"].double().norm()
    assert float(moved) == pytest.approx(1.0, abs=2e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38, 1e-45])
@pytest.mark.parametrize(
    "name", ["one position", "positions, Gram", "positions, kept", "users", "probes", "embedding", "recurrent"]
)
def test_a_record_of_one_extreme_value(name, value):
    """NaN and infinity leave no trace in the others' sum: what remains is rounding of a batch of another shape."""
    path = worst.PATHS[name]
    record = tuple(t.fill_(value) if t.is_floating_point() else t for t in worst.Sums(path).first())
    assert _moved(path, record) <= (1e-5 if not math.isfinite(value) else worst.BOUND)


def _noiseless(x, y, *, denoise=None, groups=None):
    """What two steps without noise release, times the divisor."""
    torch.manual_seed(0)
    model = nn.Linear(x.shape[-1], y.shape[-1], bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unit = "example" if groups is None else "user"
    plan = Plan.dpgd(noise_multiplier=1e-9, delta=1e-5, dataset_size=100, steps=2, denoise=denoise, unit=unit)
    private, got = make_private(model, optimizer, plan, seed=1), []
    optimizer.register_step_pre_hook(lambda *_: got.append(model.weight.grad.double() * 100))
    for bx, by in private.loader(torch.utils.data.TensorDataset(x, y), **({} if groups is None else {"groups": groups})):

        def closure(bx=bx, by=by):
            loss = ((model(bx) - by) ** 2).flatten(1).sum(1).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    private.detach()
    return got


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
def test_labels_that_cancel_over_positions_or_a_users_examples_move_a_run_by_one_clip_norm(size):
    torch.manual_seed(0)
    x = torch.randn(60, 16, 64) * 0.1
    y = torch.ones(60, 16, 64) * x.mean(-1, keepdim=True) * 10
    odd, signs = torch.full((1, 16, 64), 0.1), torch.tensor([1.0, -1.0] * 8).view(1, 16, 1).expand(1, 16, 64) * size
    with_it, without = _noiseless(torch.cat([x, odd]), torch.cat([y, signs])), _noiseless(x, y)
    assert float((with_it[0] - without[0]).norm()) <= worst.BOUND
    users, rows = [*range(60), *[60] * 16], (torch.cat([x[:, 0], odd[0]]), torch.cat([y[:, 0], signs[0]]))
    with_it, without = _noiseless(*rows, groups=users), _noiseless(x[:, 0], y[:, 0], groups=users[:60])
    assert float((with_it[0] - without[0]).norm()) <= worst.BOUND


@pytest.mark.parametrize("size", [1e3, 1e8, 1e12])
def test_probes_that_cancel_move_a_run_by_one_clip_norm(size):
    """SVRG asks for the difference of gradients at two points: of an outlier both are huge."""
    torch.manual_seed(0)
    x, ratio = torch.randn(60, 5), 0.5
    y = x @ torch.ones(5, 1)
    odd = torch.cat([x, torch.ones(1, 5)]), torch.cat([y, torch.full((1, 1), size)])
    runs = [_noiseless(*data, denoise=SVRG(period=10, ratio=ratio)) for data in (odd, (x, y))]
    (first, second), (first_without, second_without) = runs
    assert float(((second - first) - (second_without - first_without)).norm()) / ratio <= 1.01  # the weights differ by lr C / n


def test_the_search_refutes_a_sum_that_is_not_clipped():
    found = worst_record(
        lambda record: {"w": torch.zeros(3) if record is None else record[0].nan_to_num(0, 1e30, -1e30)},
        (torch.ones(3),),
        tries=50,
    )
    assert found.moved > 10 and found.found > 0 and found.record[0].shape == (3,)


def test_the_search_is_a_function_of_its_seed():
    one, two, three = (worst.search("embedding", tries=20, seed=seed) for seed in (5, 5, 6))
    assert one.moved == two.moved and all(torch.equal(a, b) for a, b in zip(one.record, two.record, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.record, three.record, strict=True))
