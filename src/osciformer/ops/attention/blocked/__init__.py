"""The fast exact backend: closed forms once per gap, matrix products for the rest. See README.md."""

from osciformer.ops.attention.blocked.attend import attend

__all__ = ["attend"]
