"""DP-SVRG: private stochastic gradients with reduced variance, as a probing denoiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hushgrad import _check, _papers
from hushgrad.denoise.base import Denoiser, NoiseInfo, Probe

_SNAPSHOT, _MEAN = "snapshot.", "mean."


@dataclass(frozen=True, kw_only=True)
class SVRG(Denoiser):
    r"""Stochastic variance-reduced gradients, with the snapshot gradient and the corrections both privatised.

    Every ``period`` steps the parameters are remembered as a snapshot s. The first ``snapshot_steps`` steps of a period ask for
    the gradient at s, and their noisy answers are averaged to m; the remaining ones ask, per example, for the difference:

        m   = mean over the snapshot steps of [sum_i clip_C(g_i(s)) + noise] / batch_size
        v_t = r [sum_i clip_C((g_i(w_t) - g_i(s)) / r) + noise] / batch_size + m            with r = ``ratio``

    Differences are small where w_t is near s (at most L ||w_t - s|| for an L-smooth loss), so they can be clipped at r C with
    r < 1, and their noise is then r times smaller too: this is where the gain comes from.

    **Formal guarantee.** Every step, snapshot or not, releases one Gaussian mechanism on a sum to which a record contributes a
    vector of norm at most C: the combination over the probes is taken per example *before* clipping, 1/r is a public constant
    inside the clip, and multiplying by r and adding m, an earlier release, is post-processing. The points w_t and s are functions
    of earlier releases. So T steps are the adaptive composition that ``plan.event()`` describes, the same as T steps of DP-SGD;
    no step is free and none costs more.

    It needs ``optimizer.step(closure)``: gradients are asked for at two points.

        >>> SVRG(period=20, ratio=0.5)
        SVRG(period=20, snapshot_steps=1, ratio=0.5)

    Reference: Johnson and Zhang 2013, algorithm 1 (SVRG); Wang, Ye and Xu 2017, algorithm 1 (DP-SVRG with full snapshots); the
    privacy here is that of Abadi et al. 2016, algorithm 1, for the combined query.
    """

    papers = (
        _papers.Paper(
            "johnson2013accelerating",
            "Johnson, Rie and Zhang, Tong",
            "Accelerating Stochastic Gradient Descent using Predictive Variance Reduction",
            "NeurIPS",
        ),
        _papers.Paper(
            "wang2017empirical",
            "Wang, Di and Ye, Minwei and Xu, Jinhui",
            "Differentially Private Empirical Risk Minimization Revisited: Faster and More General",
            "NeurIPS",
            arxiv="1802.05251",
        ),
    )

    period: int = 20
    snapshot_steps: int = 1
    ratio: float = 0.5

    @classmethod
    def examples(cls) -> tuple[Denoiser, ...]:
        return (cls(period=3), cls(period=4, snapshot_steps=2, ratio=0.3))

    never_grows = False  # it adds to a difference

    def __post_init__(self) -> None:
        period, first = _check.integer(2, period=self.period), _check.positive_int(snapshot_steps=self.snapshot_steps)
        if first >= period:
            _check.fail("snapshot_steps", first, f"to be less than period={period}")
        self._keep(period=period, snapshot_steps=first, ratio=_check.rate(ratio=self.ratio))

    def probes(self, params: dict[str, Tensor], state: dict[str, Any]) -> list[Probe]:
        """The snapshot in snapshot steps; later the parameters and, with a negative sign, the snapshot."""
        phase = state.get("step", 0) % self.period
        if phase == 0:
            for name, p in params.items():
                state[_SNAPSHOT + name] = p.detach().clone()
            return [Probe()]
        to_snapshot = {name: state[_SNAPSHOT + name] - p for name, p in params.items()}
        if phase < self.snapshot_steps:
            return [Probe(1.0, to_snapshot)]
        return [Probe(1.0 / self.ratio), Probe(-1.0 / self.ratio, to_snapshot)]

    def __call__(self, grads: dict[str, Tensor], info: NoiseInfo, state: dict[str, Any]) -> dict[str, Tensor]:
        """The mean of the snapshot's gradients so far, or the variance-reduced gradient."""
        phase = state.get("step", 0) % self.period
        state["step"] = state.get("step", 0) + 1
        if phase >= self.snapshot_steps:
            return {name: state[_MEAN + name] + self.ratio * g for name, g in grads.items()}
        for name, g in grads.items():
            mean = state[_MEAN + name] if phase else g
            state[_MEAN + name] = mean + (g - mean) / (phase + 1)
        return {name: state[_MEAN + name].clone() for name in grads}
