"""Operators: one signature, several backends, one result."""

from osciformer.ops._dispatch import BACKEND_VARIABLE, choose_backend
from osciformer.ops.attention.drive import Drive
from osciformer.ops.oscillator_attention import oscillator_attention

__all__ = ["BACKEND_VARIABLE", "Drive", "choose_backend", "oscillator_attention"]
