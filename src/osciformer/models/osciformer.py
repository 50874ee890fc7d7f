"""The OsciFormer backbone: an irregular series in, a state at any time out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.math.banks import frequency_range
from osciformer.models.carry import positive_gaps
from osciformer.models.config import OsciFormerConfig
from osciformer.nn.attention import OscillatorAttention
from osciformer.nn.checks import check_tokens
from osciformer.nn.embedding import SeriesEmbedding
from osciformer.nn.encoder import Encoded, Encoder, EncoderBlock
from osciformer.nn.presets import DEFAULT_OMEGA_RANGE
from osciformer.nn.timeline import TimeScale


class OsciFormer(nn.Module):
    """Encoder for irregularly sampled series, with missing values and static features.

    Values become tokens, times are put into the unit of the data set, and a stack of oscillator
    attention encodes them. `read` gives the state at any other time. Call `fit_time_scale` once
    with the training times, before the optimizer is built.

    Args:
        input_dim: Number of features F.
        preset: `default` (query `hold`, frequencies from the data's own time scales) or `paper`
            (width 256, 8 heads, J = 8, frequencies log-uniform on [0.01, 10] of normalised time,
            query `ridge`). Any setting given explicitly wins over the preset.
        static_dim: Number of static features S.
        dim: Width D.
        num_layers: Number of encoder blocks.
        num_heads: Number of heads H.
        feedforward_dim: Hidden width of the feed-forward; 4 D if not given.
        query: Query mode, see `OscillatorAttention`, as for all that follow.
        value: `average` or `point`.
        direction: `causal` or `bidirectional`.
        num_modes: Frequencies J of the query bank.
        bank: Kind of bank.
        omega_range: `(low, high)` per unit of the model's time, or `"data"` or `"typical"`, see
            `fit_time_scale`.
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
        >>> times = 100 * torch.rand(2, 12).sort().values
        >>> model = OsciFormer(3, dim=16, num_heads=2).fit_time_scale(times)
        >>> encoded = model(torch.randn(2, 12, 3), times)
        >>> encoded.states.shape, model.read(encoded, torch.tensor([[50.0, 120.0]] * 2)).shape
        (torch.Size([2, 12, 16]), torch.Size([2, 2, 16]))
    """

    def __init__(
        self,
        input_dim: int,
        *,
        preset: str = "default",
        static_dim: int | None = None,
        dim: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        feedforward_dim: int | None = None,
        query: str | None = None,
        value: str | None = None,
        direction: str | None = None,
        num_modes: int | None = None,
        bank: str | None = None,
        omega_range: tuple[float, float] | str | None = None,
        zeta_range: tuple[float, float] | None = None,
        undamped: bool | None = None,
        velocity: bool | None = None,
        drive_modes: int | None = None,
        equilibrium: bool | None = None,
        ridge: float | None = None,
        dropout: float | None = None,
        bias: bool | None = None,
        backend: str | None = None,
    ) -> None:
        given = {
            "input_dim": input_dim,
            "static_dim": static_dim,
            "dim": dim,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "feedforward_dim": feedforward_dim,
            "query": query,
            "value": value,
            "direction": direction,
            "num_modes": num_modes,
            "bank": bank,
            "omega_range": omega_range,
            "zeta_range": zeta_range,
            "undamped": undamped,
            "velocity": velocity,
            "drive_modes": drive_modes,
            "equilibrium": equilibrium,
            "ridge": ridge,
            "dropout": dropout,
            "bias": bias,
            "backend": backend,
        }
        super().__init__()
        self._build(OsciFormerConfig.from_preset(preset, **given))

    @classmethod
    def from_config(cls, config: OsciFormerConfig) -> OsciFormer:
        """Return the model of a configuration."""
        model = cls.__new__(cls)
        nn.Module.__init__(model)
        model._build(config)
        return model

    def _build(self, config: OsciFormerConfig) -> None:
        self.config = config
        self.time_scale = TimeScale()
        self.embedding = SeriesEmbedding(config.input_dim, config.dim, static_dim=config.static_dim)
        self.encoder = Encoder(
            EncoderBlock(
                _attention(config),
                feedforward_dim=config.feedforward_dim,
                dropout=config.dropout,
            )
            for _ in range(config.num_layers)
        )

    @property
    def dim(self) -> int:
        """Width D of the states."""
        return self.config.dim

    def fit_time_scale(
        self,
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> OsciFormer:
        """Set the unit of time, and the frequencies where they come from the data.

        The unit is the longest span of a training series. With `omega_range="data"` the spectra
        of all layers are drawn again, from half a turn over that span to half a turn over a
        short gap (the 5 % quantile), so call this before training. With `"typical"` they go from
        one radian over the span to half a turn over the median gap: where some gaps are much
        shorter than most, fewer channels start out too fast to see more than one observation.

        Args:
            times: Times of the training set, or of a fair sample.
            mask: True where an observation is present.
            generator: Source of randomness of the spectra.

        Returns:
            This model.
        """
        self.time_scale.fit(times, mask)
        if isinstance(self.config.omega_range, str):
            times = self.time_scale(times)
            omega_range = frequency_range(times, mask)
            if self.config.omega_range == "typical":
                median = float(positive_gaps(times, mask).median())
                omega_range = omega_range[0] / math.pi, math.pi / median
            for block in self.encoder:
                block.attention.reset_spectra(omega_range, generator=generator)
        return self

    def forward(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        static: Float[Tensor, "B S"] | None = None,
        *,
        observed: Bool[Tensor, "B N F"] | None = None,
        query_times: Float[Tensor, "B M"] | None = None,
        return_internals: bool = False,
    ) -> Encoded:
        """Return the encoded series.

        Args:
            values: Values; NaN is a missing one. Where `mask` is False they may hold anything.
            times: Their times, in any unit, not decreasing among the present of a series.
            mask: True where an observation is present.
            static: Static features; NaN is a missing one.
            observed: True where a value was measured; None takes all that are not NaN.
            query_times: Also read at these times, in any order.
            return_internals: Also return the internals of each layer.

        Returns:
            An `Encoded`; `encoded.reads` holds the states at `query_times`.
        """
        check_tokens(values, times, mask, name="values", dim=self.config.input_dim)
        tokens = self.embedding(values, observed, static=static)
        if query_times is not None:
            query_times = self.time_scale(query_times)
        return self.encoder(
            tokens,
            self.time_scale(times),
            mask,
            query_times,
            return_internals=return_internals,
        )

    def read(self, encoded: Encoded, query_times: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Return the states at any times, in the unit of the data, of an encoded batch.

        A read sees the observations at or before its time (all of them if the model is
        bidirectional) and no other read; `OscillatorAttention` says what it asks for. Only in query
        mode `linear` may reads of one call depend on each other, as described there.
        """
        return self.encoder.read(encoded, self.time_scale(query_times))

    def read_series(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None,
        static: Float[Tensor, "B S"] | None,
        query_times: Float[Tensor, "B M"],
    ) -> Float[Tensor, "B M D"]:
        """Return `read(forward(values, times, mask, static), query_times)`, for less work.

        What the last block makes of the observations, which no read sees, is not computed.
        """
        check_tokens(values, times, mask, name="values", dim=self.config.input_dim)
        tokens = self.embedding(values, static=static)
        return self.encoder.read_tokens(
            tokens, self.time_scale(times), mask, self.time_scale(query_times)
        )


def _attention(config: OsciFormerConfig) -> OscillatorAttention:
    omega_range = config.omega_range
    settings: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            "query",
            "value",
            "direction",
            "num_modes",
            "bank",
            "zeta_range",
            "undamped",
            "velocity",
            "drive_modes",
            "equilibrium",
            "ridge",
            "dropout",
            "bias",
            "backend",
        )
    }
    return OscillatorAttention(
        config.dim,
        config.num_heads,
        omega_range=DEFAULT_OMEGA_RANGE if isinstance(omega_range, str) else omega_range,
        **settings,
    )
