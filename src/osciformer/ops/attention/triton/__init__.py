"""The Triton backend: exact continuous-time attention, tiled as flash attention."""

from osciformer.ops.attention.triton.attend import CHANNELS, DTYPES, attend, is_available, missing

__all__ = ["CHANNELS", "DTYPES", "attend", "is_available", "missing"]
