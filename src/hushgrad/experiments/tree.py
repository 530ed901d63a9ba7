"""Tree aggregation: the lecture's tree of 16 steps, node by node, and its error beside the best correlated noise.

"As drawn" is checked on the library's own noising matrix: which nodes' noises are in each iterate, exactly, with no tolerance.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hushgrad.events import Once
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.noise import BLT, Dense, Independent, Mechanism, Nu, Toeplitz, Tree

claim = Stated("tree")

STEPS = 16
DENSE_LIMIT = 512  # an optimisation of this size takes seconds

LOOKS = {
    "independent (DP-SGD)": MARKS["independent"],
    "tree, as drawn": MARKS["anti"],
    "tree, Honaker online": MARKS["other"],
    "tree, all nodes": MARKS["more"],
    "square root": MARKS["nu"],
    "BLT, 4 buffers": {"color": "0.4", "marker": "x", "linestyle": "--"},
    "dense optimum": MARKS["best"],
    "lower bound": MARKS["bound"],
}


def nodes_of_iterate(t: int) -> dict[tuple[int, int], float]:
    """Which nodes' noises, with which weights, are in theta_t = theta_1 - eta (g_1 + ... + g_{t-1}); a node is (first, last) step.

    >>> nodes_of_iterate(11)
    {(1, 8): 1.0, (9, 10): 1.0}
    """
    return _weights(np.cumsum(Tree(variant="plain").noising(STEPS), axis=0)[t - 2])


def _nodes_of_step(t: int) -> dict[tuple[int, int], float]:
    """The noise that the update with g_t adds: theta_{t+1} - theta_t."""
    return _weights(Tree(variant="plain").noising(STEPS)[t - 1])


def _weights(row: np.ndarray) -> dict[tuple[int, int], float]:
    spans = [np.flatnonzero(node) + 1 for node in Tree(variant="plain").strategy(STEPS)]
    found = {(int(span[0]), int(span[-1])): float(w) for span, w in zip(spans, row, strict=True) if w}
    return dict(sorted(found.items()))


def run(context: Context) -> Findings:
    """theta_11 to theta_13 of the drawn tree; rmse of prefix sums over n for eight mechanisms."""
    sizes = (16, 64, 256) if context.quick else (16, 64, 256, 1024, 4096, 16384)
    limit = 64 if context.quick else DENSE_LIMIT
    errors: dict[str, list[float | None]] = {name: [] for name in LOOKS}
    for n in context.track(sizes, "errors"):
        for name, value in _errors(n, limit).items():
            errors[name].append(value)
    table = Table(
        title="Root mean square error of prefix sums at noise std = sensitivity (rho = 1/2), one participation",
        columns=("n", *LOOKS),
        rows=tuple((n, *("" if errors[name][i] is None else errors[name][i] for name in LOOKS)) for i, n in enumerate(sizes)),
    )
    return Findings(
        claims=(*_drawn_claims(), *_error_claims(sizes, errors)),
        tables=(_nodes_table(), table),
        draw=lambda figure: _draw(figure, sizes, errors),
        caption="(a) the tree of 16 steps; filled nodes are those whose noise is in theta_13. (b) rmse of prefix sums, "
        "in units of the "
        "clip norm at rho = 1/2, over the number of steps n: the tree against later mechanisms and the certified lower bound.",
        data={"steps": sizes, "rmse": errors},
    )


def _errors(n: int, limit: int) -> dict[str, float | None]:
    mechanisms: dict[str, Mechanism] = {
        "independent (DP-SGD)": Independent(),
        "tree, as drawn": Tree(variant="plain"),
        "tree, Honaker online": Tree(variant="online"),
        "square root": Toeplitz(),
        "BLT, 4 buffers": BLT(buffers=4),
    }
    if n <= limit:
        mechanisms |= {"tree, all nodes": Tree(variant="full"), "dense optimum": Dense.optimal(steps=n)}
    found: dict[str, float | None] = {name: m.error(steps=n, participation=Once()).rmse for name, m in mechanisms.items()}
    bound = Toeplitz().error(steps=n, participation=Once()).lower_bound
    return {name: found.get(name) for name in LOOKS} | {"lower bound": bound}


def _drawn_claims() -> tuple[Claim, ...]:
    def same(found: dict[tuple[int, int], float], drawn: dict[tuple[int, int], float]) -> float:
        return float(found == drawn)

    most = max(len(nodes_of_iterate(t)) for t in range(2, STEPS + 2))
    return (
        claim("theta_11", same(nodes_of_iterate(11), {(1, 8): 1.0, (9, 10): 1.0})),
        claim("theta_12", same(nodes_of_iterate(12), {(1, 8): 1.0, (9, 10): 1.0, (11, 11): 1.0})),
        claim("theta_13", same(nodes_of_iterate(13), {(1, 8): 1.0, (9, 12): 1.0})),
        claim("step 11", same(_nodes_of_step(11), {(11, 11): 1.0})),
        claim("step 12", same(_nodes_of_step(12), {(9, 10): -1.0, (9, 12): 1.0, (11, 11): -1.0})),
        claim("from theta_11", _copies_of_first_gradient()),
        claim("nodes of a prefix", float(most), expected=math.log2(STEPS)),
        claim("privatised directly", float(np.linalg.norm(np.tril(np.ones((STEPS, STEPS)))[:, 0])), expected=math.sqrt(STEPS)),
    )


def _copies_of_first_gradient() -> float:
    """The coefficient of g_1 in theta_1 - theta_13: N C = I sums to one copy, whatever the tree."""
    tree = Tree(variant="plain")
    return float(np.cumsum(tree.noising(STEPS) @ tree.strategy(STEPS), axis=0)[11, 0])


def _nodes_table() -> Table:
    rows = []
    for t in (11, 12, 13):
        noises = " + ".join(f"z_{a}:{b}" if a != b else f"z_{a}" for a, b in nodes_of_iterate(t))
        sums = " + ".join(f"g_{a}..{b}" if a != b else f"g_{a}" for a, b in nodes_of_iterate(t))
        rows.append((f"theta_{t}", sums, noises))
    return Table(title="Iterates of the drawn tree", columns=("iterate", "node sums", "noises"), rows=tuple(rows))


def _error_claims(sizes: tuple[int, ...], errors: dict[str, list[float | None]]) -> tuple[Claim, ...]:
    at = {name: values[sizes.index(256)] or math.nan for name, values in errors.items()}
    ratio = [(errors["square root"][i] or 0) / (errors["lower bound"][i] or 1) for i in range(len(sizes))]
    small = max(n for n, e in zip(sizes, errors["dense optimum"], strict=True) if e is not None)
    best = errors["dense optimum"][sizes.index(small)] or math.nan
    bound = errors["lower bound"][sizes.index(small)] or math.nan
    return (
        claim("growth", at["independent (DP-SGD)"] / at["tree, as drawn"]),
        claim("plain", at["tree, as drawn"]),
        claim("square root", at["square root"]),
        claim("BLT", at["BLT, 4 buffers"]),
        claim("near the bound", max(ratio[sizes.index(256) :])),
        claim("optimum", best / bound, small=small),
        claim("nu-FTRL", Nu().error(steps=small, participation=Once()).rmse / best, small=small),
    )


def _draw(figure: Any, sizes: tuple[int, ...], errors: dict[str, list[float | None]]) -> None:
    grid = figure.add_gridspec(1, 2, width_ratios=(1.1, 1))
    _draw_tree(figure.add_subplot(grid[0]))
    axes = panel(figure, grid[1], title="(b) error of prefix sums", x="steps n", y="rmse (units of the clip norm, rho = 1/2)")
    for name, look in LOOKS.items():
        points = [(n, e) for n, e in zip(sizes, errors[name], strict=True) if e is not None]
        axes.plot(*zip(*points, strict=True), label=name, markersize=4, linewidth=1.2, **look)
    axes.legend(frameon=False, fontsize=7)


def _draw_tree(axes: Any) -> None:
    used = set(nodes_of_iterate(13))
    for level in range(STEPS.bit_length()):
        width = 2**level
        for first in range(1, STEPS + 1, width):
            span, x = (first, first + width - 1), first + (width - 1) / 2
            if width > 1:
                for child in (x - width / 4, x + width / 4):
                    axes.plot([x, child], [level, level - 1], color="0.75", linewidth=0.8, zorder=1)
            colour = MARKS["best"]["color"] if span in used else "white"
            axes.scatter([x], [level], s=130, color=colour, edgecolor="0.3", linewidth=0.8, zorder=2)
            label = f"{span[0]}:{span[1]}" if width > 1 else str(first)
            axes.annotate(label, (x, level), xytext=(0, -13), textcoords="offset points", ha="center", fontsize=6.5)
    axes.set_title("(a) T = 16: nodes in theta_13", fontsize=10)
    axes.set_ylim(-0.6, 4.4)
    axes.axis("off")
