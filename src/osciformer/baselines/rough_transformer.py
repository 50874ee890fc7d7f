"""A Transformer over log-signatures of windows of a series."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from osciformer._types import Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.baselines.controlled import LogSignature, control_path, log_signatures
from osciformer.baselines.directions import rows_before
from osciformer.baselines.transformer import SinusoidalTime, encoder_blocks
from osciformer.config import DEFAULT_OMEGA_RANGE
from osciformer.math.banks import frequency_range
from osciformer.models.backbones import Backbone, register_backbone
from osciformer.nn.encoder import EncoderBlock, with_indicators
from osciformer.nn.timeline import TimeScale
from osciformer.ops.attention.ties import take_rows
from osciformer.ops.padding import clean_times


class _EncodedWindows(NamedTuple):
    states: Tokens
    times: Times
    mask: Mask
    views: list[LogSignature]  # up to each row: of the series, of its window
    slope: Tensor  # of the path after each row
    known: Tensor  # what the static features add to a token
    inputs: list[Tokens]  # of windows, as they enter each block
    ends: Times  # of windows
    present: Mask


@register_backbone("rough_transformer")
class RoughTransformer(Backbone):
    """A Transformer whose tokens are multi-view log-signatures of depth 2.

    Moreno-Pino et al., "Rough Transformers: Lightweight and Continuous Time Series Modelling
    through Signature Patching", NeurIPS 2024. The token of a window is a map of the log-signatures
    of the path over the series up to its end and over the window. The path is rectilinear and goes
    through a learned map to few channels. A row, or any other time, is the token of the path up to
    there; it sees the windows, if causal those that are over, and none sees it.

    Args:
        input_dim: Number of input columns F.
        static_dim: Number of static features S.
        dim: Width D, even.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        direction: `causal` or `bidirectional`.
        dropout: Dropout of attention and feed-forward.
        control_dim: Channels C to which the map takes the path; None is no map.
        window: Rows of a window.
    """

    upper: Tensor

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        direction: str = "bidirectional",
        dropout: float = 0.0,
        control_dim: int | None = 8,
        window: int = 8,
    ) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window must be at least 1 row; got {window}")
        self.dim, self.window, self.time_scale = dim, window, TimeScale()
        self.is_causal = direction == "causal"
        channels = 1 + 2 * input_dim
        self.mix: nn.Module = nn.Identity()
        if control_dim is not None:
            self.mix, channels = nn.Linear(channels, control_dim, bias=False), control_dim
        upper = torch.triu_indices(channels, channels, 1)
        self.register_buffer("upper", upper[0] * channels + upper[1], persistent=False)
        self.embedding = nn.Linear(2 * (channels + upper.shape[1]), dim)
        self.static = nn.Linear(2 * static_dim, dim, bias=False) if static_dim else None
        self.bank = SinusoidalTime(dim, DEFAULT_OMEGA_RANGE)
        sizes = num_layers, dim, num_heads
        self.blocks = encoder_blocks(*sizes, direction=direction, dropout=dropout)
        self.norm = nn.LayerNorm(dim)

    def encode(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> _EncodedWindows:
        """Return the encoded series, see `Backbone.encode`."""
        times = self.time_scale(clean_times(times, mask))
        path = control_path(values, times, mask, looks_ahead=False)
        width = times.shape[1]
        # The path starts from 0, so that the first values count.
        start = nn.functional.pad(self.mix(path.start)[:, None, None], (0, 0, 0, 1, 0, width - 1))
        pieces = self.mix(path.pieces) + start
        views = [
            LogSignature(*(x.flatten(1, 2)[:, :width] for x in log_signatures(pieces, size)))
            for size in (width, self.window)
        ]
        known = times.new_zeros(len(times), 1, self.dim).to(values.dtype)
        if self.static is not None and static is not None:
            known = self.static(with_indicators(static).to(values.dtype))[:, None]
        rows = self._tokens(views, times, known)
        # The token of a window is that of its last row; absent rows add nothing to a path.
        ends = torch.arange(self.window, width + self.window, self.window, device=times.device) - 1
        ends = ends.clamp(max=width - 1)
        window_mask = nn.functional.pad(mask, (0, -width % self.window))
        window_mask = window_mask.unflatten(1, (-1, self.window))
        # Of a window that is not over yet only its rows know; else the end of a series would show.
        window_mask = window_mask.all(dim=-1) if self.is_causal else window_mask.any(dim=-1)
        window_times, inputs = times[:, ends], [rows[:, ends]]
        for block in self.blocks[:-1]:
            inputs.append(block(inputs[-1], window_times, window_mask, validate=False))
        of_rows = rows, times, mask, views, self.mix(path.slope), known
        encoded = _EncodedWindows(*of_rows, inputs, window_times, window_mask)
        states = self._see(encoded, rows, times).masked_fill(~mask[..., None], 0.0)
        return encoded._replace(states=states)

    def read(self, encoded: _EncodedWindows, query_times: QueryTimes) -> Reads:
        """Return the states at any times, in the unit of the data."""
        query_times = self.time_scale(query_times)
        row, since, is_before = rows_before(encoded.times, query_times, encoded.mask)
        piece = take_rows(encoded.slope, row) * since[..., None].to(encoded.slope.dtype)
        views = [
            LogSignature(*(take_rows(x, row) for x in view)).extended(piece)
            for view in encoded.views
        ]
        rows = self._tokens(views, query_times, encoded.known)
        return self._see(encoded, rows, query_times).masked_fill(is_before, 0.0)

    def _tokens(self, views: list[LogSignature], times: Times, known: Tensor) -> Tokens:
        """Return the tokens of log-signatures; these may be large, so they are compressed."""
        found = [y for x in views for y in (x.increment, x.area.flatten(2)[..., self.upper])]
        tokens = self.embedding(torch.cat(found, dim=-1).asinh()) + known
        return cast("Tensor", tokens + self.bank(times).to(tokens.dtype))

    def _see(self, seen: _EncodedWindows, rows: Tokens, times: Times) -> Tokens:
        """Return rows after all blocks, in which they see the windows."""
        for block, x in zip(cast("list[EncoderBlock]", self.blocks), seen.inputs, strict=True):
            rows = block.read(rows, times, x, seen.ends, seen.present, validate=False)
        return cast("Tensor", self.norm(rows))

    def _fit_time_scale(self, times: Times, mask: Mask | None, generator: Any) -> None:
        self.time_scale.fit(times, mask)
        self.bank.reset(frequency_range(self.time_scale(times), mask), generator=generator)
