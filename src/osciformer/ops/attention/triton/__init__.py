"""The Triton backend: exact continuous-time attention, tiled as flash attention."""

from osciformer.ops.attention.triton.attend import DTYPES, attend, is_available, missing

__all__ = ["DTYPES", "attend", "is_available", "missing"]
