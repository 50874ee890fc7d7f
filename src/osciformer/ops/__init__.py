"""Operators: one signature, several backends, one result."""

from osciformer.ops._dispatch import BACKEND_VARIABLE, choose_backend
from osciformer.ops.attention.drive import Drive
from osciformer.ops.oscillator_attention import oscillator_attention
from osciformer.ops.oscillator_response import oscillator_response
from osciformer.ops.response.step import Response
from osciformer.ops.response.stream import ResponseStream

__all__ = [
    "BACKEND_VARIABLE",
    "Drive",
    "Response",
    "ResponseStream",
    "choose_backend",
    "oscillator_attention",
    "oscillator_response",
]
