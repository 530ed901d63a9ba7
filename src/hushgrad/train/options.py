"""The options that go to torch's DataLoader."""

from __future__ import annotations

import inspect

from torch.utils.data import DataLoader

DATALOADER: tuple[str, ...] = tuple(name for name in inspect.signature(DataLoader.__init__).parameters if name != "self")
"""Their names."""
