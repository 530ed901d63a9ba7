"""Tells hooks that only look: they return nothing, and write nowhere but into containers of their own."""

from __future__ import annotations

from dis import Instruction, get_instructions
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_WRITES = frozenset(
    ("data", "numpy", "out", "copyto", "register_hook", "grad", "setattr", "exec", "eval", "getattr", "vars", "__dict__")
)
_KEEPS = frozenset(("append", "appendleft", "add", "extend", "update", "put", "put_nowait"))  # return None
_READS = frozenset(
    "detach clone cpu to float double item tolist size dim numel shape norm mean std var sum abs max min median quantile histc square sqrt "
    "isnan isinf isfinite any all flatten reshape view amax amin count_nonzero add_scalar add_histogram log info debug warning write "
    "format join items keys values get".split()
)
_OF_OTHERS = ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_CLASSDEREF")


def is_silent(hook: Any) -> bool:
    """Whether a hook certainly neither replaces what it is given nor writes to it: its code returns None, and uses no such function.

    >>> seen = []
    >>> is_silent(lambda module, given, made: seen.append(made.detach())), is_silent(lambda module, given, made: made * 2)
    (True, False)
    """
    while isinstance(hook, (partial, MethodType)):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    if not isinstance(hook, FunctionType):
        return False
    held = [cell.cell_contents for cell in hook.__closure__ or () if _is_set(cell)]
    held += [hook.__globals__.get(name) for name in hook.__code__.co_names]
    return _only_looks(hook.__code__) and not any(callable(one) or isinstance(one, ModuleType) for one in held)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@cache
def _only_looks(code: CodeType) -> bool:
    named = [name for const in code.co_consts if isinstance(const, tuple) for name in const]  # of arguments
    if any(isinstance(inner, CodeType) for inner in code.co_consts) or any(map(_may_write, code.co_names)):
        return False
    if "out" in named or "inplace" in named:
        return False
    steps = [step for step in get_instructions(code) if step.opname not in ("PRECALL", "CACHE", "NOP", "RESUME", "EXTENDED_ARG")]
    return all(_is_harmless(steps, k) for k in range(len(steps)))


def _may_write(name: str) -> bool:
    return name in _WRITES or name.endswith("_")


def _is_harmless(steps: list[Instruction], k: int) -> bool:
    """Whether instruction ``k`` does not return anything but None, and does not write into what the hook was given."""
    step, before = steps[k], [one.opname for one in steps[max(0, k - 2) : k]]
    if step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and "NULL" in step.argrepr):
        return step.argval in _READS or step.argval in _KEEPS
    if step.opname == "RETURN_VALUE":
        return _is_none(steps[k - 1]) or _has_kept(steps[:k])
    if step.opname == "RETURN_CONST":
        return step.argval is None
    if step.opname == "STORE_SUBSCR":  # the container comes before a key that is loaded at once
        return len(before) == 2 and before[0] in _OF_OTHERS and before[1].startswith("LOAD_")
    if step.opname.startswith("INPLACE_") or (step.opname == "BINARY_OP" and step.argrepr.endswith("=")):
        return steps[k + 1].opname in ("STORE_DEREF", "STORE_GLOBAL", "STORE_ATTR")
    return step.opname not in ("STORE_SLICE", "DELETE_SUBSCR", "YIELD_VALUE")


def _is_none(step: Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None


def _has_kept(steps: list[Instruction]) -> bool:
    """Whether the last call is the outermost one, of a method that puts something into a container."""
    methods = [one.argval for one in steps if one.opname in ("LOAD_METHOD", "LOAD_ATTR")]
    return steps[-1].opname.startswith("CALL") and bool(methods) and methods[0] in _KEEPS
