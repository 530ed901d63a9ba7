"""What Python and C agree on. Written by _generate.py from abi.h: edit that, and run ``make abi``."""

# fmt: off

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

At = ctypes.c_void_p
Size = ctypes.c_size_t
Field = ctypes.c_uint64
Int = ctypes.c_int
Long = ctypes.c_long
Float = ctypes.c_float
Double = ctypes.c_double

ABI = 1766454172
PAIRS = 128
GROUP = 256
GROUP_BLOCKS = 96
ROUND_KEYS = 240
TILE = 1024
TILE_STRIDE = 1104
PARTS = 8
OUTPUTS_AT_MOST = 32
PATCH_ROW = 16
PANEL_DEPTH = 256
PANEL_ROWS = 144
PANEL_COLUMNS = 16
WITNESS_WORDS = 1024
WITNESS_BLOCKS = 32


class Address(ctypes.Structure):
    """``address`` of abi.h."""

    _fields_: ClassVar = [
        ("round_keys", At),
        ("cipher", Field),
        ("step", Field),
        ("index", Field),
    ]


class Solutions(ctypes.Structure):
    """``solutions`` of abi.h."""

    _fields_: ClassVar = [
        ("weights", At),
        ("history", At),
        ("inner", At),
        ("diagonal", At),
        ("kept", At),
        ("rows", Field),
        ("count", Field),
    ]


class Facts(ctypes.Structure):
    """``facts`` of abi.h."""

    _fields_: ClassVar = [
        ("ratio", Double),
        ("h", Double),
        ("inverse", Double),
        ("limit", Double),
    ]


class Bound(ctypes.Structure):
    """``bound`` of abi.h."""

    _fields_: ClassVar = [
        ("relative", Double),
        ("absolute", Double),
        ("far", Double),
    ]


class Geometry(ctypes.Structure):
    """``geometry`` of abi.h."""

    _fields_: ClassVar = [
        ("channels", Size),
        ("height", Size),
        ("width", Size),
        ("above", Size),
        ("left", Size),
        ("padded_h", Size),
        ("padded_w", Size),
        ("kernel_h", Size),
        ("kernel_w", Size),
        ("stride_h", Size),
        ("stride_w", Size),
        ("dilation_h", Size),
        ("dilation_w", Size),
        ("out_channels", Size),
        ("out_h", Size),
        ("out_w", Size),
        ("taps", Size),
        ("row", Size),
    ]


