"""What the capture asks of the place where parameters lie. There is one capture: where they lie is a value that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from hushgrad.clipping.clipper import Clipper
    from hushgrad.clipping.reduce import Part
    from hushgrad.clipping.site import Site
    from hushgrad.clipping.sums import Form, Sum

    Added = Callable[[Clipper, dict[str, Sum], float], list[Part]]  # what the passes since the last collect give, and where to

__all__ = ["ParameterPlacement"]


class ParameterPlacement:
    """Every parameter is whole, in this process. Placements over several processes answer otherwise."""

    whole = True  # one process may run the model alone, and autograd finds the parameters themselves

    def site(self, model: nn.Module, site: Site) -> Site:
        """``site`` with hooks that find its parameters when they are needed."""
        return site

    def likes(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor | Form]:
        """What the parameters' sums in this process are like. Asked once, when the parameters are known."""
        return params

    def reducing(self, added: Added, sites: list[Site]) -> Added:
        """``added`` adds to sums of whole parameters; the same for sums of what lies here. Asked once, when the sites are known."""
        return added
