"""The Triton backend: exact attention over `hold` queries at the cost of flash attention."""

from osciformer.ops.attention.fused.attend import attend, is_available, missing

__all__ = ["attend", "is_available", "missing"]
