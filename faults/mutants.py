"""Small defects of one file: each a copy of its syntax tree in which one thing is wrong. ``mutate.py`` tries them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mutant", "bare", "mutants"]

_FOR_OTHERS = {
    "examples",
    "suggestions",
    "__repr__",
    "__str__",
}  # read by tests, the planner and people; no guarantee rests on them

_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult}
_CALLED = {"min": "max", "max": "min", "ceil": "floor", "floor": "ceil", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change of one file; ``text`` is its line without the comment, ``lines`` are those of the statement that it is in."""

    file: str
    line: int
    lines: range
    change: str
    text: str
    real: ast.Module
    tree: ast.Module

    @property
    def into(self) -> str:
        """What the line, as Python writes it, becomes."""
        before, after = (ast.unparse(tree).splitlines() for tree in (self.real, self.tree))
        return next(new.strip() for old, new in zip(before, after, strict=False) if old != new)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The ways in which one node can be wrong."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _COMPARED:
        new.ops[0] = _COMPARED[type(new.ops[0])]()
        yield "comparison", new
    elif isinstance(new, ast.BinOp) and type(new.op) in _COMPUTED and not isinstance(new.right, ast.JoinedStr):
        new.op = _COMPUTED[type(new.op)]()
        yield "arithmetic", new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield "and/or", new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not | ast.USub):
        yield "sign", new.operand
    elif isinstance(new, ast.If | ast.IfExp | ast.While):
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield "condition", new
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        yield "truth", ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, int | float):
        yield "number", ast.Constant(new.value + 1)
    elif isinstance(new, ast.Call) and isinstance(new.func, ast.Name | ast.Attribute):
        name = new.func.id if isinstance(new.func, ast.Name) else new.func.attr
        if name in _CALLED:
            new.func = ast.copy_location(_renamed(new.func, _CALLED[name]), new.func)
            yield "function", new
    elif isinstance(new, ast.Raise | ast.Expr) and not (isinstance(new, ast.Expr) and isinstance(new.value, ast.Constant)):
        yield "left out", ast.Pass()


def _renamed(func: ast.Name | ast.Attribute, name: str) -> ast.expr:
    return ast.Name(name, ast.Load()) if isinstance(func, ast.Name) else ast.Attribute(func.value, name, ast.Load())


class _Replace(ast.NodeTransformer):
    def __init__(self, at: int, new: ast.AST) -> None:
        self.at, self.new, self.count = at, new, -1

    def visit(self, node: ast.AST) -> ast.AST:
        self.count += 1
        if self.count == self.at:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def _walk(node: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.AST, ast.stmt | None]]:
    """Each node and its innermost statement, in the order in which a transformer visits."""
    statement = node if isinstance(node, ast.stmt) else statement
    yield node, statement
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, statement)


def _aside(tree: ast.AST) -> set[int]:
    """Nodes of sentences, annotations and their imports, decorators, citations, examples: to change them harms nobody."""
    aside: list[ast.AST] = [
        node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation
    ]
    aside += [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Assert)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            aside += node.decorator_list
        if isinstance(node, ast.FunctionDef):
            aside += node.body if node.name in _FOR_OTHERS else [node.returns] if node.returns else []
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "papers":
            aside.append(node.value)
        if isinstance(node, ast.Raise) and node.exc:
            aside.append(node.exc)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            aside.append(node)
    return {id(part) for node in aside for part in ast.walk(node)}


def bare(line: str) -> str:
    """A line of code without its comment."""
    return line.partition("  # ")[0].strip()


def mutants(package: Path, file: str) -> list[Mutant]:
    """All of one file; their trees keep the file's own lines."""
    text = (package / file).read_text()
    tree, lines = ast.parse(text), text.splitlines()
    aside, found = _aside(tree), []
    for at, (node, statement) in enumerate(_walk(tree)):
        if id(node) in aside:
            continue
        for change, new in changes(node):
            changed = ast.fix_missing_locations(_Replace(at, new).visit(ast.parse(text)))
            assert statement is not None and isinstance(node, ast.expr | ast.stmt) and isinstance(changed, ast.Module)
            reach = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            found.append(Mutant(file, node.lineno, reach, change, bare(lines[node.lineno - 1]), tree, changed))
    return found
