"""Exact continuous-time attention for irregularly sampled series.

Keys and values are damped harmonic oscillators, so attention over real time has a closed form, and
the closed form factorises: it costs what dot-product attention costs.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from osciformer.models import OsciFormer, OsciFormerConfig
    from osciformer.nn import (
        Encoder,
        OscillatorAttention,
        SeriesEmbedding,
        TimeScale,
        parameter_groups,
    )
    from osciformer.ops import Drive, choose_backend, oscillator_attention
    from osciformer.streaming import OnlineSession
else:
    # Names are imported when they are first asked for: torch takes a second, which the help and
    # the error messages of the command line should not wait for.
    _HOMES = {
        "models": ("OsciFormer", "OsciFormerConfig"),
        "nn": (
            "Encoder",
            "OscillatorAttention",
            "SeriesEmbedding",
            "TimeScale",
            "parameter_groups",
        ),
        "ops": ("Drive", "choose_backend", "oscillator_attention"),
        "streaming": ("OnlineSession",),
        "math": (),
    }

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return importlib.import_module(f"osciformer.{name}")
        for home, names in _HOMES.items():
            if name in names:
                found = getattr(importlib.import_module(f"osciformer.{home}"), name)
                globals()[name] = found
                return found
        raise AttributeError(f"module 'osciformer' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_HOMES})
