"""The Triton backend: exact continuous-time attention in the manner of flash attention."""

from osciformer.ops.attention.fused.attend import DTYPES, attend, is_available, missing

__all__ = ["DTYPES", "attend", "is_available", "missing"]
