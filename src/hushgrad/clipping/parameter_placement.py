"""Where parameters live, as far as the capture needs to know. There is one capture; the placement is an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from hushgrad.clipping.clipper import Clipper
    from hushgrad.clipping.reduce import Part
    from hushgrad.clipping.site import Site
    from hushgrad.clipping.sums import Form, Sum

    Added = Callable[[Clipper, dict[str, Sum], float], list[Part]]  # adds the passes since the last collect to sums


class ParameterPlacement:
    """All parameters are whole and in this process. Placements over several processes override these methods."""

    whole = True  # one process can run the model alone, and autograd sees the parameters themselves

    def site(self, model: nn.Module, site: Site) -> Site:
        """``site`` with hooks that find its parameters when they are needed."""
        return site

    def likes(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor | Form]:
        """Templates for the parameters' sums in this process. Called once, when the parameters are known."""
        return params

    def reducing(self, added: Added, sites: list[Site]) -> Added:
        """Turn ``added``, which adds to whole parameters' sums, into one for the parts held here. Called once, when the sites are known."""
        return added
