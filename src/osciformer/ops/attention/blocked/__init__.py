"""The fast exact backend: closed forms once per gap, then matrix products. See ../README.md."""

from osciformer.ops.attention.blocked.attend import attend

__all__ = ["attend"]
