"""Watches who reads the tables whose rows are kept: only calls of their own module say which rows are read.

With lazy noise a row lacks the noise of all steps since it was last read, and gets it before its module's forward. A read beside that
(``self.emb.weight[ids]``, ``F.embedding(ids, self.emb.weight)``, a mean over the table) would see bare sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from hushgrad.clipping._torch import memory_of
from hushgrad.clipping.proof.call_trace import CallTrace
from hushgrad.errors import CaptureError

if TYPE_CHECKING:
    from hushgrad.clipping.site import Site

_VALUES = (Tensor, float, list, np.ndarray)  # results that hold values, unlike sizes, dtypes and devices
_COMPARED = frozenset(("equal", "allclose", "is_nonzero"))


class TableReads(CallTrace):
    """A trace that also refuses to read a table, given by its memory, outside of its own module."""

    def __init__(self, tables: Mapping[int, Site]) -> None:
        super().__init__()
        self._tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)
        for value in (*args, *kwargs.values()) if kwargs else args:
            for t in value if type(value) is tuple or type(value) is list else (value,):
                site = self._tables.get(memory_of(t)) if type(t) in (Tensor, nn.Parameter) else None
                # While its module runs, its parameters require no gradients.
                if site is not None and site.params[0].requires_grad and _is_value(func, made):
                    raise CaptureError(
                        f"The table of {site.path or 'the model'} was read beside its module, where its rows lack noise. Let the model "
                        "call the module, as in self.emb(ids), or leave lazy_tables out."
                    )
        return made


def _is_value(func: Any, made: Any) -> bool:
    several = made if type(made) is tuple else (made,)
    return any(isinstance(one, _VALUES) for one in several) or getattr(func, "__name__", "") in _COMPARED
