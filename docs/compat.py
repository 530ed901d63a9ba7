"""The lowest and the newest supported packages, each in an environment of its own: does a small part of the tests pass? ``make compat``.

The lowest versions are those that pyproject.toml names, the newest those that the package index has; torch is the one that is installed
here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "transformers", "lightning", "flwr")
EXTRAS = ("sklearn", "hf", "lightning", "federated")
SETS = {"lowest": "lowest-direct", "newest": "highest"}
# Accounting, samplers, mechanisms, a step, and each package's own loop.
PART = [
    "tests/laws/test_accounting_laws.py",
    "tests/golden/test_sampling_batches.py",
    "tests/golden/test_noise_mechanisms.py",
    "tests/laws/test_train_step.py",
    "tests/laws/test_estimators.py",
    "tests/stories/test_integrations_huggingface.py",
    "tests/stories/test_integrations_lightning.py",
    "tests/stories/test_federated_engine.py",
]


def _install(name: str, resolution: str) -> Path:
    """An environment with these versions; its Python."""
    place = ROOT / "build" / "compat" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    here = place.with_suffix(".txt")
    here.write_text(f"torch=={version('torch')}\n")
    python, uv = place / "bin" / "python", [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--clear", "-p", sys.executable, place], check=True)
    install = [*uv, "pip", "install", "-q", "-p", python]
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    subprocess.run([*install, "-c", here, "--resolution", resolution, "-r", ROOT / "pyproject.toml", *extras], check=True)
    subprocess.run([*install, "-c", ROOT / "constraints.txt", "pytest", "pytest-timeout", "hypothesis"], check=True)
    return python


def _row(name: str, python: Path) -> str:
    """The versions that came out, and how the tests ended."""
    asked = f"from importlib.metadata import version; print(*map(version, {PACKAGES!r}))"
    versions = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [python, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", *PART]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout[-3000:], done.stderr[-1000:], sep="\n")
    *_, last = done.stdout.strip().splitlines() or ["no answer"]
    return f"| {name} | {' | '.join(versions)} | {last.partition(' in ')[0].strip('= ')} |"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETS, help="this set")
    only = parser.parse_args().only
    rows = [_row(name, _install(name, SETS[name])) for name in ([only] if only else SETS)]
    table = [f"| | {' | '.join(PACKAGES)} | tests |", "|---" * (len(PACKAGES) + 2) + "|", *rows]
    print("\n".join(table))
    return 0 if all("failed" not in row and "passed" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
