"""The house itself: arrows between the rooms are enforced, and the library does without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; "]
    command[-1] += "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))"
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_arrows_hold(copy):
    result = lint(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("accounting/base.py", "import hushgrad.noise.base"),
        ("accounting/base.py", "import torch"),
        ("events/composed.py", "import numpy"),
        ("clipping/base.py", "from hushgrad.noise import base"),
        ("denoise/base.py", "import hushgrad.train"),
    ],
)
def test_a_forbidden_import_is_refused(copy, room, forbidden):
    file = copy / "src" / "hushgrad" / room
    text = file.read_text().replace(
        "from __future__ import annotations\n", f"from __future__ import annotations\n{forbidden}\n", 1
    )
    assert forbidden in text
    file.write_text(text)
    result = lint(copy)
    assert result.returncode != 0
    assert "BROKEN" in result.stdout


@pytest.mark.parametrize(
    "module", ["hushgrad", "hushgrad.events", "hushgrad.guarantee", "hushgrad.accounting", "hushgrad.cli.main"]
)
def test_importing_it_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
