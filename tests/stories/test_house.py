"""The house itself: arrows between the rooms are enforced, and the library does without torch."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

from patience import HANGS

ROOT = Path(__file__).resolve().parents[2]
# Where an import is planted, and what the linter says of it.
FORBIDDEN = {
    "accounting/base.py": ("import hushgrad.noise.base", "hushgrad.accounting.base -> hushgrad.noise.base"),
    "accounting/basic.py": ("import torch", "hushgrad.accounting.basic -> torch"),
    "events/composed.py": ("import numpy", "hushgrad.events.composed -> numpy"),
    "clipping/base.py": ("from hushgrad.noise import base", "hushgrad.clipping.base -> hushgrad.noise.base"),
    "denoise/base.py": ("import hushgrad.train", "hushgrad.denoise.base -> hushgrad.train"),
}


def test_forbidden_imports_are_refused_and_no_others(tmp_path):
    """All of them at once, in a copy: what is reported is what was planted, so that without them the arrows hold."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    head = "from __future__ import annotations\n"
    for room, (line, _) in FORBIDDEN.items():
        file = tmp_path / "src" / "hushgrad" / room
        assert head in file.read_text()
        file.write_text(file.read_text().replace(head, f"{head}{line}\n", 1))
    program = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; "
    program += "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert result.returncode != 0 and "BROKEN" in result.stdout
    chains = re.findall(r"^- .*?\n\n", result.stdout + "\n\n", re.MULTILINE | re.DOTALL)
    said = {words for _, words in FORBIDDEN.values()}
    assert said == {words for words in said for chain in chains if words in chain}  # each is reported,
    assert all(any(words in chain for words in said) for chain in chains)  # and nothing goes wrong without one


def test_importing_it_does_not_import_torch():
    modules = ("hushgrad", "hushgrad.events", "hushgrad.guarantee", "hushgrad.accounting", "hushgrad.cli.main")
    code = "import sys\n" + "".join(f"import {name}\nassert 'torch' not in sys.modules, '{name}'\n" for name in modules)
    assert subprocess.run([sys.executable, "-c", code], timeout=HANGS).returncode == 0


def _documented(name: str, method: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether a class of this name, or one that it is made of, says what the method does."""
    for kind in classes.get(name, []):
        own = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == method]
        parents = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases]
        if any(map(ast.get_docstring, own)) or any(_documented(parent, method, classes) for parent in parents):
            return True
    return False


def _silent(root: Path) -> list[str]:
    """Public methods that nobody documents: neither their own class nor the one that declares them."""
    trees = [ast.parse(file.read_text()) for file in root.rglob("*.py")]
    kinds = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    classes: dict[str, list[ast.ClassDef]] = {}
    for kind in kinds:
        classes.setdefault(kind.name, []).append(kind)
    public = [(kind.name, node.name) for kind in kinds for node in kind.body if isinstance(node, ast.FunctionDef)]
    public = [(kind, method) for kind, method in public if not kind.startswith("_") and not method.startswith("_")]
    return [f"{kind}.{method}" for kind, method in public if not _documented(kind, method, classes)]


def test_a_method_is_documented_where_it_is_declared(tmp_path):
    assert _silent(ROOT / "src" / "hushgrad") == []
    (tmp_path / "one.py").write_text(
        "class A:\n  def f(self): 'Says it.'\n\nclass B(A):\n  def f(self): ...\n  def g(self): ...\n"
    )
    assert _silent(tmp_path) == ["B.g"]


# Whose type is torch's default one where none is given, which is not ours to know: C would write beyond a buffer of half precision.
FACTORIES = {"empty", "zeros", "ones", "rand", "randn", "linspace", "eye"}
ROOMS = ("clipping", "denoise", "integrations", "native", "noise", "release", "sampling", "train")


def _untyped(root: Path) -> list[str]:
    """Tensors that are made in a type that somebody else has chosen; those of a rule's examples have that of the layer beside them."""
    found = []
    for room in ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            tree = ast.parse(file.read_text())
            functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "examples"]
            beside = {id(call) for function in functions for call in ast.walk(function)}
            calls = [
                n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and id(n) not in beside
            ]
            made = [n for n in calls if ast.unparse(n.func) in {f"torch.{name}" for name in FACTORIES}]
            untyped = [n for n in made if not {"dtype", None} & {keyword.arg for keyword in n.keywords}]
            found += [f"{file.name}: {ast.unparse(n)}" for n in untyped if "device='meta'" not in ast.unparse(n)]
    return found


def test_tensors_are_made_in_a_type_of_their_own(tmp_path):
    assert _untyped(ROOT / "src" / "hushgrad") == []
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "one.py").write_text("a = torch.empty(3)\nb = torch.zeros(2, dtype=torch.int64)\n")
    assert _untyped(tmp_path) == ["one.py: torch.empty(3)"]
