"""Settings of a model as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from osciformer.nn.presets import ATTENTION_PRESETS, resolve_preset

# Both start from the layer's preset and add what a whole model needs. The paper gives neither the
# number of layers nor the feed-forward's width.
MODEL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {
        **ATTENTION_PRESETS["default"],
        "dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "omega_range": "data",
    },
    "paper": {**ATTENTION_PRESETS["paper"], "dim": 256, "num_layers": 2},
}

#: Names of frequency ranges that come from the training times, see `OsciFormer.fit_time_scale`.
RANGES_OF_DATA = ("data", "typical")


@dataclass(frozen=True)
class OsciFormerConfig:
    """Everything that decides the shape and behaviour of an `OsciFormer`.

    Attributes:
        input_dim: Number of features F.
        static_dim: Number of static features S.
        dim: Width D.
        num_layers: Number of encoder blocks.
        num_heads: Number of heads H.
        feedforward_dim: Hidden width of the feed-forward; None is 4 D.
        query: Query mode.
        value: `average` or `point`.
        direction: `causal` or `bidirectional`.
        num_modes: Frequencies J of the query bank.
        bank: Kind of bank.
        omega_range: Ends of the frequencies per unit of the model's time, or taken from the
            training times by `OsciFormer.fit_time_scale`: `"data"`, all that they can resolve, up
            to half a turn over a short gap; or `"typical"`, up to half a turn over the median gap.
        zeta_range: Ends of the initial damping ratios.
        undamped: No damping at all.
        velocity: Learned initial velocities.
        drive_modes: Number of drive frequencies.
        equilibrium: Learned rest positions.
        ridge: Ridge of the query fits.
        dropout: Dropout of attention and feed-forward.
        bias: Biases in the attention's projections.
        backend: Backend of the operator.

    Example:
        >>> config = OsciFormerConfig.from_preset("paper", input_dim=3, dim=32)
        >>> config.query, config.dim, config.num_heads
        ('ridge', 32, 8)
        >>> OsciFormerConfig.from_dict(config.to_dict()) == config
        True
    """

    input_dim: int
    static_dim: int = 0
    dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    feedforward_dim: int | None = None
    query: str = "hold"
    value: str = "average"
    direction: str = "causal"
    num_modes: int = 8
    bank: str = "log_spaced"
    omega_range: tuple[float, float] | str = "data"
    zeta_range: tuple[float, float] = (0.05, 0.4)
    undamped: bool = False
    velocity: bool = True
    drive_modes: int = 0
    equilibrium: bool = False
    ridge: float = 1e-4
    dropout: float = 0.0
    bias: bool = True
    backend: str = "auto"

    def __post_init__(self) -> None:
        """Refuse what no layer would, and turn lists, as JSON has them, into tuples."""
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be at least 1; got {self.num_layers}")
        object.__setattr__(self, "zeta_range", tuple(self.zeta_range))
        if isinstance(self.omega_range, str):
            if self.omega_range not in RANGES_OF_DATA:
                allowed = " or ".join(map(repr, RANGES_OF_DATA))
                raise ValueError(
                    f"omega_range must be (low, high) or {allowed}; got {self.omega_range!r}"
                )
        else:
            object.__setattr__(self, "omega_range", tuple(self.omega_range))

    @classmethod
    def from_preset(cls, preset: str, **settings: Any) -> OsciFormerConfig:
        """Return a preset with the given settings in place of its own; None keeps the preset's."""
        return cls.from_dict(resolve_preset(MODEL_PRESETS, preset, settings))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OsciFormerConfig:
        """Return the configuration that `to_dict` wrote; an unknown key is an error."""
        allowed = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(allowed))
        if unknown:
            raise ValueError(f"unknown settings {unknown}; allowed: {', '.join(allowed)}")
        if "input_dim" not in settings:
            raise ValueError("input_dim, the number of features, must be given")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that JSON can hold."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
