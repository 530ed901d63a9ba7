"""The optional C kernels of src/hushgrad/native; everything else is in pyproject.toml.

Two plain shared libraries without any Python API, loaded by ctypes, so one build serves every Python version. A machine without a
compiler installs all the same: numpy draws the same bits, and numpy or torch clip, denoise and account to rounding the same.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/hushgrad/native")
# No debug information: it would hold the path of the build, and two builds would differ. Python's own flags have -fwrapv; no signed
# number wraps, and vectors need to know.
COMMON = ["-O3", "-g0", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-wrapv"]
# Each operation is rounded by itself, as in numpy: no contraction to fused multiply-add, no fast-math, whatever CFLAGS say. First, for
# -fno-fast-math undoes -fno-math-errno and -fno-trapping-math, without which loops with roots and choices become no vectors.
EXACT = ["-fno-fast-math", "-ffp-contract=off", *COMMON]
# `make sanitize`: whoever reads or writes beside an array, or relies on what C leaves undefined, is told so and stops. Kernels are not
# inlined into each other there: with every check in every copy the compiler does not finish.
SANITIZE = [
    "-O1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-Dalways_inline=unused",
]
SANITIZED = SANITIZE if os.environ.get("HUSHGRAD_SANITIZE") else []
LIBRARIES = {
    "exact": (EXACT, ["noise/*.c", "release/*.c", "rows/*.c", "accounting/*.c", "denoise/direction.c"]),
    "contracted": (COMMON, ["clip/*.c", "denoise/scan.c"]),
}


def library(name: str) -> Extension:
    """Rebuilt when any of its sources or any header has changed."""
    flags, patterns = LIBRARIES[name]
    sources = [NATIVE / "abi.c", NATIVE / "widths.c", *(file for pattern in patterns for file in sorted(NATIVE.glob(pattern)))]
    return Extension(
        f"hushgrad.native._{name}",
        [file.as_posix() for file in sources],
        depends=[file.as_posix() for file in sorted(NATIVE.rglob("*.h"))],
        include_dirs=[NATIVE.as_posix()],
        extra_compile_args=flags + SANITIZED,
        extra_link_args=SANITIZED,
        py_limited_api=True,
        optional=not SANITIZED,
    )


setup(ext_modules=[library(name) for name in LIBRARIES], options={"bdist_wheel": {"py_limited_api": "cp310"}})
