"""The OsciFormer encoder: an irregular series in, a state at any time out."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from osciformer._types import Mask, QueryTimes, Reads, Static, Tensor, Times, Values
from osciformer.config import DEFAULT_OMEGA_RANGE, AttentionConfig, OsciFormerConfig
from osciformer.math.banks import frequency_range
from osciformer.models.forward_fill import positive_gaps
from osciformer.nn.attention import OscillatorAttention
from osciformer.nn.encoder import Encoded, Encoder, EncoderBlock, SeriesEmbedding
from osciformer.nn.resonator import ResonatorLayer
from osciformer.nn.timeline import TimeScale, check_tokens


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
        settings: Any other field of `OsciFormerConfig`, by keyword; None keeps the preset's value.

    Example:
        >>> times = 100 * torch.rand(2, 12).sort().values
        >>> model = OsciFormer(3, dim=16, num_heads=2).fit_time_scale(times)
        >>> encoded = model(torch.randn(2, 12, 3), times)
        >>> encoded.states.shape, model.read(encoded, torch.tensor([[50.0, 120.0]] * 2)).shape
        (torch.Size([2, 12, 16]), torch.Size([2, 2, 16]))
    """

    def __init__(self, input_dim: int, *, preset: str = "default", **settings: Any) -> None:
        super().__init__()
        config = OsciFormerConfig.from_preset(preset, input_dim=input_dim, **settings)
        self.config, self.input_dim, self.time_scale = config, config.input_dim, TimeScale()
        self.embedding = SeriesEmbedding(config.input_dim, config.dim, static_dim=config.static_dim)
        layer = {item.name: getattr(config, item.name) for item in fields(AttentionConfig)}
        if isinstance(config.omega_range, str):
            layer["omega_range"] = DEFAULT_OMEGA_RANGE  # until fit_time_scale
        between: Any = {"feedforward_dim": config.feedforward_dim, "dropout": config.dropout}
        shared = ("dim", "direction", "omega_range", "zeta_range", "undamped", "dropout", "bias")
        driven = {name: layer[name] for name in shared}
        kinds = {
            "attention": lambda: OscillatorAttention(**layer),
            "resonator": lambda: ResonatorLayer(**driven),
            "selective": lambda: ResonatorLayer(**driven, selective=True),
        }
        layers = (kinds[kind]() for kind in config.blocks or ["attention"] * config.num_layers)
        self.encoder = Encoder(EncoderBlock(item, **between) for item in layers)

    @classmethod
    def from_config(cls, config: OsciFormerConfig) -> OsciFormer:
        """Return the model of a configuration."""
        return cls(**{item.name: getattr(config, item.name) for item in fields(config)})

    @property
    def dim(self) -> int:
        """Width D of the states."""
        return self.config.dim

    def fit_time_scale(
        self, times: Times, mask: Mask | None = None, *, generator: torch.Generator | None = None
    ) -> OsciFormer:
        """Set the unit of time, and the frequencies if they come from the data.

        The unit is the longest span of a series. With `omega_range="data"` all spectra are drawn
        again, from half a turn over that span to half a turn over a short gap (the 5 % quantile);
        with `"typical"`, from one radian over the span to half a turn over the median gap.

        Args:
            times: Times `[B, N]` of the training set, or of a fair sample.
            mask: True where an observation is present `[B, N]`.
            generator: Source of randomness of the spectra.
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
        values: Values,
        times: Times,
        mask: Mask | None = None,
        static: Static | None = None,
        *,
        observed: Tensor | None = None,
        query_times: QueryTimes | None = None,
        return_internals: bool = False,
        validate: bool = True,
    ) -> Encoded:
        """Return the encoded series.

        Args:
            values: Values `[B, N, F]`; NaN is missing. Where `mask` is False anything may stand.
            times: Their times `[B, N]`, in any unit, not decreasing among the present of a series.
            mask: True where an observation is present `[B, N]`.
            static: Static features `[B, S]`; NaN is a missing one.
            observed: True where a value was measured `[B, N, F]`; None takes all that are not NaN.
            query_times: Also read at these times `[B, M]`, in any order, into `encoded.reads`.
            return_internals: Also return the internals of each layer.
            validate: Check shapes and dtypes; False if the caller has done so.
        """
        query_times = None if query_times is None else self.time_scale(query_times)
        if validate:
            check_tokens(values, times, mask, query_times, name="values", dim=self.input_dim)
        tokens, times = self.embedding(values, observed, static=static), self.time_scale(times)
        options = {"return_internals": return_internals, "validate": False}
        return self.encoder(tokens, times, mask, query_times, **options)

    def read(self, encoded: Encoded, query_times: QueryTimes) -> Reads:
        """Return the states at any times, in the unit of the data, of an encoded batch.

        A read sees the observations at or before its time (all of them if the model is
        bidirectional); only in query mode `linear` also other reads, see `OscillatorAttention`.
        """
        return self.encoder.read(encoded, self.time_scale(query_times))

    def read_series(
        self,
        values: Values,
        times: Times,
        mask: Mask | None,
        static: Static | None,
        query_times: QueryTimes,
        *,
        validate: bool = True,
    ) -> Reads:
        """Return `read(forward(values, times, mask, static), query_times)`, for less work."""
        query_times = self.time_scale(query_times)
        if validate:
            check_tokens(values, times, mask, query_times, name="values", dim=self.input_dim)
        tokens, times = self.embedding(values, static=static), self.time_scale(times)
        return self.encoder.read_tokens(tokens, times, mask, query_times, validate=False)
