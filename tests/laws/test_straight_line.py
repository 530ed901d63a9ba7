"""A pass over a chain of torch's own layers need not be traced; whatever somebody puts in between is noticed as by a trace."""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hushgrad.clipping.root as root
from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof.straight_line import StraightLine
from hushgrad.errors import HushgradError

SIZES = {
    nn.Linear: (6, 6), nn.Conv1d: (2, 2, 1), nn.Conv2d: (2, 2, 1), nn.Conv3d: (2, 2, 1), nn.LayerNorm: (6,), nn.GroupNorm: (2, 2),
    nn.MaxPool1d: (2,), nn.MaxPool2d: (2,), nn.AvgPool1d: (2,), nn.AvgPool2d: (2,), nn.AdaptiveAvgPool1d: (1,), nn.AdaptiveAvgPool2d: (1,),
}  # fmt: skip
SMOOTH = [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity]


def chain(lot: Random) -> tuple[nn.Sequential, tuple[int, ...]]:
    """A small network of images or of vectors, and the shape of an example."""
    some = [lot.choice(SMOOTH)() for _ in range(4)]
    if lot.random() < 0.5:
        pool = lot.choice([nn.MaxPool2d(2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3)])
        layers = [
            nn.Conv2d(2, 4, 2),
            some[0],
            pool,
            nn.GroupNorm(2, 4),
            some[1],
            nn.Flatten(),
            nn.LazyLinear(6),
            nn.ReLU(),
            some[2],
        ]
        shape: tuple[int, ...] = (2, 6, 6)
    else:
        layers = [nn.Linear(5, 7), some[0], nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 6), nn.ReLU()), some[1], nn.Dropout(0.3)]
        shape = (5,)
    model = nn.Sequential(*layers, nn.Linear(6, 3))
    model(torch.randn(2, *shape))  # lazy layers become ordinary ones
    return model, shape


def mixed(x: Tensor) -> Tensor:
    return x - x.mean(0)


def a_layer(model: nn.Module, lot: Random, *kinds: type[nn.Module]) -> Any:
    """One of the model's layers of these kinds."""
    return lot.choice([m for m in model.modules() if isinstance(m, kinds or nn.Module) and m is not model])


class Mixing(Tensor):
    """An input whose layers see the batch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return mixed(made) if func is F.linear or func is torch.conv2d else made


class MixingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return mixed(made) if func is F.linear else made


class MixingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made - made.mean(0) if func is torch.ops.aten.tanh.default else made


class MixingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return mixed(super().forward(input))


class Untrue(dict):
    """A table with other values than it shows."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) * 1


