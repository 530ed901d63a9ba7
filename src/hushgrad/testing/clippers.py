"""Conformance of clippers: no example contributes more than the clipper says, whatever its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, nan

import torch
from torch import Tensor, nn

from hushgrad.clipping import Clipper, clipped_sum
from hushgrad.clipping.record import clipped
from hushgrad.events import Relation

_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}


def check_clipper(
    clipper: Clipper, *, names: Sequence[str] = ("0.weight", "0.bias", "2.weight", "2.bias"), seed: int = 0
) -> None:
    """Check weights, groups, sensitivities and the JSON form of a clipper, and its effect on a small model. Raises AssertionError.

    ``names`` are parameter names that the clipper's groups, if it has any, are asked about; a clipper for the small model of this check
    must cover those of the default.

    Args:
        clipper: the one to check.
        names: parameters that its groups are asked about.
        seed: of the small model and its gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    grouping = clipper.groups(names)
    _check_sensitivity(clipper)
    _check_groups(grouping, len(names))
    columns = None if grouping is None else max(grouping) + 1
    for dtype, rounding in _ROUNDING.items():
        _check_weights(clipper, _norms(generator, dtype, columns), rounding)
        _check_rejection(clipper, _norms(generator, dtype, columns))
        if grouping is None:
            _check_clip(clipper, _norms(generator, dtype, columns), rounding)
    assert type(clipper).from_json(clipper.to_json()) == clipper, "the JSON form must give the same clipper back"
    _check_sum(clipper, generator)


def _norms(generator: torch.Generator, dtype: torch.dtype, columns: int | None) -> Tensor:
    """Norms of all sizes, zero among them."""
    size = (400,) if columns is None else (400, columns)
    norms = 10 ** (torch.rand(size, generator=generator, dtype=torch.float64) * 24 - 12)
    norms[torch.rand(size, generator=generator) < 0.1] = 0
    return norms.to(dtype)


def _check_sensitivity(clipper: Clipper) -> None:
    one, two = clipper.sensitivity(Relation.ADD_REMOVE), clipper.sensitivity(Relation.REPLACE_ONE)
    assert one > 0 and isfinite(one), f"the sensitivity must be positive and finite, not {one}"
    assert two >= 2 * one, f"replace-one moves two contributions: its sensitivity must be at least {2 * one}, not {two}"
    assert clipper.sensitivity(Relation.ZERO_OUT) >= one, "zero-out removes a whole contribution"


def _check_groups(grouping: list[int] | None, names: int) -> None:
    if grouping is not None:
        assert len(grouping) == names, f"there are {names} parameters but groups for {len(grouping)}"
        assert sorted(set(grouping)) == list(range(max(grouping) + 1)), "groups must be numbered 0, 1, ... without a gap"


def _check_weights(clipper: Clipper, norms: Tensor, rounding: float) -> None:
    before = norms.clone()
    squares = norms.square()
    weights = clipper.weights(squares)
    assert torch.equal(squares, before.square()), "the squared norms were changed in place"
    assert weights.shape == norms.shape and weights.dtype == norms.dtype, (
        "there must be one weight for each norm, in its precision"
    )
    assert bool((weights >= 0).all()) and bool(weights.isfinite().all()), "weights must be finite and not negative"
    clipped = (weights * norms).double()
    contribution = clipped.abs() if clipped.dim() == 1 else torch.linalg.vector_norm(clipped, dim=1)
    bound = clipper.sensitivity(Relation.ADD_REMOVE)
    worst = float(contribution.max())
    assert worst <= bound * (1 + rounding), f"an example contributes {worst:.6g}, more than the sensitivity {bound:.6g}"
    assert torch.equal(clipper.weights(squares), weights), "the weights must be a function of the norms"
    order = torch.randperm(len(norms))
    assert torch.equal(clipper.weights(squares[order]), weights[order]), "a weight must depend on its own example alone"


def _check_rejection(clipper: Clipper, norms: Tensor) -> None:
    squares = norms[:4].square()
    squares[1], squares[2] = nan, inf
    assert not bool(clipper.weights(squares)[1:3].any()), "an example with a NaN or infinite norm must get weight 0"
    assert clipper.weights(squares[:0]).shape[0] == 0, "no norms, no weights"


def _check_clip(clipper: Clipper, norms: Tensor, rounding: float) -> None:
    """What is asked in every step, norms and weights from the norms' parts, must be what ``weights`` says."""
    norms = norms.double()
    squares = norms.square()
    made = clipped(clipper, [squares / 16, squares * (3 / 16)], 4.0)
    assert made.finite, "all norms are finite"
    assert torch.allclose(made.norms, norms, rtol=rounding, atol=0), "the norms must be the roots of the squares"
    assert torch.allclose(made.weights, clipper.weights(squares), rtol=rounding, atol=0), "clip must give the weights of weights"
    squares[7] = nan
    assert not clipped(clipper, [squares], 1.0).finite, "a norm that is no number must be noticed"


def _check_sum(clipper: Clipper, generator: torch.Generator) -> None:
    """Leave each example out of a batch with very different gradients: the sum moves by the sensitivity at most."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(1 << 30, (), generator=generator)))
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(-3, 3).unsqueeze(1)
    loss = lambda out: out.square().sum()  # noqa: E731
    whole = clipped_sum(model, loss, (x,), clipper, loss_reduction="sum").raw_sums
    bound = clipper.sensitivity(Relation.ADD_REMOVE)
    for i in range(len(x)):
        rest = clipped_sum(model, loss, (torch.cat([x[:i], x[i + 1 :]]),), clipper, loss_reduction="sum").raw_sums
        moved = float(sum((whole[name] - rest[name]).square().sum() for name in whole)) ** 0.5
        assert moved <= bound * (1 + 1e-9), (
            f"leaving an example out moves the sum by {moved:.6g}, more than the sensitivity {bound:.6g}"
        )
