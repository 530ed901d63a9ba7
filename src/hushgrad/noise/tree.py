"""Tree aggregation: prefix sums from noisy sums over dyadic intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import scipy

from hushgrad import _check, _papers
from hushgrad.events import Participation
from hushgrad.noise.base import Mechanism, NoiseStream
from hushgrad.noise.error import dense_unit_error
from hushgrad.noise.lower_toeplitz import filter_state, known_steps
from hushgrad.noise.optimise_dense import lower_factor
from hushgrad.noise.participation import Pattern, pattern_of
from hushgrad.noise.sensitivity import DENSE_LIMIT, gram_sensitivity
from hushgrad.noise.suggestions import Run, Skipped, Suggestion
from hushgrad.noise.workload import AnyWorkload, PrefixSums, as_workload

_ANALYSED = 1 << 17  # steps up to which prefix variances are summed one by one

_LARGEST_FULL = 4096


@dataclass(frozen=True, kw_only=True)
class Tree(Mechanism):
    """Every dyadic interval of steps (a node) has its own z; prefix t is estimated from the nodes inside it.

    | ``variant`` | prefix t | error growth |
    |---|---|---|
    | "plain" | one node for every binary digit 1 of t + 1 | log^1.5 n |
    | "online" | the same nodes, each averaged with the nodes below it, weighted by inverse variance (Honaker) | 0.76 of plain |
    | "full" | the best linear estimate from all nodes of the whole tree, made causal by X = CᵀC; dense | 0.50 of plain |

    ``restart``: a new tree every so many steps (an epoch, say), on top of the last one's total. ``completion`` fills a tree
    that ends up to a power of two with empty steps, so that its total costs one node's noise instead of several.

    **Formal guarantee.** One Gaussian event: C is the matrix of the nodes in use, a step lies in at most one node of each
    level, so sens² <= levels for one participation (exact); for several, an upper bound from the counts in each level.

    >>> from hushgrad.events import Once
    >>> [round(Tree(variant=v).error(steps=256, participation=Once()).rmse, 2) for v in ("plain", "online", "full")]
    [6.0, 4.65, 3.1]

    References: Dwork et al. 2010; Honaker 2015; Kairouz et al. 2021 (arXiv:2103.00039), Theorem 4.1 and appendix B.
    """

    papers = (
        _papers.KAIROUZ_2021_PRACTICAL,
        _papers.Paper(
            "honaker2015efficient",
            "Honaker, James",
            "Efficient Use of Differentially Private Binary Trees",
            "Theory and Practice of DP (TPDP)",
            kind="misc",
        ),
    )

    variant: str = "online"
    restart: int | None = None
    completion: bool = False

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        full, plain = cls(variant="full", restart=5, completion=True), cls(variant="plain", restart=3, completion=True)
        restarts = (cls(restart=5), cls(restart=5, completion=True), plain, full)
        return (cls(), cls(variant="plain"), cls(variant="full"), *restarts)

    @classmethod
    def suggestions(cls, run: Run) -> Iterator[Suggestion | Skipped]:
        if run.rate is None and run.steps <= _ANALYSED:
            levels = math.ceil(math.log2(run.steps + 1))
            why = "The classical tree of partial sums; no sampling assumption."
            yield Suggestion(name="Tree", make=cls, why=why, work=2 + levels)
        elif run.rate is None:
            yield Skipped("Tree", f"BLT is better at {run.steps} steps, and a tree of that size takes long to analyse.")

    def __post_init__(self) -> None:
        _check.one_of(["plain", "online", "full"], variant=self.variant)
        if self.restart is not None:
            object.__setattr__(self, "restart", _check.positive_int(restart=self.restart))
        _check.instance(bool, completion=self.completion)
        if self.completion and self.restart is None:
            _check.fail("completion", True, "to come with restart", "Completion joins one tree to the next: give restart=.")

    def resolved(self, *, steps: int, participation: Participation) -> Tree:
        """The full variant fixes the size of its tree; the others need not know it."""
        return replace(self, restart=steps) if self.variant == "full" and self.restart is None else self

    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        """Row t is the noise of prefix t minus the noise of prefix t - 1."""
        from hushgrad.noise.streams import DenseStream, TreeStream

        steps = known_steps(steps)
        if self.variant == "full":
            noising = self.noising(steps)
            return DenseStream(source, lambda t: noising[t, : t + 1].tolist(), steps=steps)
        honaker = self.variant == "online"
        return TreeStream(source, steps=steps, honaker=honaker, restart=self.restart, completion=self.completion)

    def strategy(self, steps: int) -> np.ndarray:
        """One row for each node in use (in the order of their last step, then level), one column for each step."""
        return _matrices(self, self._fit(steps))[0]

    def noising(self, steps: int) -> np.ndarray:
        """One row for each step, one column for each node in use."""
        return _matrices(self, self._fit(steps))[1]

    def draws(self, steps: int) -> Sequence[int]:
        """The numbers of the nodes in use: each has its own z."""
        from hushgrad.noise.streams.tree import node

        if self.variant == "full":
            return range(steps)
        return [node(*key) for key in _nodes(self, steps)]

    def sensitivity(self, *, steps: int, participation: Participation) -> float:
        """sqrt(levels) for one participation, less for the first steps of a full one; for several the smaller of two upper bounds."""
        steps = self._fit(steps)
        pattern = pattern_of(participation, steps)
        bound = self._level_bound(steps, pattern)
        # The full variant's first steps hold a part of each node that they are in, not the whole of it.
        if (pattern.times > 1 or self.variant == "full") and steps <= DENSE_LIMIT:
            C = self.strategy(steps)
            bound = min(bound, gram_sensitivity(C.T @ C, pattern))
        return bound

    def unit_error(self, *, steps: int, workload: AnyWorkload = None) -> tuple[float, float]:
        """From the variances of the nodes for prefix sums; from the matrix for the full variant and other workloads."""
        steps = self._fit(steps)
        work = as_workload(workload, steps)
        if self.variant == "full" or not isinstance(work, PrefixSums):
            return dense_unit_error(self.noising(steps), work)
        variances = self._prefix_variances(steps)
        return float(np.sqrt(variances.mean())), float(np.sqrt(variances.max()))

    def row_std(self, step: int, *, steps: int) -> float:
        """The norm of row ``step`` of N, from the few nodes that enter or leave with it."""
        step, steps = _check.integer(0, step=step), self._fit(steps)
        if step >= steps:
            _check.fail("step", step, f"to be less than steps={steps}", "Ask for a row of the run.")
        if self.variant == "full":
            return float(np.linalg.norm(self.noising(steps)[step]))
        leaf = step % self._size(steps)
        levels, own = self._estimate(leaf, steps)
        kept = {level: weight - 1 for level, weight in levels.items()}  # the prefix before lost the kept nodes
        kept |= {level: -1.0 for level in range(self._top(leaf, steps)) if leaf >> level & 1 and level not in kept}
        variance = sum(w * w for w in own) + sum(w * w * self._variance(level) for level, w in kept.items())
        return float(np.sqrt(variance))

    def state_size(self, *, steps: int) -> int:
        """One estimate per level; for the full variant the rows that are computed ahead of their step."""
        steps = self._fit(steps)
        return filter_state(steps) if self.variant == "full" else self._size(steps).bit_length()

    # The shape of one tree -----------------------------------------------------------------------------------------------

    def _fit(self, steps: int) -> int:
        steps = _check.positive_int(steps=steps)
        if self.variant == "full" and self._size(steps) > _LARGEST_FULL:
            remedy = "Use variant='online', a restart, or BLT."
            _check.fail("steps", steps, f"to be at most {_LARGEST_FULL} for the full variant", remedy)
        return steps

    def _size(self, steps: int) -> int:
        # The full variant looks ahead to the whole tree, so its first steps are not those of a smaller tree.
        if self.restart is None:
            return steps
        return self.restart if self.variant == "full" else min(steps, self.restart)

    def _levels(self, steps: int) -> int:
        size = self._size(steps)
        return (size - 1).bit_length() + 1 if self.completion else size.bit_length()

    def _top(self, leaf: int, steps: int) -> int:
        return completed_level(leaf, self._size(steps), self.completion)

    def _variance(self, level: int) -> float:
        """The variance of a complete subtree's estimate."""
        return averaged_variance(level) if self.variant == "online" else 1.0

    def _estimate(self, leaf: int, steps: int) -> tuple[dict[int, float], list[float]]:
        """(weights of the kept siblings' estimates by level, weights of this leaf's own nodes) in the new node's estimate."""
        top = self._top(leaf, steps)
        if self.variant == "plain":
            return {}, [0.0] * top + [1.0]
        kept: dict[int, float] = {}
        own, variance = [1.0], 1.0
        for level in range(top):
            if leaf >> level & 1:
                kept[level] = 1.0
                variance += self._variance(level)
            share = variance / (1 + variance)
            kept = {k: w * (1 - share) for k, w in kept.items()}
            own = [w * (1 - share) for w in own] + [share]
            variance = share
        return kept, own

    def _prefix_variances(self, steps: int) -> np.ndarray:
        size = self._size(steps)
        count = np.arange(1, size + 1)
        inside = sum(self._variance(level) * (count >> level & 1) for level in range(size.bit_length()))
        inside = np.asarray(inside, dtype=float)
        if self.completion:
            kept, own = self._estimate(size - 1, steps)
            inside[-1] = sum(w * w for w in own) + sum(w * w * self._variance(level) for level, w in kept.items())
        carried = np.repeat(np.arange(-(-steps // size)) * inside[-1], size)
        return (carried + np.tile(inside, -(-steps // size)))[:steps]

    def _level_bound(self, steps: int, pattern: Pattern) -> float:
        """sens² <= sum over levels of the largest sum of squared counts: a node of 2^l steps holds at most ceil(2^l / gap)."""
        total = 0
        for level in range(self._levels(steps)):
            most = min(-(-min(2**level, self._size(steps)) // pattern.gap), pattern.times)
            full, rest = divmod(pattern.times, most)
            total += full * most**2 + rest**2
        return float(np.sqrt(total))


def completed_level(leaf: int, size: int, completion: bool) -> int:
    """The level of the node that a leaf completes, in a tree of ``size`` leaves."""
    if completion and leaf == size - 1:
        return (size - 1).bit_length()
    return ((leaf + 1) & -(leaf + 1)).bit_length() - 1


def averaged_variance(level: int) -> float:
    """Variance of the averaged estimate of a full subtree: v_0 = 1, v_l = 2 v / (1 + 2 v)."""
    variance = 1.0
    for _ in range(level):
        variance = 2 * variance / (1 + 2 * variance)
    return variance


@lru_cache(maxsize=8)
def _nodes(tree: Tree, steps: int) -> dict[tuple[int, int], int]:
    """The nodes in use as (last step, level), numbered."""
    size = tree._size(steps)
    keys = []
    for t in range(steps):
        own = tree._estimate(t % size, steps)[1]
        keys += [(t, level) for level, weight in enumerate(own) if weight]
    return {key: i for i, key in enumerate(keys)}


@lru_cache(maxsize=4)
def _matrices(tree: Tree, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(C, N), dense."""
    size = tree._size(steps)
    if tree.variant == "full":
        C = np.zeros((steps, steps))
        block = lower_factor(_full_gram(size, tree._levels(steps)))
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            C[start:stop, start:stop] = block[: stop - start, : stop - start]
        return C, np.tril(scipy.linalg.solve_triangular(C, np.eye(steps), lower=True))
    nodes = _nodes(tree, steps)
    C, N = np.zeros((len(nodes), steps)), np.zeros((steps, len(nodes)))
    for (t, level), i in nodes.items():
        first = (t % size >> level << level) + t - t % size
        C[i, first : t + 1] = 1.0
    kept: dict[int, np.ndarray] = {}
    for t in range(steps):
        leaf = t % size
        weights, own = tree._estimate(leaf, steps)
        estimate = sum((w * kept[level] for level, w in weights.items()), np.zeros(len(nodes)))
        for level, w in enumerate(own):
            if w:
                estimate[nodes[t, level]] += w
        top = tree._top(leaf, steps)
        N[t] = estimate - sum(kept[level] for level in range(top) if leaf >> level & 1)
        kept[top] = estimate
    return C, N


def _full_gram(size: int, levels: int) -> np.ndarray:
    """CᵀC of all complete nodes of one tree: how many nodes two steps share."""
    step = np.arange(size)
    X = np.zeros((size, size))
    for level in range(levels):
        node = step >> level
        complete = ((node + 1) << level) <= (size if levels == size.bit_length() else 1 << levels)
        X += (node[:, None] == node[None, :]) & complete[:, None]
    return X
