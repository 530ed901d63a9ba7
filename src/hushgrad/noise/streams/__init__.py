"""Noise streams: the rows of C⁻¹ Z at unit scale, drawn in order, with exact resume under any sharding."""

from hushgrad.noise.streams.banded import BandedStream, BufferStream
from hushgrad.noise.streams.base import IndependentStream
from hushgrad.noise.streams.linear import DenseStream, FilterStream
from hushgrad.noise.streams.tree import TreeStream

__all__ = ["BandedStream", "BufferStream", "DenseStream", "FilterStream", "IndependentStream", "TreeStream"]
