"""Machine learning for time series with irregular times, on exact continuous-time attention.

The names below are the front door. The packages `osciformer.data`, `events`, `estimators`,
`explain`, `inspection`, `plots`, `resonators`, `train`, `models`, `nn`, `equivariant`, `ops`,
`math`, `baselines`, `streaming`, `saving`, `config`, `testing` are public, too: what their
`__all__` or their page in the documentation names. The rest is internal.
"""

from __future__ import annotations

import importlib
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("osciformer")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Drive",
    "IrregularSeries",
    "OnlineSession",
    "OsciFormer",
    "OsciFormerClassifier",
    "OsciFormerConfig",
    "OsciFormerEventPredictor",
    "OsciFormerForecaster",
    "OsciFormerImputer",
    "OsciFormerRegressor",
    "OscillatorAttention",
    "ResonatorClassifier",
    "ResonatorFeatures",
    "ResonatorRegressor",
    "__version__",
    "choose_backend",
    "from_frame",
    "load",
    "oscillator_attention",
    "oscillator_response",
]

if TYPE_CHECKING:
    from osciformer.config import OsciFormerConfig
    from osciformer.data import IrregularSeries, from_frame
    from osciformer.estimators import (
        OsciFormerClassifier,
        OsciFormerEventPredictor,
        OsciFormerForecaster,
        OsciFormerImputer,
        OsciFormerRegressor,
        ResonatorClassifier,
        ResonatorRegressor,
        load,
    )
    from osciformer.models import OsciFormer
    from osciformer.nn import OscillatorAttention
    from osciformer.ops import Drive, choose_backend, oscillator_attention, oscillator_response
    from osciformer.resonators import ResonatorFeatures
    from osciformer.streaming import OnlineSession
else:
    # Names are imported on first use: torch takes a second, which `--help` should not wait for, and
    # the layer works without the packages that the estimators need.
    _HOMES = {
        "config": ("OsciFormerConfig",),
        "data": ("IrregularSeries", "from_frame"),
        "estimators": (
            "OsciFormerClassifier",
            "OsciFormerEventPredictor",
            "OsciFormerForecaster",
            "OsciFormerImputer",
            "OsciFormerRegressor",
            "ResonatorClassifier",
            "ResonatorRegressor",
            "load",
        ),
        "models": ("OsciFormer",),
        "nn": ("OscillatorAttention",),
        "ops": ("Drive", "choose_backend", "oscillator_attention", "oscillator_response"),
        "resonators": ("ResonatorFeatures",),
        "streaming": ("OnlineSession",),
        "events": (),
        "math": (),
    }
    # Still found here, with a warning: they belong to `osciformer.nn`.
    _MOVED = ("Encoder", "SeriesEmbedding", "TimeScale", "parameter_groups")

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return importlib.import_module(f"osciformer.{name}")
        for home, names in _HOMES.items():
            if name in names:
                found = getattr(importlib.import_module(f"osciformer.{home}"), name)
                globals()[name] = found
                return found
        if name in _MOVED:
            warnings.warn(
                f"osciformer.{name} is deprecated; import it from osciformer.nn",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(importlib.import_module("osciformer.nn"), name)
        raise AttributeError(f"module 'osciformer' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_HOMES})
