"""Every C kernel beside the reference that its header names: the same bits, or the same to rounding, at every vector width."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hushgrad import _universal_hash, native
from hushgrad._universal_hash import Seen, UniversalHash
from hushgrad.accounting.pld.bounds import convex_order
from hushgrad.clipping import Automatic, Flat, _fused, _fused_products, mass, record, sums
from hushgrad.clipping.rules import conv, embedding, experts, linear
from hushgrad.denoise import _c_kernels as denoise_fused
from hushgrad.denoise import _laplacian_solver, second_moment
from hushgrad.noise import _chacha, _kernel, table_rows
from hushgrad.noise._aes_ctr import KeyStream
from hushgrad.noise._box_muller import GROUP
from hushgrad.noise.source import Source

pytestmark = [
    pytest.mark.skipif(native.EXACT is None or native.CONTRACTED is None, reason="the C libraries are not built here"),
    pytest.mark.usefixtures("vector_bytes"),
]
NUMPY = _kernel.NumpyKernel()


class Recorded:
    """A library that remembers which of its functions were called."""

    def __init__(self, library: native.Library, called: set[str]) -> None:
        self._library, self._called = library, called

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            self._called.add(name)
            return function(*arguments)

        return call


class Bench:
    """Both ways to do things: with the C libraries, and without."""

    def __init__(self, patch: pytest.MonkeyPatch, rng: np.random.Generator, real: Any) -> None:
        self.called: set[str] = set()
        self.patch, self.rng, self.real = patch, rng, real
        assert native.EXACT is not None and native.CONTRACTED is not None
        self.exact, self.contracted = Recorded(native.EXACT, self.called), Recorded(native.CONTRACTED, self.called)
        self.kernel = _kernel.CKernel(self.exact)  # type: ignore[arg-type]
        self.stream = KeyStream(rng.bytes(32), b"a test")
        self.at = tuple(int(rng.integers(0, 1 << bits)) for bits in (48, 32, 20))

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(self.real)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=shape).astype(np.float32))

    def size(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def noise(self, work: Callable[..., Any], *arrays: np.ndarray) -> Any:
        """What ``work(kernel, *copies)`` makes of copies of the arrays, by the C kernel and by numpy."""
        made = []
        for kernel in (self.kernel, NUMPY):
            copies = [array.copy() for array in arrays]
            made.append([*copies, *(work(kernel, *copies) or [])])
        return made

    def without(self, module: Any, name: str, work: Callable[[], Any]) -> Any:
        """``work()`` with the C library, and with None in its place."""
        with self.patch.context() as patch:
            patch.setattr(module, name, self.contracted if name == "_LIBRARY" and module is _fused else self.exact)
            ours = work()
        with self.patch.context() as patch:
            patch.setattr(module, name, None)
            return ours, work()


def gaussians(b: Bench) -> Any:
    words = b.rng.integers(0, 1 << 32, b.size(1, 9) * GROUP * 3 // 2, dtype=np.uint32)
    return b.noise(lambda kernel, out: kernel.gaussians(words, out), np.empty(words.size * 2 // 3, b.real))


def emit(b: Bench, fresh: bool) -> Any:
    n = b.size(0, 3000)
    return b.noise(lambda kernel, x, out: kernel.emit(x, 0.3, out, fresh), b.normal(n), b.normal(n))


def buffered(b: Bench, state: np.ndarray) -> _kernel.BufferedRow:
    decay, weight = (abs(b.normal(len(state))) for _ in range(2))
    return _kernel.BufferedRow(state, decay, weight, 0.7)


def buffers(b: Bench) -> Any:
    n, fresh = b.size(1, 3000), bool(b.size(0, 2))
    row = buffered(b, b.normal(b.size(1, 7), n))
    work = lambda kernel, z, state, out: kernel.buffers(z, row._replace(state=state), out, fresh)  # noqa: E731
    return b.noise(work, b.normal(n), row.state, b.normal(n))


def combine(b: Bench) -> Any:
    n, rows, parts = b.size(1, 3000), b.size(1, 18), b.size(0, 19)
    weights, history = b.normal(rows, parts), list(b.normal(parts, n))
    return b.noise(lambda kernel, out: kernel.combine(weights, history, out), b.normal(rows, n))


def solve(b: Bench) -> Any:
    n, rows = b.size(1, 3000), b.size(1, 18)
    inner, diagonal = np.tril(b.normal(rows, rows), -1), abs(b.normal(rows)) + b.real(0.5)
    return b.noise(lambda kernel, x: kernel.solve(inner, diagonal, x), b.normal(rows, n))


def draw(b: Bench) -> Any:
    fresh = bool(b.size(0, 2))
    return b.noise(lambda kernel, out: kernel.draw(b.stream, *b.at, 0.3, out, fresh), b.normal(b.size(1, 5000)))


def draw_many(b: Bench) -> Any:
    shapes = [b.size(1, 2000) for _ in range(b.size(1, 6))]

    def work(kernel: _kernel.Kernel, *outs: np.ndarray) -> None:
        starts = [int(k) for k in np.random.default_rng(len(outs)).integers(0, 1000, len(outs))]
        pieces = [_kernel.Piece(k, starts[k], torch.from_numpy(out), 0, out.size) for k, out in enumerate(outs)]
        kernel.draw_all(b.stream, b.at[0], pieces, 0.3, False)

    return b.noise(work, *(b.normal(n) for n in shapes))


def draw_rows(b: Bench) -> Any:
    rows, width, places = b.size(1, 200), b.size(1, 700), b.size(60, 90)
    numbers = np.concatenate([b.rng.permutation(10**6)[: rows // 3], np.arange(5, 5 + rows // 2)])[:50]
    to, by, source = b.rng.permutation(places)[: len(numbers)], b.normal(len(numbers)), Source(seed=3)
    made = []
    for kernel in (b.kernel, NUMPY):
        with b.patch.context() as patch:
            patch.setattr(_kernel, "KERNEL", kernel)
            table = torch.from_numpy(np.random.default_rng(7).normal(size=(places, width)).astype(b.real))
            given = (torch.from_numpy(array) for array in (numbers, by))
            table_rows.add_rows(source, 3, 1, *given, table, torch.from_numpy(to))
            made.append([table])
    return made


def draw_seen(b: Bench) -> Any:
    shapes = [
        b.size(1, 2000),
        2048,
        b.size(60_000, 150_000),
        3,
    ]  # of blocks of hashes: less than one, one, more than are drawn together
    hashed = UniversalHash(b.rng.bytes(32))

    def work(kernel: _kernel.Kernel, *outs: np.ndarray) -> list[np.ndarray]:
        tensors = [torch.from_numpy(out) for out in outs]
        seen = Seen(hashed, tensors)
        block = 8192 // b.real().itemsize
        cuts = [(k, low) for k, out in enumerate(outs) for low in range(0, out.size, 20 * block)]  # as for several threads
        pieces = [_kernel.Piece(k, 7 * k + low, tensors[k], low, min(20 * block, outs[k].size - low)) for k, low in cuts]
        kernel.draw_seen(b.stream, b.at[0], pieces, 0.3, seen)
        room = seen.all_of(tensors)
        assert room is not None
        counts, hashes = room.counts, bytes(room.hashes)
        assert hashes == b"".join(bytes(seen.of(tensor) or b"") for tensor in tensors)
        assert hashes == b"".join(h.tobytes() for h in hashed.of(tensors))
        return [np.frombuffer(counts + hashes, np.uint64)]

    return b.noise(work, *(b.normal(n) for n in shapes))


def drawn_buffers(b: Bench) -> Any:
    n, fresh = b.size(1, 5000), bool(b.size(0, 2))
    row = buffered(b, b.normal(b.size(1, 7), n))
    work = lambda kernel, state, out: kernel.draw_buffers(b.stream, b.at, row._replace(state=state), out, fresh)  # noqa: E731
    return b.noise(work, row.state, b.normal(n))


def drawn_solutions(b: Bench) -> Any:
    n, rows, parts, fresh = b.size(1, 3000), b.size(1, 18), b.size(0, 9), bool(b.size(0, 2))
    weights, history, inner = b.normal(rows, parts), list(b.normal(parts, n)), np.tril(b.normal(rows, rows), -1)
    diagonal = abs(b.normal(rows)) + b.real(0.5)

    def work(kernel: _kernel.Kernel, kept: np.ndarray, out: np.ndarray) -> None:
        solved = _kernel.SolvedRows(weights, history, inner, diagonal, list(kept), 0.3)
        kernel.draw_solutions(b.stream, b.at, solved, out, fresh)

    return b.noise(work, b.normal(rows, n), b.normal(n))


def drawn_combinations(b: Bench) -> Any:
    weights = b.normal(b.size(1, 20), b.size(1, 20))
    work = lambda kernel, out: kernel.draw_combinations(b.stream, b.at, weights, out)  # noqa: E731
    return b.noise(work, b.normal(len(weights), b.size(1, 3000)))


def rounded(b: Bench) -> Any:
    totals = b.rng.normal(size=b.size(1, 5000))
    doubts: list[int] = []
    made = b.noise(lambda kernel, out: doubts.extend(kernel.draw_rounded(b.stream, b.at, 3000.0, 2.0**-10, out)), totals)
    certain = np.setdiff1d(np.arange(totals.size), doubts)
    assert len(certain) > 0.9 * totals.size
    return [[some[0][certain]] for some in made]


def chacha(b: Bench) -> Any:
    stream = _chacha.ChaChaStream(b.rng.bytes(32), b"a test")
    first, count = b.size(0, 1 << 30) * b.size(0, 1 << 14), b.size(1, 200)
    return b.without(_chacha, "_LIBRARY", lambda: [stream.words(b.at[0], b.at[1], 4 * first, 64 * count)])


def hashes(b: Bench) -> Any:
    part = torch.from_numpy(b.rng.integers(-(1 << 31), 1 << 31, b.size(1, 20_000), dtype=np.int32))
    with b.patch.context() as patch:
        patch.setattr(_universal_hash, "_HASH", b.exact.witness)
        ours = list(_universal_hash.UniversalHash(bytes(32)).of([part]))
    with b.patch.context() as patch:
        patch.setattr(_universal_hash, "_HASH", None)
        return ours, [np.concatenate(list(_universal_hash.UniversalHash(bytes(32)).of([part]))).view(np.uint64)]


def convex_sums(b: Bench) -> Any:
    a, c = (
        convex_order.Law(np.sort(b.rng.gamma(0.5, size=n)), b.rng.dirichlet(np.ones(n))) for n in (b.size(2, 60), b.size(2, 60))
    )
    places = np.linspace(0.1, 1.5, b.size(3, 40))

    def work() -> list[Any]:
        law, outside = convex_order.summed_above(a, c, (0.3, 0.7), places, raised=True)
        below, _ = convex_order.summed_below(a, c, (0.3, 0.7), places)
        return [law.mass, np.array([outside.below, outside.above, outside.above_moment]), below.places, below.mass]

    return b.without(convex_order, "KERNEL", work)


def direction(b: Bench) -> Any:
    n, moments = b.size(1, 3000), denoise_fused.Moments(0.1, 0.01, 0.04, 1e-3, 1.3)
    g, mean, square = b.tensor(n), b.tensor(n), b.tensor(n).square()
    made = []
    fused = denoise_fused.Fused(b.exact, b.contracted)  # type: ignore[arg-type]
    for work in (fused.direction, second_moment._direction):
        own = [t.clone() for t in (g, mean, square, torch.empty_like(g))]
        work(*own, moments)
        made.append(own)
    return made


def smooth(b: Bench) -> Any:
    v, sigma = b.tensor(b.size(2, 5000)), float(b.rng.uniform(0.1, 300))
    fused = denoise_fused.Fused(b.exact, b.contracted)  # type: ignore[arg-type]
    with b.patch.context() as patch:
        patch.setattr(_laplacian_solver, "FUSED", fused)
        ours = _laplacian_solver.smooth_vector(v, sigma, "periodic")
    return [ours], [_laplacian_solver.smooth_vector(v.double(), sigma, "periodic").float()]


def outer(b: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    B = b.size(1, 100)
    return b.tensor(B, b.size(1, 300)), b.tensor(B, b.size(1, 33))


def outer_sq_norms(b: Bench) -> Any:
    x, g = outer(b)
    record = SimpleNamespace(x=x, g=g, names=("weight", "bias"), kept={}, masses={})
    reference = linear._sq_norms_of_rows(record)  # type: ignore[arg-type]
    with b.patch.context() as patch:
        patch.setattr(_fused, "_LIBRARY", b.contracted)
        made = linear._outer_sq_norms(x, g, 1e30)
    assert made is not None
    return made[:2], [reference["weight"], reference["bias"]]


def clipped(b: Bench, clipper: Any) -> Any:
    rows = [b.tensor(50).double().square() for _ in range(b.size(1, 8))]
    return b.without(_fused, "_LIBRARY", lambda: list(record.clipped(clipper, rows, 0.9)[:2]))


def outer_sums(b: Bench) -> Any:
    x, g = outer(b)
    weights = b.tensor(len(x)).abs()

    def work() -> list[torch.Tensor]:
        out = {
            "weight": sums.Sum(torch.empty(g.shape[1], x.shape[1]), torch.float32),
            "bias": sums.Sum(torch.empty(g.shape[1]), torch.float32),
        }
        linear._add_weighted_rows(x, g, ("weight", "bias"), {"weight": weights, "bias": weights}, out)
        return [total.tensor for total in out.values()]  # type: ignore[misc]

    return b.without(_fused, "_LIBRARY", work)


def products(b: Bench) -> Any:
    K, p, d = (b.size(0, 600), b.size(1, 60), b.size(1, 300))
    left, right, more = b.tensor(K, p).t(), b.tensor(K, d), b.tensor(p, d)
    b.patch.setattr(_fused_products, "_WIDEST", 64)  # whatever the vectors are

    def work() -> list[torch.Tensor]:
        fresh, total = sums.Sum(more, torch.float32), sums.Sum(more, torch.float32, more.clone())
        fresh.addmm(left, right), total.addmm(left, right)
        return [fresh.buffer, total.buffer]

    return b.without(_fused, "_LIBRARY", work)


def outer_gradients(b: Bench) -> Any:
    B, T = b.size(1, 9), b.size(0, 40)
    x, g = b.tensor(B, T, b.size(1, 70)), b.tensor(B, T, b.size(1, 70))
    b.patch.setattr(_fused_products, "_WIDEST", 64)

    def work() -> list[torch.Tensor]:
        parts, norms = linear._formed(x, g, 64, b.size(1, 4))
        return [torch.cat(parts), norms]

    return b.without(_fused, "_LIBRARY", work)


def kernel_gradients(b: Bench) -> Any:
    groups, kernel, stride = b.size(1, 3), (b.size(1, 6), b.size(1, 6)), (b.size(1, 3), b.size(1, 3))
    x = b.tensor(b.size(1, 5), groups * b.size(1, 4), b.size(6, 15), b.size(6, 15))
    geometry = conv.Geometry(kernel, stride, (1, 1), groups)
    out = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], kernel, stride, strict=True)]
    g = b.tensor(len(x), groups * b.size(1, 15), *out)
    with b.patch.context() as patch:
        patch.setattr(_fused, "_LIBRARY", b.contracted)
        made = _fused.kernel_gradients(x, g, [0] * 4, geometry)
    G = conv.per_example_kernel(x, g, geometry)
    assert made is not None
    return made, [G, G.double().flatten(1).square().sum(1)]


def offset_gradients(b: Bench) -> Any:
    groups, each, kernel, stride = b.size(1, 3), b.size(14, 19), (b.size(1, 4), b.size(1, 4)), b.size(1, 3)
    x = b.tensor(b.size(1, 4), groups * each, b.size(6, 24), b.size(6, 24))
    out = [(n - k) // stride + 1 for n, k in zip(x.shape[2:], kernel, strict=True)]
    g = b.tensor(len(x), groups * b.size(1, 60), *out)
    b.patch.setattr(_fused_products, "_WIDEST", 64)
    geometry = conv.Geometry(kernel, (stride, stride), (1, 1), groups)
    return b.without(_fused, "_LIBRARY", lambda: [conv.per_example_kernel(x, g, geometry)])


def add_rows(b: Bench) -> Any:
    count, width, rows = b.size(0, 300), b.size(1, 90), b.size(1, 60)
    ids, values, weights = torch.from_numpy(b.rng.integers(0, rows, count)), b.tensor(count, width), b.tensor(count)
    table, made = b.tensor(rows, width), []
    for library in (b.exact, None):
        with b.patch.context() as patch:
            patch.setattr(native, "EXACT", library)
            total = sums.Sum(table, torch.float32, table.clone())
            total.add_rows(ids, values, weights)
            made.append([total.buffer])
    return made


def row_norms(b: Bench) -> Any:
    count, examples, table = b.size(1, 400), b.size(1, 9), b.size(1, 90)
    example, ids = (torch.from_numpy(b.rng.integers(0, n, count)) for n in (examples, table))
    rows = embedding.Rows(ids, example.sort()[0], b.tensor(count, b.size(1, 300)), examples)

    def work() -> list[torch.Tensor]:
        norms, size = embedding.rows_sq_norm(rows, table)
        return [norms, norms.sqrt() if size is None else size.rows]

    return b.without(_fused, "_LIBRARY", work)


def sq_norms(b: Bench) -> Any:
    G = b.tensor(b.size(1, 30), b.size(1, 900))
    return b.without(_fused, "_LIBRARY", lambda: [mass.sq_norm(G)])


def gram(b: Bench) -> Any:
    x = b.tensor(b.size(1, 5), b.size(1, 50), b.size(1, 400))
    x = x.transpose(1, 2) if b.size(0, 2) else x
    return b.without(_fused, "_LIBRARY", lambda: [mass.gram(x)])


def group_norms(b: Bench) -> Any:
    rows, examples = b.size(1, 300), b.size(1, 9)
    owner, expert = (torch.from_numpy(b.rng.integers(0, n, rows)) for n in (examples, 4))
    left, right = b.tensor(rows, b.size(1, 70)), b.tensor(rows, b.size(1, 300))
    routed = experts.Routed(left, right, owner, expert, examples, 4)
    counts = torch.bincount(routed.group, minlength=4 * examples)
    return b.without(_fused, "_LIBRARY", lambda: list(experts.group_norms(routed, counts)))


def wide_sums(b: Bench) -> Any:
    x, g = outer(b)
    weights, onto = b.tensor(len(x)).double(), b.tensor(g.shape[1], x.shape[1])

    def work() -> list[torch.Tensor]:
        total = sums.Sum(torch.empty(g.shape[1], x.shape[1]), torch.float64)
        total.add_outer(g, weights, x)
        rounded = sums.RoundedSum(total.buffer, torch.float64, onto.clone())
        rounded.add_outer(g, weights, x)
        return [total.buffer, rounded.done]

    return b.without(_fused, "_LIBRARY", work)


def wide_kept(b: Bench) -> Any:
    G = b.tensor(b.size(1, 40), b.size(1, 3000))
    weights = b.tensor(len(G)).double()
    return b.without(_fused, "_LIBRARY", lambda: [sums.weighted_rows(G, weights)])


CASES: dict[str, Callable[[Bench], Any]] = {
    "gaussians": gaussians,
    "write": lambda b: emit(b, True),
    "add": lambda b: emit(b, False),
    "buffers": buffers,
    "combine": combine,
    "solve": solve,
    "expand_key": draw,
    "draw": draw,
    "draw_many": draw_many,
    "draw_rows": draw_rows,
    "draw_seen": draw_seen,
    "drawn_buffers": drawn_buffers,
    "drawn_solutions": drawn_solutions,
    "drawn_combinations": drawn_combinations,
    "rounded": rounded,
    "chacha": chacha,
    "witness": hashes,
    "sum_above": convex_sums,
    "sum_below": convex_sums,
    "direction": direction,
    "outer_sq_norms": outer_sq_norms,
    "total": lambda b: clipped(b, Automatic(1.5)),
    "clip": lambda b: clipped(b, Flat(1.5)),
    "outer_sums": outer_sums,
    "products": products,
    "outer_gradients": outer_gradients,
    "offset_gradients": offset_gradients,
    "kernel_gradients": kernel_gradients,
    "add_rows": add_rows,
    "row_norms": row_norms,
    "sq_norms": sq_norms,
    "gram": gram,
    "group_norms": group_norms,
    "wide_sums": wide_sums,
    "wide_kept": wide_kept,
    "smooth": smooth,
}
NEEDS_AES = ("expand_key", "draw", "drawn", "rounded")


@pytest.mark.parametrize("name", native.REFERENCES)
def test_a_kernel_does_what_its_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.EXACT is not None
    if name.startswith(NEEDS_AES) and not native.EXACT.cipher():
        pytest.skip("this processor has no AES")
    _, exact = native.REFERENCES[name]
    case, real = CASES[re.sub("_f(32|64)$", "", name)], np.float64 if name.endswith("f64") else np.float32
    for seed in range(6):
        bench = Bench(monkeypatch, np.random.default_rng([seed, len(name)]), real)
        ours, theirs = case(bench)
        assert name in bench.called
        for a, b in zip(map(np.asarray, ours), map(np.asarray, theirs), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if exact:
                assert a.tobytes() == b.tobytes()
            else:
                assert np.abs(a - b).max(initial=0.0) <= 1e-5 * np.abs(b).max(initial=1e-30)


def test_every_reference_is_there_and_every_kernel_has_a_case() -> None:
    assert {re.sub("_f(32|64)$", "", name) for name in native.REFERENCES} == set(CASES)
    for place, _ in native.REFERENCES.values():
        parts = place.split(".")
        found: Any = importlib.import_module("hushgrad")
        for k, part in enumerate(parts[1:], 2):
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:k]))
        assert callable(found), place
