"""Exact continuous-time attention for irregularly sampled series.

Keys and values are damped harmonic oscillators, so attention over real time has a closed form, and
the closed form factorises: it costs what dot-product attention costs.
"""

from importlib.metadata import PackageNotFoundError, version

from osciformer.models import OsciFormer, OsciFormerConfig
from osciformer.nn import Encoder, OscillatorAttention, SeriesEmbedding, TimeScale, parameter_groups
from osciformer.ops import Drive, choose_backend, oscillator_attention
from osciformer.streaming import OnlineSession

try:
    __version__ = version("osciformer")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Drive",
    "Encoder",
    "OnlineSession",
    "OsciFormer",
    "OsciFormerConfig",
    "OscillatorAttention",
    "SeriesEmbedding",
    "TimeScale",
    "__version__",
    "choose_backend",
    "oscillator_attention",
    "parameter_groups",
]
