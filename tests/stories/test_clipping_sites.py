"""What a captured module is: its forward alone, with whatever outputs, precisions and parameter lists it has."""

import copy

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat, clipped_sum
from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.testing.rules import check_rule


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_a_hook_that_changes_the_output_is_no_part_of_the_layer():
    def make():
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        model[0].register_forward_hook(lambda module, args, output: 2 * output + 1)
        return model

    check_rule(make, torch.randn(6, 4))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state


def test_an_output_that_another_one_is_computed_from():
    check_rule(Cells, torch.randn(6, 3, 4))


class PassesOn(nn.Module):
    """Returns its input as well."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x, x * self.scale


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.layer, self.head = nn.Linear(4, 4), PassesOn(), nn.Linear(4, 3)

    def forward(self, x):
        z = self.before(x)
        a, b = self.layer(z)
        return self.head((a + b.sin() + z * z).relu_())


def test_an_input_that_is_passed_on():
    check_rule(Passing, torch.randn(6, 4))


class State(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        h = torch.ones(1, len(x), 5, dtype=x.dtype)
        y = self.layer(x, (h, h))[0]
        h.zero_()
        return y


def test_a_state_that_is_changed_in_place_is_refused():
    model = State()
    capture = Capture(model)
    capture.attach()
    with pytest.raises(CaptureError, match="changed in place"):
        model(torch.randn(6, 3, 4)).mean().backward()


def test_layers_of_different_precisions():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3).double()

        def forward(self, x):
            return self.b(self.norm(self.a(x)).double())

    model, x, y = Mixed(), torch.randn(6, 4), torch.randint(3, (6,))
    clipped = clipped_sum(model, nn.functional.cross_entropy, (x, y), Flat(1e9))
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(clipped.raw_sums[name], p.grad, rtol=1e-5, atol=1e-6)
        assert clipped.raw_sums[name].dtype == p.dtype


@pytest.mark.parametrize("kind", [nn.ParameterList, nn.ParameterDict])
def test_parameter_lists_belong_to_the_module_that_holds_them(kind):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            values = [torch.randn(4), torch.randn(4)]
            self.p = kind(values) if kind is nn.ParameterList else kind(dict(zip("ab", values, strict=True)))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            a, b = list(self.p) if kind is nn.ParameterList else self.p.values()
            return self.head(x * a + b)

    check_rule(Holder, torch.randn(6, 4))


def test_complex_parameters_are_refused():
    model = nn.Linear(4, 3, dtype=torch.complex64)
    with pytest.raises(CaptureError, match=r"Linear cannot be clipped per example: its parameters are complex.*view_as_complex"):
        Capture(model).attach()


def test_a_copy_of_a_captured_model_is_an_ordinary_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    capture = Capture(model)
    capture.attach()
    x = torch.randn(5, 4)
    model(x).square().mean().backward()
    copied = copy.deepcopy(model)
    copied(x).square().mean().backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert len(capture.collect(Flat(1.0)).raw_norms) == 5 and all(p.grad is None for p in model.parameters())


def test_a_scripted_model_is_refused_by_name_and_works_inside_of_an_ordinary_one():
    torch.manual_seed(0)
    script = torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))
    with pytest.raises(ArgumentError, match=r"no script itself.*nn\.Sequential\(model\)"):
        Capture(script).attach()
    check_rule(
        lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))), torch.randn(6, 4)
    )
