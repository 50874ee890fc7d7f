"""What is inside a trained network, as arrays in the data's own units; `plots` draws them."""

from osciformer.inspection.attention import (
    ClassAttention,
    LayerAttention,
    attend_classes,
    attend_series,
)
from osciformer.inspection.spectra import (
    LayerSpectrum,
    ProbeResponse,
    find_spectra,
    probe_channel,
    summarise_spectra,
)

__all__ = [
    "ClassAttention",
    "LayerAttention",
    "LayerSpectrum",
    "ProbeResponse",
    "attend_classes",
    "attend_series",
    "find_spectra",
    "probe_channel",
    "summarise_spectra",
]
