"""Convolutions with weight standardisation: each filter is centred and scaled to a learned norm.

With c = w - mean(w) for the n weights of one filter, u = c / max(|c|, sqrt(eps)) and v = gain u what is convolved with, an example's
gradient G of v gives, by the chain rule and with Ḡ = G - mean(G),

    of gain:  <u, G>
    of w:     gain / |c| (Ḡ - u <u, Ḡ>),  where |c|² > eps; else  gain / sqrt(eps) Ḡ.

The map from G to these is linear and depends on the weights alone, so it is applied to each example's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hushgrad import _check
from hushgrad.clipping.base import Example, Record, Rule, rule
from hushgrad.clipping.rules.conv import Conv
from hushgrad.clipping.rules.input_checks import require_batch

_EPS = 1e-4  # of De et al. 2022; far below the sum of squares of a filter as torch begins with


class WSConv2d(nn.Conv2d):
    """``nn.Conv2d`` with weight standardisation: each filter is centred and scaled to norm ``gain``, which is learned.

    What a step of private training moves in a filter's mean or norm is noise as much as signal; here it has no effect. Used with
    ``nn.GroupNorm``, as in the best networks that are trained privately from scratch. The arguments are those of ``nn.Conv2d``.

        >>> layer = WSConv2d(3, 8, 3, padding=1)
        >>> v = layer.standardised().flatten(1)
        >>> bool(v.mean(1).abs().max() < 1e-6), [round(x, 4) for x in v.norm(dim=1).tolist()[:2]]
        (True, [1.0, 1.0])

    Reference: De, Berrada, Hayes, Smith and Balle, "Unlocking high-accuracy differentially private image classification through scale",
    2022, arXiv:2204.13650, section 3; Qiao et al. 2019 (arXiv:1903.10520) for the standardisation; Brock et al. 2021
    (arXiv:2101.08692), equation 6, for the gain.
    """

    def __init__(self, *args: object, eps: float = _EPS, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.eps = _check.positive(eps=eps)
        if self.weight[0].numel() < 2:
            _check.fail("kernel_size", self.kernel_size, "and in_channels to give a filter two weights at least", "Use Conv2d.")
        self.gain = nn.Parameter(torch.ones(self.out_channels, device=self.weight.device, dtype=self.weight.dtype))

    def standardised(self) -> Tensor:
        """What inputs are convolved with, in the shape of ``weight``."""
        w = self.weight
        c = w - w.mean(dim=(1, 2, 3), keepdim=True)
        size = c.square().sum(dim=(1, 2, 3), keepdim=True).clamp_min(self.eps)
        return c * size.rsqrt() * self.gain.view(-1, 1, 1, 1)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution with the standardised filters."""
        return self._conv_forward(input, self.standardised(), self.bias)

    def extra_repr(self) -> str:
        """That of the convolution."""
        return f"{super().extra_repr()}, eps={self.eps:g}"


@rule(WSConv2d)
class StandardisedConv(Rule):
    """The convolution's per-example gradients, mapped through the standardisation and kept."""

    parameters = frozenset({"weight", "bias", "gain"})

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """With a gain of its own, with groups, and with a filter that is too small to be scaled up."""
        own, small = WSConv2d(2, 3, 3, padding=1), WSConv2d(4, 4, 3, stride=2, groups=2, bias=False)
        with torch.no_grad():
            own.gain.mul_(torch.tensor([0.5, 2.0, -1.0]))
            small.weight[1].mul_(1e-4)
        return (own, (torch.randn(4, 2, 5, 5),)), (small, (torch.randn(4, 4, 7, 7),))

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """As above, for every filter of every example."""
        layer = record.module
        assert isinstance(layer, WSConv2d)
        require_batch(record, 4)
        made = {}
        if "bias" in record.names:
            made["bias"] = record.g.flatten(2).sum(2)
        if not {"weight", "gain"}.isdisjoint(record.names):
            made |= self._filters(layer, Conv.kernel(record))
        return {name: made[name] for name in record.names}

    def _filters(self, layer: WSConv2d, G: Tensor) -> dict[str, Tensor]:
        """The gradients of weight and gain from that of the standardised filters, (B, filters, ...)."""
        w = layer.weight.detach().to(G.dtype).flatten(1)
        c = w - w.mean(1, keepdim=True)
        square = c.square().sum(1, keepdim=True)
        u = c * square.clamp_min(layer.eps).rsqrt()
        rows = G.flatten(2)
        along = (rows * u).sum(2, keepdim=True)  # u is centred: <u, G> = <u, Ḡ>
        turned = rows - rows.mean(2, keepdim=True) - torch.where(square > layer.eps, u, 0.0) * along
        factor = layer.gain.detach().to(G.dtype).unsqueeze(1) * square.clamp_min(layer.eps).rsqrt()
        return {"weight": (turned * factor).view_as(G), "gain": along.squeeze(2)}