class Signal(ctypes.Structure):
    """``signal`` of abi.h."""

    _fields_: ClassVar = [
        ("v", At),
        ("d", Field),
        ("reach", Field),
        ("alpha", Float),
        ("scale", Float),
        ("before", Float),
        ("after", Float),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = (Address, Solutions, Facts, Bound, Geometry, Signal,)
SIGNATURES: dict[str, dict[str, tuple[Any, tuple[Any, ...]]]] = {  # library, function: result, arguments
    "both": {
        "vectors": (Int, (Int,)),
    },
    "exact": {
        "gaussians_f32": (None, (At, At, Size)),
        "gaussians_f64": (None, (At, At, Size)),
        "write_f32": (None, (At, Float, At, Size)),
        "write_f64": (None, (At, Double, At, Size)),
        "add_f32": (None, (At, Float, At, Size)),
        "add_f64": (None, (At, Double, At, Size)),
        "buffers_f32": (None, (At, At, Size, At, At, Size, Float, Int, At, Size)),
        "buffers_f64": (None, (At, At, Size, At, At, Size, Double, Int, At, Size)),
        "combine_f32": (None, (At, Size, At, Size, At, Size, Size)),
        "combine_f64": (None, (At, Size, At, Size, At, Size, Size)),
        "solve_f32": (None, (At, At, Size, At, Size, Size)),
        "solve_f64": (None, (At, At, Size, At, Size, Size)),
        "cipher": (Int, ()),
        "expand_key": (None, (At, At)),
        "draw_f32": (None, (ctypes.POINTER(Address), Field, Float, Int, At, Size)),
        "draw_f64": (None, (ctypes.POINTER(Address), Field, Double, Int, At, Size)),
        "draw_many_f32": (None, (At, Size, Float, Int)),
        "draw_many_f64": (None, (At, Size, Double, Int)),
        "draw_rows_f32": (None, (ctypes.POINTER(Address), At, At, At, Size, Size, At)),
        "draw_rows_f64": (None, (ctypes.POINTER(Address), At, At, At, Size, Size, At)),
        "draw_seen_f32": (None, (At, Size, Float)),
        "draw_seen_f64": (None, (At, Size, Double)),
        "drawn_buffers_f32": (None, (ctypes.POINTER(Address), Field, At, Size, At, At, Size, Float, Int, At, Size)),
        "drawn_buffers_f64": (None, (ctypes.POINTER(Address), Field, At, Size, At, At, Size, Double, Int, At, Size)),
        "drawn_solutions_f32": (None, (ctypes.POINTER(Address), Field, ctypes.POINTER(Solutions), At, Float, Int, At, Size)),
        "drawn_solutions_f64": (None, (ctypes.POINTER(Address), Field, ctypes.POINTER(Solutions), At, Double, Int, At, Size)),
        "drawn_combinations_f32": (None, (ctypes.POINTER(Address), Field, At, Size, Size, At, At, Size, Size)),
        "drawn_combinations_f64": (None, (ctypes.POINTER(Address), Field, At, Size, Size, At, At, Size, Size)),
        "rounded": (Size, (ctypes.POINTER(Address), Field, ctypes.POINTER(Facts), ctypes.POINTER(Bound), At, Size, At)),
        "chacha": (None, (At, Field, Field, Field, At, Size)),
        "witness": (None, (At, Size, At, At)),
        "sum_above": (Long, (At, At, Long, At, At, Long, Double, Double, Double, At, Long, At, At)),
        "sum_below": (Long, (At, At, Long, At, At, Long, Double, Double, At, Long, At, At)),
        "direction": (None, (At, At, At, At, Size, Float, Float, Float, Float, Float)),
        "add_rows": (Int, (At, At, At, Size, Size, Size, Size, At, Size)),
    },
    "contracted": {
        "outer_sq_norms": (Int, (At, Size, At, Size, Size, Double, At, At)),
        "total": (Int, (At, Size, Size, Double, At, At)),
        "clip": (Int, (At, Size, Size, Double, Double, Double, Int, At, At)),
        "outer_sums": (None, (At, Size, At, Size, At, Size, At, At)),
        "products": (None, (At, Size, At, Size, Size, Size, At, Int)),
        "outer_gradients": (None, (At, Size, At, Size, Size, Size, At, At)),
        "offset_gradients": (None, (At, Size, Size, At, Size, Size, Size, At, Size, Size, Size, At)),
        "kernel_gradients": (None, (ctypes.POINTER(Geometry), At, At, Size, At, At, At)),
        "sq_norms": (None, (At, Size, Size, At)),
        "row_norms": (Size, (At, At, At, Size, Size, Size, At, Size, At, At, At, At, At)),
        "gram": (None, (At, Size, Size, Size, Size, Size, Size, At, At)),
        "group_norms": (None, (At, Size, At, Size, At, At, Size, Double, At, At)),
        "wide_sums": (None, (At, Size, At, Size, At, Size, Size, Size, At, At, At, Int)),
        "wide_kept": (None, (At, Size, At, Size, Size, Size, At)),
        "smooth": (None, (ctypes.POINTER(Signal), Size, Size, At)),
    },
}
REFERENCES: dict[str, tuple[str, bool]] = {  # what a kernel is compared with, and whether bit for bit
    "gaussians_f32": ("hushgrad.noise._box_muller.gaussians", True),
    "gaussians_f64": ("hushgrad.noise._box_muller.gaussians", True),
    "write_f32": ("hushgrad.noise._kernel.NumpyKernel.emit", True),
    "write_f64": ("hushgrad.noise._kernel.NumpyKernel.emit", True),
    "add_f32": ("hushgrad.noise._kernel.NumpyKernel.emit", True),
    "add_f64": ("hushgrad.noise._kernel.NumpyKernel.emit", True),
    "buffers_f32": ("hushgrad.noise._kernel.NumpyKernel.buffers", True),
    "buffers_f64": ("hushgrad.noise._kernel.NumpyKernel.buffers", True),
    "combine_f32": ("hushgrad.noise._kernel.NumpyKernel.combine", True),
    "combine_f64": ("hushgrad.noise._kernel.NumpyKernel.combine", True),
    "solve_f32": ("hushgrad.noise._kernel.NumpyKernel.solve", True),
    "solve_f64": ("hushgrad.noise._kernel.NumpyKernel.solve", True),
    "expand_key": ("hushgrad.noise._aes_ctr.KeyStream.words", True),
    "draw_f32": ("hushgrad.noise._kernel.NumpyKernel.draw", True),
    "draw_f64": ("hushgrad.noise._kernel.NumpyKernel.draw", True),
    "draw_many_f32": ("hushgrad.noise._kernel.NumpyKernel.draw_all", True),
    "draw_many_f64": ("hushgrad.noise._kernel.NumpyKernel.draw_all", True),
    "draw_rows_f32": ("hushgrad.noise.table_rows.add_rows", True),
    "draw_rows_f64": ("hushgrad.noise.table_rows.add_rows", True),
    "draw_seen_f32": ("hushgrad.noise._kernel.NumpyKernel.draw_seen", True),
    "draw_seen_f64": ("hushgrad.noise._kernel.NumpyKernel.draw_seen", True),
    "drawn_buffers_f32": ("hushgrad.noise._kernel.NumpyKernel.draw_buffers", True),
    "drawn_buffers_f64": ("hushgrad.noise._kernel.NumpyKernel.draw_buffers", True),
    "drawn_solutions_f32": ("hushgrad.noise._kernel.NumpyKernel.draw_solutions", True),
    "drawn_solutions_f64": ("hushgrad.noise._kernel.NumpyKernel.draw_solutions", True),
    "drawn_combinations_f32": ("hushgrad.noise._kernel.NumpyKernel.draw_combinations", True),
    "drawn_combinations_f64": ("hushgrad.noise._kernel.NumpyKernel.draw_combinations", True),
    "rounded": ("hushgrad.noise._kernel.NumpyKernel.draw_rounded", True),
    "chacha": ("hushgrad.noise._chacha.chacha_blocks", True),
    "witness": ("hushgrad._universal_hash.by_torch", True),
    "sum_above": ("hushgrad.accounting.pld.bounds.convex_order._split", False),
    "sum_below": ("hushgrad.accounting.pld.bounds.convex_order._collected", False),
    "direction": ("hushgrad.denoise.second_moment._direction", False),
    "add_rows": ("hushgrad.clipping.record.Sum.add_rows", True),
    "outer_sq_norms": ("hushgrad.clipping.rules.linear._sq_norms_of_rows", False),
    "total": ("hushgrad.clipping.clipper.Clipper.clip", False),
    "clip": ("hushgrad.clipping.clipper.Clipper.clip", False),
    "outer_sums": ("hushgrad.clipping.rules.linear._add_weighted_rows", False),
    "products": ("hushgrad.clipping.record.Sum.addmm", False),
    "outer_gradients": ("hushgrad.clipping.rules.linear.Linear.per_example", False),
    "offset_gradients": ("hushgrad.clipping.rules.kernels.per_example_kernel", False),
    "kernel_gradients": ("hushgrad.clipping.rules.conv.per_example_kernel", False),
    "sq_norms": ("hushgrad.clipping.mass.sq_norm", False),
    "row_norms": ("hushgrad.clipping.rules.embedding.rows_sq_norm", False),
    "gram": ("hushgrad.clipping.mass.gram", False),
    "group_norms": ("hushgrad.clipping.rules.experts.group_norms", False),
    "wide_sums": ("hushgrad.clipping.sums.Sum.add_outer", False),
    "wide_kept": ("hushgrad.clipping.sums.weighted_rows", False),
    "smooth": ("hushgrad.denoise._laplacian_solver._by_products", False),
}