class Shown(nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return W * 1.5


World = Any  # model, lot, monkeypatch and a stack of contexts
Changed = Callable[[nn.Sequential, Random, pytest.MonkeyPatch, ExitStack], Any]  # returns what makes the next inputs, if anything


def hook(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    a_layer(model, lot).register_forward_hook(lambda module, args, made: mixed(made))


def pre_hook(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    lot.choice([model, a_layer(model, lot)]).register_forward_pre_hook(lambda module, args: tuple(map(mixed, args)))


def backward_hook(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    a_layer(model, lot, *SMOOTH).register_full_backward_hook(lambda module, given, got: tuple(map(mixed, given)))


def backward_pre_hook(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    a_layer(model, lot, *SMOOTH).register_full_backward_pre_hook(lambda module, got: tuple(map(mixed, got)))


def global_hook(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    def after(module: nn.Module, args: Any, made: Tensor) -> Any:
        return mixed(made) if type(module) is nn.Linear else None

    def before(module: nn.Module, args: Any) -> Any:
        return mixed(args[0]) if type(module) is nn.Linear else None

    def back(module: nn.Module, given: Any, got: Any) -> Any:
        return tuple(map(mixed, given)) if type(module) is type(model[1]) else None

    def back_before(module: nn.Module, got: Any) -> Any:
        return tuple(map(mixed, got)) if type(module) is type(model[1]) else None

    which, what = lot.choice(
        [
            (torch_module.register_module_forward_hook, after),
            (torch_module.register_module_forward_pre_hook, before),
            (torch_module.register_module_full_backward_hook, back),
            (torch_module.register_module_full_backward_pre_hook, back_before),
        ]
    )
    stack.callback(which(what).remove)


def functional(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    linear = F.linear
    patch.setattr(F, "linear", lambda x, W, b: mixed(linear(x, W, b)))


def functional_in_python(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    model.append(nn.ReLU())
    relu = F.relu
    patch.setattr(F, "relu", lambda x, inplace=False: mixed(relu(x)))


def of_torch(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    relu = torch.relu
    patch.setattr(torch, "relu", lambda x: mixed(relu(x)))


def the_room(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    class Other:
        linear = staticmethod(lambda x, W, b: mixed(F.linear(x, W, b)))

    patch.setattr(nn.modules.linear, "F", Other)


def own_forward(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    layer = a_layer(model, lot)
    usual = layer.forward
    layer.forward = lambda x: mixed(usual(x))


def own_forward_that_is_a_module(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    layer = a_layer(model, lot, nn.Linear)
    layer.__dict__["forward"] = MixingLinear(layer.in_features, layer.out_features)


def own_call(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    layer = a_layer(model, lot)
    usual = layer._call_impl
    layer._call_impl = lambda *args: mixed(usual(*args))


def class_forward(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    kind = type(a_layer(model, lot))
    usual = kind.forward
    patch.setattr(kind, "forward", lambda self, x: mixed(usual(self, x)))


def class_call(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    kind, name = lot.choice([nn.Module, nn.Linear]), lot.choice(["__call__", "_call_impl"])
    usual = getattr(kind, name)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = usual(self, *args, **kwargs)
        return mixed(made) if type(self) is nn.Linear else made

    patch.setattr(kind, name, call, raising=False)


def class_property(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    patch.setattr(nn.Linear, "weight", property(lambda self: self._parameters["weight"] * 1.5), raising=False)


def class_getattr(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    usual = nn.Module.__getattr__

    def found(self: nn.Module, name: str) -> Any:
        value = usual(self, name)
        return value * 1.5 if name == "weight" and type(self) is nn.Linear else value

    patch.setattr(lot.choice([nn.Module, nn.Linear]), "__getattr__", found, raising=False)


def class_iter(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    usual = nn.Sequential.__iter__
    patch.setattr(nn.Sequential, "__iter__", lambda self: iter([*usual(self), mixed]))


def class_bases(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    name = lot.choice(["__call__", "_call_impl", "__getattr__"])
    usual = getattr(nn.Module, name)

    def member(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = usual(self, *args, **kwargs)
        return mixed(made) if name != "__getattr__" else made * 1.5 if args == ("weight",) else made

    kind: Any = nn.Linear
    stack.callback(setattr, kind, "__bases__", kind.__bases__)
    kind.__bases__ = (type("Between", (nn.Module,), {name: member}),)


def centre(x: Tensor) -> Tensor:
    x.data.sub_(x.data.mean(0))  # no node of the graph tells of it
    return x


def built_in(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    usual, what = builtins.iter, lot.choice([mixed, centre])

    def found(values: Any, *rest: Any) -> Any:
        own = type(values) is type(model._modules.values()) and model[0] in values
        return usual([*values, what]) if own else usual(values, *rest)

    patch.setattr(builtins, "iter", found)


def code(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    def forward(self: Any, input: Any) -> Any:
        return input - input.mean(0) + 0 * self.weight.sum() + 0 * self.bias.sum()

    patch.setattr(
        nn.LayerNorm.forward if nn.LayerNorm in map(type, model.modules()) else nn.GroupNorm.forward, "__code__", forward.__code__
    )


def another_layer(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    class Centred(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            return mixed(super().forward(x))

    model[1] = lot.choice([Centred(), nn.Softplus()])


def another_of_the_same_class(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    layer = type(model[1])()
    layer.register_forward_hook(lambda module, args, made: mixed(made))
    model[1] = layer


def one_more_layer(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    model.append(lot.choice([nn.Softmax(0), nn.Tanh()]))


def another_class(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    a_layer(model, lot, nn.Linear).__class__ = MixingLinear


def eval_mode(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    lot.choice([model, a_layer(model, lot)]).eval()


def chance(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.7


def sizes(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.padding = lot.choice([(2, 0), [1, 1]])


def parametrized(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    nn.utils.parametrize.register_parametrization(a_layer(model, lot, nn.Linear), "weight", Shown())


def other_precision(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> Any:
    model.double()
    return torch.Tensor.double


def own_table(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    layer = a_layer(model, lot, nn.Linear)
    layer._parameters = Untrue(layer._parameters)


def own_hooks(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    class Hooks(OrderedDict[int, Any]):
        def items(self) -> Any:
            return [*super().items(), (10**9, lambda module, args, made: mixed(made))]

    layer = a_layer(model, lot)
    layer._forward_hooks = Hooks(layer._forward_hooks)


def another_parameter(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    layer = a_layer(model, lot, nn.Linear)
    layer._parameters["weight"] = lot.choice([nn.Parameter(layer.weight.detach().clone()), layer.weight.detach() * 1.5])


def frozen(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    a_layer(model, lot, nn.Linear).weight.requires_grad_(False)


def parameter_hook(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    p = a_layer(model, lot, nn.Linear).weight
    lot.choice([p.register_hook, p.register_post_accumulate_grad_hook])(lambda g: None)


def subclass(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> Any:
    return lambda x: x.as_subclass(Mixing)


def parameter_input(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> Any:
    return lambda x: nn.Parameter(x, requires_grad=False)


def mode(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    stack.enter_context(lot.choice([MixingMode, MixingDispatch])())


def packed(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    stack.enter_context(saved_tensors_hooks(lambda t: t * 1, lambda t: t))


def closure(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    cell = next(c for c in F.max_pool2d.__closure__ if getattr(c.cell_contents, "__name__", "") == "_max_pool2d")
    usual = cell.cell_contents
    patch.setattr(cell, "cell_contents", lambda *args, **kwargs: mixed(usual(*args, **kwargs)))


def nothing(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None: ...


CHANGES: list[Changed] = [
    hook, pre_hook, backward_hook, backward_pre_hook, global_hook, functional, functional_in_python, of_torch, the_room, own_forward,
    own_forward_that_is_a_module, own_call, class_forward, class_call, class_property, class_getattr, class_iter, class_bases, built_in,
    code, another_layer, another_of_the_same_class, one_more_layer, another_class, eval_mode, chance, sizes, parametrized, other_precision,
    own_table, own_hooks, another_parameter, frozen, parameter_hook, subclass, parameter_input, mode, packed, closure, nothing,
]  # fmt: skip
UNSEEN = {
    chance,
    sizes,
    frozen,
    parameter_hook,
    nothing,
    closure,
    of_torch,
    code,
}  # what some models do not have, or only a backward pass meets


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many passes that are no proof's were traced."""
    made, usual = list[int](), root.Root._exit

    def leave(self: Any, module: nn.Module, *args: Any) -> None:
        here = self.running[-1] if self.running else None
        if here is not None and module is self.model and self._trials.runs is None:
            made.append(here.trace is not None)
        usual(self, module, *args)

    patch.setattr(root.Root, "_exit", leave)
    yield made


def told(change: Changed, seed: int, *, always: bool) -> tuple[list[Any], list[int]]:
    """What a run says whose model is changed after four batches, and which of its passes were traced."""
    lot, said = Random(seed), list[Any]()
    torch.manual_seed(seed)
    model, shape = chain(lot)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack, counted(patch) as traced:
        if always:
            patch.setattr(StraightLine, "holds", lambda line: False)
        capture, prepared = Capture(model), None
        capture.attach()
        for step in range(7):
            if step == 4:
                prepared = change(model, lot, patch, stack)
            x = torch.randn(8, *shape)
            try:
                model(x if prepared is None else prepared(x)).square().sum(-1).mean().backward()
                made = capture.collect(Flat(1.0))
                said.append((made.raw_norms.tolist(), [v.double().sum().item() for v in made.raw_sums.values()]))
            except (HushgradError, RuntimeError, TypeError, AttributeError, KeyError) as error:
                said.append((type(error), str(error)))
                capture.discard()
        stack.close()
        patch.undo()
        capture.detach()
    return said, traced


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_is_put_in_between_is_told_as_by_a_trace(change: Changed) -> None:
    untraced = 0
    for seed in range(3):
        (said, traced), (always, every) = told(change, seed, always=False), told(change, seed, always=True)
        assert said == always, seed
        assert all(every)
        assert not all(traced[2:4])  # the first two are proved and seen
        untraced += not any(traced[4:])
        if change not in UNSEEN:
            assert len(traced) == 4 or traced[4], seed
    assert untraced or change is not nothing


class OtherParameter(nn.Parameter): ...


def own_dict(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    model[1].__dict__ = dict(vars(model[1]))


def class_of_a_parameter(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    model[0].weight.__class__ = OtherParameter


def class_of_a_layer(model: nn.Sequential, lot: Random, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    model[-1].__class__ = MixingLinear


@pytest.mark.parametrize(
    "change",
    [
        code,
        closure,
        own_dict,
        class_of_a_parameter,
        class_of_a_layer,
        mode,
        packed,
        functional,
        of_torch,
        sizes,
        chance,
        class_property,
    ],
)
def test_a_line_does_not_hold_after_what_a_trace_would_not_see_either(change: Changed) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    line = StraightLine.of(model)
    assert line is not None
    assert line.holds()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        change(model, Random(0), patch, stack)
        assert not line.holds()


def test_methods_that_no_layer_calls_change_nothing(monkeypatch):
    """Libraries of devices give all modules one (``module.npu()``), transformers another."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    monkeypatch.setattr(nn.Module, "elsewhere", lambda module: module, raising=False)
    line = StraightLine.of(model)
    assert line is not None
    assert line.holds()
    monkeypatch.setattr(nn.Module, "__getattr__", lambda module, name: vars(module)[name])
    assert StraightLine.of(model) is None
    assert not line.holds()
