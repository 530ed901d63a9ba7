"""What the capture asks of the place where parameters lie. There is one capture: where they lie is a value that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from hushgrad.clipping.site import Site
    from hushgrad.clipping.sums import Sum

__all__ = ["Held"]


class Held:
    """Every parameter is whole, in this process. Placements over several processes answer otherwise."""

    whole = True  # one process may run the model alone, and autograd finds the parameters themselves

    def site(self, model: nn.Module, site: Site) -> Site:
        """``site`` with hooks that find its parameters when they are needed."""
        return site

    def likes(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of the shapes that the parameters' sums have in this process."""
        return params

    def opened(self, sums: dict[str, Sum], sites: list[Site]) -> dict[str, Sum]:
        """The sums of whole parameters, to be added to by the rules; what is added arrives in ``sums``."""
        return sums

    def closed(self, opened: dict[str, Sum]) -> None:
        """All that belongs to this reduction has been added to what :meth:`opened` gave."""
