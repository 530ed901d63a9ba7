"""One file and one import line: a part of each kind is added to a copy of the house, and the conformance tests find it there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANGS

ROOT = Path(__file__).resolve().parents[2]
PAPER = 'papers = (_papers.Paper("nobody2026own", "Nobody", "A part of our own", kind="misc"),)'
HEAD = "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\nfrom hushgrad import _papers\n"
# room: the name that its import line makes public, and the file
PARTS = {
    "noise": ("HalfDamped", f'''{HEAD}
from hushgrad.noise.anti_pgd import AntiPGD
from hushgrad.noise.suggestions import Suggestion


@dataclass(frozen=True, kw_only=True)
class HalfDamped(AntiPGD):
    """Half of the last step's noise is taken back."""

    {PAPER}
    damping: float | None = 0.5

    @classmethod
    def examples(cls):
        return (cls(),)

    @classmethod
    def suggestions(cls, run):
        if run.rate is None:
            yield Suggestion(name="HalfDamped", make=cls, why="Needs no state.", work=2)
'''),
    "denoise": ("Halved", f'''{HEAD}
from hushgrad.denoise.base import Denoiser


@dataclass(frozen=True, kw_only=True)
class Halved(Denoiser):
    """Half of the gradient."""

    {PAPER}

    def __call__(self, grads, info, state):
        return {{name: grad / 2 for name, grad in grads.items()}}
'''),
    "sampling": ("Coin", f'''{HEAD}
from hushgrad.sampling.poisson import Poisson


@dataclass(frozen=True, kw_only=True)
class Coin(Poisson):
    """Every record with probability one half."""

    {PAPER}
    rate: float = 0.5
    steps: int = 12

    @classmethod
    def examples(cls):
        return (cls(),)
'''),
    "clipping": ("Tight", f'''{HEAD}
from hushgrad.clipping.flat import Flat


@dataclass(frozen=True)
class Tight(Flat):
    """A small norm."""

    {PAPER}
    max_grad_norm: float = 0.1

    @classmethod
    def examples(cls):
        return (cls(),)
'''),
    "accounting": ("Twin", f'''{HEAD}
from hushgrad.accounting.base import Accountant
from hushgrad.accounting.gdp import GDP


class Twin(Accountant):
    """Central limits that are none, once more."""

    {PAPER}
    name = "twin"

    def total(self, parts):
        return GDP().total(parts)


Twin._leaves.update(GDP._leaves)
'''),
    "estimators": ("DPCount", f'''from typing import ClassVar

from hushgrad import _papers
from hushgrad.estimators.base import DPEstimator
from hushgrad.estimators.bounded import validated
from hushgrad.estimators.methods import Budget
from hushgrad.estimators.randomness import randomness
from hushgrad.events import PureDP, Relation


class DPCount(DPEstimator):
    """How many rows there are."""

    {PAPER}
    released: ClassVar = {{**DPEstimator.released, "count_": "Laplace mechanism"}}

    def __init__(self, epsilon=1.0, *, relation="add_remove", random_state=None):
        self.epsilon, self.relation, self.random_state = epsilon, relation, random_state

    @classmethod
    def examples(cls):
        return (cls(epsilon=1e4, random_state=0),)

    def fit(self, X, y=None):
        budget, random = Budget(self.epsilon, 0.0, Relation.of(self.relation)), randomness(self.random_state)
        a, b = random.exponential(2)
        self.count_ = len(validated(self, X)) + (a - b) / self.epsilon
        self.guarantee_ = budget.guarantee(PureDP(self.epsilon), "basic", random.notes)
        return self
'''),
    "clipping/rules": ("ScaledRule", '''import torch
from torch import nn

from hushgrad.clipping.base import Rule, rule


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.weight


@rule(Scaled)
class ScaledRule(Rule):
    """G_i = x_i g_i."""

    parameters = frozenset({"weight"})

    @staticmethod
    def examples():
        return ((Scaled(), (torch.randn(5, 3),)),)

    def per_example(self, record):
        return {"weight": record.x * record.g}
'''),
}  # fmt: skip
TESTS = {
    "laws/test_noise_mechanisms.py": "HalfDamped",
    "laws/test_denoise_conformance.py": "Halved",
    "statistics/test_sampling_promises.py": "Coin",
    "laws/test_clipping_clippers.py": "Tight",
    "laws/test_accounting_laws.py": "twin",
    "laws/test_clipping_rules.py": "Scaled",
    "laws/test_estimators.py": "DPCount",
    "laws/test_estimators_released.py": "DPCount",
    "laws/test_report_citations.py": "DPCount or HalfDamped or Halved or Coin or Tight or Twin or nobody2026own",
}
FOUND = """
from hushgrad.cli._question import accountant_names
from hushgrad.planner import compare
found = compare(epsilon=2.0, delta=1e-5, dataset_size=200, batch_size=50, epochs=2, sampling_allowed=False, memory=0)
assert "HalfDamped" in [candidate.name for candidate in found]
assert "twin" in accountant_names("all")
from hushgrad.cli.main import main
assert main(["epsilon", "--noise-multiplier", "2", "--delta", "1e-5", "--accountant", "twin"]) == 0
from hushgrad._value import Value
import hushgrad.noise, hushgrad.sampling, hushgrad.denoise, hushgrad.clipping
for kind in (hushgrad.noise.HalfDamped, hushgrad.sampling.Coin, hushgrad.denoise.Halved, hushgrad.clipping.Tight):
    assert Value.from_json(kind().to_json()) == kind()
assert main(["mine", "--word", "hello"]) == 0
from hushgrad.cli.completion import words_of
assert words_of("mine") == ([], ["--help", "--json", "--word"])
print("all found")
"""
COMMAND = '''"""A command of our own."""
from hushgrad.cli._parser import Parser, say


def _parser():
    parser = Parser("mine", "Say a word.", example="hushgrad mine --word hello")
    parser.takes("--word WORD", "what is said")
    return parser


def run(words):
    options = _parser().parse(words)
    return say(options, {"word": options.word}, options.word)
'''


@pytest.mark.slow
def test_a_part_of_each_kind_is_one_file_and_one_import_line(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    for room, (name, text) in PARTS.items():
        folder = tmp_path / "src" / "hushgrad" / room
        (folder / "mine.py").write_text(f'"""A part of our own."""\n{text}')
        with (folder / "__init__.py").open("a") as init:
            init.write(f"from hushgrad.{room.replace('/', '.')}.mine import {name}\n__all__ += ['{name}']\n")
    commands = tmp_path / "src" / "hushgrad" / "cli"
    (commands / "mine.py").write_text(COMMAND)
    listed = (commands / "main.py").read_text()
    (commands / "main.py").write_text(listed.replace('    "epsilon": ', '    "mine": "say a word",\n    "epsilon": '))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    words = [f"tests/{file}" for file in TESTS]
    chosen = " or ".join(TESTS.values())
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", *words, "-k", chosen],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert told.returncode == 0, told.stdout[-3000:]
    for file, names in TESTS.items():
        for name in names.split(" or "):
            assert re.search(rf"{file}::\S*{name}.*PASSED", told.stdout), (file, name)
    told = subprocess.run(
        [sys.executable, "-c", FOUND], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS
    )
    assert told.stdout.endswith("all found\n"), told.stderr[-3000:]
