"""The C kernels: sources, the interface between Python and C, the loader, and threads to run them on.

Two plain shared libraries without any Python API hold them, so one build serves every Python version: ``exact``, where every operation is
rounded separately, so that the bits are numpy's, and ``contracted``, where a product and a sum may be fused. Each kernel has a
reference in numpy or torch (:data:`REFERENCES`), which is used where a library was not built.
"""

from hushgrad.native._abi import REFERENCES
from hushgrad.native.load import CONTRACTED, EXACT, Library
from hushgrad.native.threads import in_turns

__all__ = ["CONTRACTED", "EXACT", "REFERENCES", "Library", "in_turns"]
