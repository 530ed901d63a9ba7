"""The optional C kernels of clipping, noise, denoising and accounting; everything else is in pyproject.toml.

A kernel is a plain shared library without any Python API, loaded by ctypes, so one build serves every Python version. A machine
without a compiler installs all the same: numpy draws the same bits, and numpy or torch clip, denoise and account to rounding the same.
"""

from setuptools import Extension, setup

# Each operation is rounded by itself, as in numpy: no contraction to fused multiply-add, no fast-math, whatever CFLAGS say.
# No debug information: it would hold the path of the build, and two builds would differ.
COMMON = ["-O3", "-g0", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math"]
VECTORS = [*COMMON, "-fno-wrapv"]  # Python's own flags have -fwrapv; no signed number wraps, and vectors need to know
FLAGS = [*COMMON, "-fno-fast-math", "-ffp-contract=off"]

setup(
    ext_modules=[
        Extension(
            "hushgrad.noise._gauss",
            [f"src/hushgrad/noise/{name}.c" for name in ("_gauss", "_cipher", "_chacha", "_rows", "_grid")],
            depends=[
                f"src/hushgrad/noise/{name}.h"
                for name in ("_fused_of", "_gauss", "_gauss_of", "_grid_of", "_rows_drawn", "_rows_of", "_widths")
            ],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "hushgrad.denoise._scan",
            ["src/hushgrad/denoise/_scan.c"],
            depends=["src/hushgrad/denoise/_scan_of.h"],
            extra_compile_args=COMMON,
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "hushgrad.clipping._clip",
            ["src/hushgrad/clipping/_clip.c"],
            depends=[f"src/hushgrad/clipping/{name}_of.h" for name in ("_lanes", "_rows", "_conv", "_wide")],
            extra_compile_args=COMMON,
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "hushgrad.release._witness",
            ["src/hushgrad/release/_witness.c"],
            extra_compile_args=VECTORS,
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "hushgrad.accounting.pld.bounds._convex",
            ["src/hushgrad/accounting/pld/bounds/_convex.c"],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
