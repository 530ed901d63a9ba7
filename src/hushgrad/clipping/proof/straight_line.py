"""Chains of torch's own layers: models in which no line of code is the user's, so that not every pass needs a trace.

What a forward calls may depend on a hidden counter, a rare token or the clock, so it is traced. A chain of torch's own layers calls what
its structure says, as long as nobody has put something of his own in between. One of its passes is traced; the next ones call the same if
everything that decides about it is as it was then. That is looked at before each pass, and costs a tenth to a half of a trace:

| what | how |
|---|---|
| modules, parameters, tables of hooks, what a forward reads of its module | the very same objects, of exactly torch's classes |
| what a module, or a class, could have in front of them: its own ``forward``, a property ``weight`` | not there |
| hooks inside of the pass | the capture's alone; that they are the same is part of the pass's key |
| ``forward``, ``__call__`` and so on of the classes; what these look up: ``F.linear``, ``torch.relu`` | the very same functions and code |
| modes of functions and of dispatch, functions that pack saved tensors | none |
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from itertools import chain, starmap
from operator import methodcaller
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

from hushgrad.clipping.proof.pass_key import OF_HOOKS, PLAIN, Line
from hushgrad.clipping.proof.state import TORCHS
from hushgrad.clipping.site import Site

# Layers whose forward calls one function, and decides nothing by what tensors hold.
LAYERS = frozenset(
    {
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.Dropout, nn.Flatten, nn.Identity,
        nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid,
        nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    }
)  # fmt: skip
_KINDS = LAYERS | {nn.Sequential}
_FORWARDS = ("forward", "_conv_forward", "__iter__")
_CALLED = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__")
_CALLS = [getattr(nn.Module, name) for name in _CALLED[1:4]]
_ALWAYS = ("_parameters", "_buffers", "_modules", *OF_HOOKS)  # read of every module, which no class may have instead
_PARTS = ("_modules", "_parameters")
_FUNCTIONAL = nn.functional.__name__
_GLOBAL = [(_module, name) for name in vars(_module) if name.startswith("_global_") and "registration" not in name]
_TABLES = frozenset((dict, OrderedDict, set, bool, type(None)))  # torch's own attributes
_UNREAD = "_reversed_padding_repeated_twice"  # of a convolution that pads with zeros
_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, type)  # a class is asked for, not called


class StraightLine(Line):
    """All that decides about the course of the calls in a chain of torch's own layers.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> line = StraightLine.of(model)
    >>> line.holds()
    True
    >>> model[1].forward = lambda x: x * x.mean()
    >>> line.holds(), StraightLine.of(model)
    (False, None)
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._tables = [table for m in modules for table in (m._modules, m._parameters) if table]
        self._params = [p for m in modules for p in m._parameters.values()]
        kinds: list[Any] = [*dict.fromkeys(map(type, modules))]
        self._classes = [*dict.fromkeys(c for kind in kinds for c in kind.__mro__ if c is not object)]
        members = [(kind, name) for kind in kinds for name in (*_FORWARDS, *_CALLED) if hasattr(kind, name)]
        looked_up, self._functions = _read_by([getattr(kind, name) for kind, name in members if name in _FORWARDS])
        own = [(m, name) for m in modules for name in _names(_last_forward(m).__code__) if name in vars(m) and name not in _PARTS]
        own += [(m, name) for m in modules for name in _PARTS if vars(m)[name]]
        read = (*_ALWAYS, *(name for _, name in own), *(name for m in modules for name in m._parameters))
        self._lacks = methodcaller("isdisjoint", frozenset(read))
        self._places = [*_GLOBAL, *members, *own, *looked_up]
        self._functions += _CALLS
        self._cells = [cell for function in self._functions for cell in function.__closure__ or ()]

    @classmethod
    def of(cls, model: nn.Module, enter: Any = None, leave: Any = None) -> StraightLine | None:
        """The chain; None if it is none. ``enter`` and ``leave`` are the hooks of ``model`` between which a pass is watched."""
        modules = [*model.modules()]
        if not all(type(m) in _KINDS and _is_plain(m) for m in modules):
            return None
        for m in modules:
            before, after = [*m._forward_pre_hooks.values()], [*m._forward_hooks.values()]
            if m is model and enter is not None:
                before, after = before[before.index(enter) + 1 :], after[: after.index(leave)]
            if any(type(getattr(hook, "__self__", None)) is not Site for hook in (*before, *after)):
                return None
        line = cls(modules)
        return line if line._is_torchs() and line.holds() else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the model has other modules

    def _is_torchs(self) -> bool:
        """Whether all classes and functions are as torch has written them."""
        members = [(kind.__module__, value) for kind in self._classes for value in vars(kind).values()]
        found = [(getattr(value, "__module__", None), value) for value in starmap(getattr, self._places)]
        own = [(function.__globals__["__name__"], function) for function in self._functions]
        return all(not callable(value) or _is_torchs(room, value) for room, value in (*members, *found, *own))


def _is_torchs(room: str | None, value: Any) -> bool:
    """Whether a function is written in C, or in the file of the module that it says it is of."""
    if isinstance(value, FunctionType):
        room = value.__globals__["__name__"] if room == _FUNCTIONAL else room  # some are made by a function of another module
        return room is not None and room.startswith("torch.") and value.__code__.co_filename == sys.modules[room].__file__
    return isinstance(value, _IN_C)


def _read_by(functions: list[Any]) -> tuple[list[tuple[Any, str]], list[FunctionType]]:
    """Where functions look up what they call, and those among what they call that are written in Python, themselves included."""
    places, asked, queue = dict[tuple[Any, str], None](), dict[FunctionType, None](), [*functions]
    while queue:
        function = queue.pop()
        if not isinstance(function, FunctionType) or function in asked:
            continue
        asked[function] = None
        names, known = _names(function.__code__), function.__globals__
        found = [(sys.modules[known["__name__"]], name) for name in names if name in known]
        rooms = [known[name] for _, name in found if isinstance(known[name], ModuleType)]
        found += [(room, name) for room in rooms for name in names if name in vars(room)]
        places |= dict.fromkeys(found + [(Tensor, name) for name in names if name not in known and hasattr(Tensor, name)])
        called = [vars(room)[name] for room, name in found] + [cell.cell_contents for cell in function.__closure__ or ()]
        queue += [one for one in called if getattr(one, "__module__", None) == _FUNCTIONAL and one is not nn.functional.pad]
    return [*places], [*asked]


def _last_forward(module: nn.Module) -> Any:
    return getattr(type(module), "_conv_forward", type(module).forward)


def _names(code: CodeType) -> list[str]:
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return [*dict.fromkeys([*code.co_names, *chain.from_iterable(inner)])]


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing among its attributes can be changed from inside or runs code, other than hooks, parameters and children."""
    kind: Any = type(module)
    if module._backward_hooks or module._backward_pre_hooks or module._buffers or (module._modules and kind is not nn.Sequential):
        return False
    if not {*map(type, module._parameters.values())} <= {nn.Parameter, type(None)}:
        return False
    for name, value in vars(module).items():
        usual = type(value) in _TABLES if name in TORCHS or name == "training" else _is_fixed(value)
        if not usual and not (name == _UNREAD and module.padding_mode == "zeros"):
            return False
    return not any(hasattr(getattr(kind, name, None), "__get__") for name in (*vars(module), *module._parameters))


def _is_fixed(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))
