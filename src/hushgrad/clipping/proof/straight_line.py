"""Chains of torch's own layers: models in which no line of code is the user's, so that not every pass needs a trace.

What a forward calls may depend on a hidden counter, a rare token or the clock, so it is traced. A chain of torch's own layers calls what
its structure says, as long as nobody has put something of his own in between. One of its passes is traced; the next ones call the same if
everything that decides about it is as it was then, which is looked at before each pass:

- No dict in which a pass looks something up was written to, as the interpreter counts: attributes, parameters, children and hooks of the
  modules, hooks of all modules, members of the classes, the rooms in which functions are found by name (``F.linear``, ``iter``).
- Modules, parameters, and the code of the functions are of the same classes, and have the same dicts and cells; classes, the same bases.
- No mode of functions or of dispatch is active, and nothing packs saved tensors.

What was in all of these when the line was drawn is torch's own, or the capture's: :meth:`StraightLine.of` looks at each of it.
Numbers and words among the attributes need no further look: they are part of the pass's key, which is that of an earlier pass then, too.
"""

from __future__ import annotations

import builtins
import sys
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain, starmap
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

from hushgrad.clipping._torch import dict_of, dict_version
from hushgrad.clipping.proof.pass_key import PLAIN, Line
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
_CALLS = [getattr(nn.Module, name) for name in ("_wrapped_call_impl", "_call_impl", "__getattr__")]
# What a call reads of its module, and of all modules.
_TABLES = frozenset(("_parameters", "_modules", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"))
_GLOBAL = [getattr(_module, f"_global_{name}_hooks") for name in ("forward_pre", "forward", "backward_pre", "backward")]
_FUNCTIONAL = nn.functional.__name__
_OF_TORCH = frozenset((dict, OrderedDict, set, bool, type(None)))  # its own attributes
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

    def __init__(self, modules: list[nn.Module], version: Callable[[dict[Any, Any]], int]) -> None:
        self._modules, self._kinds, self._version = modules, [*map(type, modules)], version
        self._own = [*map(vars, modules)]
        self._params = [p for m in modules for p in m._parameters.values()]
        self._plain = [*map(type, self._params)]
        kinds: list[Any] = [*dict.fromkeys(self._kinds)]
        self._classes = [*dict.fromkeys(c for kind in kinds for c in kind.__mro__ if c is not object)]
        forwards = [getattr(kind, name) for kind in kinds for name in _FORWARDS if hasattr(kind, name)]
        self._places, read = _read_by(forwards)
        self._functions = [*_CALLS, *read]
        self._codes = [function.__code__ for function in self._functions]
        self._cells = [cell for function in self._functions for cell in function.__closure__ or ()]
        self._inside = [cell.cell_contents for cell in self._cells]
        rooms = {id(room): vars(room) for room, _ in self._places if isinstance(room, ModuleType)}
        tables = [table for own in self._own for name, table in own.items() if name in _TABLES]
        classes = [*self._classes, *(kind for kind in Tensor.__mro__ if kind is not object)]
        self._bases = [kind.__mro__ for kind in self._classes]
        self._dicts = [*self._own, *tables, *_GLOBAL, *map(dict_of, classes), *rooms.values(), vars(_module), vars(builtins)]
        self._versions = [*map(version, self._dicts)]

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
        line = None if dict_version is None else cls(modules, dict_version)
        return line if line is not None and line._is_torchs() and line.holds() else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the model has other modules

    def _is_torchs(self) -> bool:
        """Whether functions, and what a call may find in the classes, are as torch has written them.

        Other libraries give all modules methods that no layer calls (``nn.Module.npu``, transformers' ``smart_apply``).
        """
        read = {name for function in self._functions for name in _names(function.__code__)}
        members = [
            (kind.__module__, value)
            for kind in self._classes
            for name, value in vars(kind).items()
            if name in read or name.startswith("_")
        ]
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


def _names(code: CodeType) -> list[str]:
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return [*dict.fromkeys([*code.co_names, *chain.from_iterable(inner)])]


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing among its attributes can be changed from inside or runs code, other than hooks, parameters and children."""
    kind: Any = type(module)
    if (
        any(_GLOBAL)
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._buffers
        or (module._modules and kind is not nn.Sequential)
    ):
        return False
    if not {*map(type, module._parameters.values())} <= {nn.Parameter, type(None)}:
        return False
    for name, value in vars(module).items():
        usual = type(value) in _OF_TORCH if name in TORCHS or name == "training" else _is_fixed(value)
        if not usual and not (name == _UNREAD and module.padding_mode == "zeros"):
            return False
    return not any(hasattr(getattr(kind, name, None), "__get__") for name in (*vars(module), *module._parameters))


def _is_fixed(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))
