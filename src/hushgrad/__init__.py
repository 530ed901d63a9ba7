"""hushgrad: train PyTorch models on sensitive data with a differential-privacy guarantee that can be believed."""

from __future__ import annotations

__version__ = "0.1.0"
