"""Named settings of the attention layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Frequencies for times that span about one unit, as TimeScale makes them: from slower than the
# whole window to about sixty turns within it.
DEFAULT_OMEGA_RANGE = (0.1, 200.0)

ATTENTION_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {
        "num_heads": 8,
        "query": "hold",
        "num_modes": 8,
        "bank": "log_spaced",
        "omega_range": DEFAULT_OMEGA_RANGE,
        "zeta_range": (0.05, 0.4),
        "dropout": 0.0,
    },
    # The paper's section on experiments. It gives no dropout rate; 0.1 is the usual one.
    "paper": {
        "num_heads": 8,
        "query": "ridge",
        "num_modes": 8,
        "bank": "log_spaced",
        "omega_range": (1e-2, 10.0),
        "zeta_range": (0.05, 0.4),
        "dropout": 0.1,
    },
}


def resolve_preset(
    presets: Mapping[str, Mapping[str, Any]], preset: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a preset, with every given setting that is not None in its place.

    Raises:
        ValueError: If there is no such preset.
    """
    if preset not in presets:
        raise ValueError(f"preset must be one of {', '.join(presets)}; got {preset!r}")
    settings = dict(presets[preset])
    settings.update({name: value for name, value in given.items() if value is not None})
    return settings
