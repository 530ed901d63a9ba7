"""Adaptive clipping: the clip norm follows a quantile of the gradients' norms, learned privately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import TYPE_CHECKING

from hushgrad import _check, _papers
from hushgrad.clipping.clipper import Clipper
from hushgrad.events import Event, Gaussian, Relation

if TYPE_CHECKING:
    from torch import Tensor

_FARTHEST = 50.0  # |log C| at most: past any real gradient, and far from what floats cannot hold


@dataclass(frozen=True)
class Adaptive(Clipper):
    r"""Flat clipping whose norm C_t moves towards the ``quantile`` of the examples' norms.

    Beside the gradient, each step releases how many examples lie below C_t, every example counted as +1/2 or -1/2:

        b_t = (sum_i (1[‖G_i‖ <= C_t] - 1/2) + N(0, ``count_noise``²)) / ``batch_size`` + 1/2
        C_{t+1} = C_t exp(-``learning_rate`` (b_t - ``quantile``)).

    A frozen value is one step's clipper; :meth:`moved` is the next step's. What a run must do beyond that:

    | step t, with ``clip`` = the clipper of the step | |
    |---|---|
    | clip and add | ``capture.collect(clip)`` |
    | noise on the sum | ``clip.gradient_noise(noise_multiplier) * clip.max_grad_norm`` times the row of the stream |
    | the count | ``count = clip.raw_count(clipped.raw_norms) + clip.count_noise * z``, z a fresh standard normal |
    | the next clipper | ``clip = clip.moved(count)``, to be stored with the run's state (``to_json``) |

    **Formal guarantee.** One step with both releases is one Gaussian mechanism: an example moves the pair (sum / C_t, 2 count) by at
    most 1 in each part, so with noise multipliers z_g on the gradient and 2 ``count_noise`` on the count it is as private as
    ``Gaussian(z)`` with z⁻² = z_g⁻² + (2 count_noise)⁻², under the same sampling. C_{t+1} is a function of released numbers. This holds
    for independent noise (DP-SGD), every relation and every sampling of examples into steps. With correlated noise the two releases
    are composed instead: the gradient with its own event, and :meth:`count_event` of each step with its sampling.

        >>> import torch
        >>> clip = Adaptive(0.1, batch_size=100)
        >>> norms = torch.tensor([0.05, 0.2, 0.3, 0.4]).repeat(25)
        >>> clip.raw_count(norms)  # 25 below, 75 above
        -25.0
        >>> clip.moved(-25.0).max_grad_norm  # a quarter is below, the median is wanted: C grows by exp(0.2 / 4)
        0.10512710963760241

    Reference: Andrew et al., "Differentially private learning with adaptive clipping" (NeurIPS 2021), algorithm 1 and theorem 1.
    """

    papers = (
        _papers.Paper(
            "andrew2021adaptive",
            "Andrew, Galen and Thakkar, Om and McMahan, H. Brendan and Ramaswamy, Swaroop",
            "Differentially Private Learning with Adaptive Clipping",
            "NeurIPS",
            arxiv="1905.03871",
        ),
    )

    max_grad_norm: float
    batch_size: int
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    @classmethod
    def examples(cls) -> tuple[Clipper, ...]:
        """At the start, and moved."""
        return (
            cls(0.1, batch_size=10),
            cls(7.0, batch_size=10, quantile=0.9).moved(-3.0),
        )

    def __post_init__(self) -> None:
        self._keep(
            max_grad_norm=_check.positive(max_grad_norm=self.max_grad_norm),
            batch_size=_check.positive_int(batch_size=self.batch_size, remedy="It is the public divisor of the plan."),
            quantile=_check.between(0, 1, quantile=self.quantile),
            learning_rate=_check.positive(learning_rate=self.learning_rate),
        )
        noise = self.batch_size / 20 if self.count_noise is None else self.count_noise  # the paper's choice
        self._keep(count_noise=_check.positive(count_noise=noise))

    # One step's clipper -------------------------------------------------------------------------------------------------

    def weights(self, sq_norms: Tensor) -> Tensor:
        """min(1, C / norm); 0 if the norm is not finite."""
        return sq_norms.rsqrt().mul_(self.max_grad_norm).clamp_(max=1.0).nan_to_num_(nan=0.0)

    def sensitivity(self, relation: Relation) -> float:
        """This step's C times the number of contributions that neighbours differ by."""
        return self.max_grad_norm * relation.contributions

    # The count ------------------------------------------------------------------------------------------------------------

    def raw_count(self, raw_norms: Tensor) -> float:
        """sum_i (1[norm_i <= C] - 1/2): sensitive, each example moves it by 1/2. NaN and infinite norms count as above C."""
        below = int((raw_norms <= self.max_grad_norm).sum())
        return below - raw_norms.numel() / 2

    def moved(self, noisy_count: float) -> Adaptive:
        """The next step's clipper, from the count with its noise added: post-processing."""
        fraction = _check.number(noisy_count=noisy_count) / self.batch_size + 0.5
        target = log(self.max_grad_norm) - self.learning_rate * (fraction - self.quantile)
        return replace(self, max_grad_norm=exp(min(max(target, -_FARTHEST), _FARTHEST)))

    def counted_there(self, raw_norms: Tensor, noise: Callable[[Tensor], None], norm: Tensor | None) -> AdaptiveOnDevice:
        """The next step's clipper on a device: count, noise and clip norm stay there, in double precision, without waiting for it.

        Args:
            raw_norms: of the step's examples, on the device; negative for padding in a batch of fixed shape.
            noise: adds the count's noise to it, in place.
            norm: this step's clip norm on the device; None: it is still the value's own.
        """
        from hushgrad._precision import widest

        wide = widest(raw_norms)
        here = wide.new_full((1,), self.max_grad_norm) if norm is None else norm
        count = (wide <= here).to(wide.dtype).sub_(0.5).masked_fill_(wide < 0, 0.0).sum(0, keepdim=True)
        noise(count)
        target = here.log().sub_(count.div_(self.batch_size).add_(0.5 - self.quantile), alpha=self.learning_rate)
        return AdaptiveOnDevice(self, target.clamp_(-_FARTHEST, _FARTHEST).exp_())

    # The price ------------------------------------------------------------------------------------------------------------

    def gradient_noise(self, noise_multiplier: float) -> float:
        """z_g, the multiplier of the gradient's noise, such that gradient and count together are ``Gaussian(noise_multiplier)``."""
        _check.positive(noise_multiplier=noise_multiplier)
        rest = noise_multiplier**-2 - self._count_multiplier**-2
        if rest <= 0:
            remedy = f"The count alone spends more than that; use count_noise > {noise_multiplier / 2:.4g}."
            _check.fail(
                "noise_multiplier", noise_multiplier, f"to be less than 2 count_noise = {self._count_multiplier:.4g}", remedy
            )
        return rest**-0.5

    def combined_noise(self, gradient_noise: float) -> float:
        """The multiplier z of both releases together, from the gradient's own multiplier: the inverse of :meth:`gradient_noise`."""
        z = _check.positive(gradient_noise=gradient_noise)
        return 1 / sqrt(z**-2 + self._count_multiplier**-2)

    def count_event(self) -> Event:
        """One step's count by itself, before sampling."""
        return Gaussian(self._count_multiplier)

    @property
    def _count_multiplier(self) -> float:
        assert self.count_noise is not None
        return 2 * self.count_noise  # an example moves the centred count by 1/2


class AdaptiveOnDevice(Clipper):
    """An :class:`Adaptive` clipper whose norm is a scalar tensor on a device, where the last step has moved it."""

    def __init__(self, options: Adaptive, norm: Tensor) -> None:
        self.options, self.norm = options, norm

    def weights(self, sq_norms: Tensor) -> Tensor:
        """As for the clipper that it stands for."""
        return sq_norms.rsqrt().mul_(self.norm).clamp_(max=1.0).nan_to_num_(nan=0.0)

    def sensitivity(self, relation: Relation) -> float:
        """C times the number of contributions that neighbours differ by, as a scalar on the device."""
        return self.norm * relation.contributions  # type: ignore[return-value]

    @property
    def fetched(self) -> Adaptive:
        """The clipper as a value; waits for the device."""
        return replace(self.options, max_grad_norm=float(self.norm))
