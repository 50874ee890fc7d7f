"""Each variable of a series by itself: which frequencies it has, and where it was when."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from osciformer._types import Float, Mask, Static, Tensor, Times, Values
from osciformer.math import variance_shares
from osciformer.models.forward_fill import positive_gaps
from osciformer.nn.encoder import with_indicators
from osciformer.nn.parameters import ExactBuffers
from osciformer.ops.padding import clean_times

# Lines of all variables together, and of one: the fewest and the most.
_ALL_LINES, _FEWEST_LINES, _MOST_LINES = 4096, 64, 512
# Lines to a turn over a typical span: fewer miss what lies between two, more tell nothing else.
_DENSITY = (2.0, 4.0)
_SMALL_GAP = 0.1  # quantile of the gaps that decides the highest line
# Fewer values than this have no spectrum.
_FEWEST_VALUES = 5
# Mean of the scaled amplitude of a line where there is only noise (Rayleigh).
_NOISE = math.sqrt(math.pi) / 2.0
# Widths of the local means, in distances of two reads.
_WIDTHS = (0.25, 1.0, 4.0)
# Much less than the weight of one value nearby: a mean of nothing is 0.
_LEAST_WEIGHT = 1e-3


class LineGrid(ExactBuffers):
    """Evenly spaced frequencies that the times of a data set can tell apart.

    Args:
        most: Number of lines; those above the highest frequency are left out.
    """

    step: Tensor
    count: Tensor

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.register_buffer("step", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(most))

    def fit(self, times: Times, mask: Mask | None = None) -> LineGrid:
        """Set spacing and number, from a turn over two spans to half a turn over a small gap."""
        gaps = positive_gaps(times, mask)
        if len(gaps) == 0:
            return self
        times = clean_times(times.double(), mask)
        spans = times.amax(dim=1) - times.amin(dim=1)
        # NumPy's quantile takes any number of gaps, torch's does not.
        small = float(np.quantile(gaps.cpu().numpy(), _SMALL_GAP))
        span, top = float(spans[spans > 0].median()), 0.5 / small
        density = min(max(self.most / (top * span), _DENSITY[0]), _DENSITY[1])
        self.step.fill_(1.0 / (density * span))
        self.count.fill_(min(self.most, max(1, math.ceil(top * density * span - 1e-6))))
        return self


class VariableEncoder(nn.Module):
    r"""A vector per series, from what each variable does by itself.

    Of each variable it takes

    - its **spectrum**: $\sqrt{n s_k / 2}$ for n values, of whose variance a sine of frequency k
      explains the share $s_k$. Undamped oscillators that the values kick end with that amplitude,
      and random times do not alias it;
    - **reads at shared times**, evenly spaced over the series: means of the values before and
      after each, with weights that fall off exponentially at three rates. They are quotients of
      critically damped oscillators, one kicked by the values and one by ones in their place;
    - statistics that are given.

    All of them are exact at irregular times, take time linear in the observations, and have nothing
    to learn. Weights of each variable map them to a token, the tokens attend to each other, and the
    result is the token of the series beside the mean of the variables'.

    Args:
        input_dim: Number of features F.
        static_dim: Number of static features S.
        num_statistics: Number of statistics of a variable.
        dim: Width D of the tokens.
        num_heads: Heads of the attention among variables.
        num_layers: Its layers.
        num_reads: Number G of shared times.
        dropout: Dropout of inputs, attention and its results.
    """

    widths: Tensor

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        num_statistics: int = 0,
        dim: int = 32,
        num_heads: int = 4,
        num_layers: int = 2,
        num_reads: int = 12,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.num_reads, self.output_dim = num_reads, 2 * dim
        most = max(_FEWEST_LINES, min(_MOST_LINES, _ALL_LINES // input_dim))
        self.lines = LineGrid(most)
        self.register_buffer("widths", torch.tensor(_WIDTHS, dtype=torch.float64), persistent=False)
        width = most + num_reads * (2 * len(_WIDTHS) + 1) + num_statistics
        self.weight = nn.Parameter(torch.randn(input_dim, width, dim) / math.sqrt(width))
        self.bias = nn.Parameter(0.3 * torch.randn(input_dim, dim))
        self.static = nn.Linear(2 * static_dim, dim) if static_dim else None
        self.series_token = nn.Parameter(0.1 * torch.randn(dim))
        self.dropout = nn.Dropout(dropout)
        # A well-kept layer of torch: variables have no times, so there is nothing to resonate.
        settings: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, num_heads, 2 * dim, dropout, **settings)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def fit_time_scale(self, times: Times, mask: Mask | None = None) -> VariableEncoder:
        """Set the frequencies, from the training times."""
        self.lines.fit(times, mask)
        return self

    def forward(
        self,
        values: Values,
        times: Times,
        mask: Mask,
        static: Static | None = None,
        statistics: Float[Tensor, "B F S"] | None = None,
    ) -> Float[Tensor, "B P"]:
        """Return the vectors, P = 2 D.

        Args:
            values: Scaled values; NaN is a missing one.
            times: Times.
            mask: True where there is a row.
            static: Static features; NaN is a missing one.
            statistics: Further numbers of each variable.
        """
        columns = self.describe(values, times, mask)
        if statistics is not None:
            columns = torch.cat((columns, statistics.to(columns.dtype)), dim=-1)
        columns = self.dropout(columns.to(self.weight.dtype))
        tokens = torch.einsum("bfi,fid->bfd", columns, self.weight) + self.bias
        first = self.series_token.expand(values.shape[0], 1, -1)
        if self.static is not None and static is not None:
            first = first + self.static(with_indicators(static).to(first.dtype))[:, None]
        tokens = torch.cat((first, tokens), dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        return torch.cat((tokens[:, 0], tokens[:, 1:].mean(dim=1)), dim=-1)

    @torch.no_grad()
    def describe(self, values: Values, times: Times, mask: Mask) -> Float[Tensor, "B F W"]:
        """Return spectra and reads of each variable, about 1 in size and float32."""
        known = ~values.isnan() & mask[..., None]
        times = clean_times(times.double(), mask)
        since = times - times[:, :1]
        values = torch.where(known, values, 0.0).double()
        parts = (self._spectra(values, since, known), self._reads(values, since, known))
        return torch.cat(parts, dim=-1).float()

    def _spectra(self, values: Tensor, times: Tensor, known: Tensor) -> Float[Tensor, "B F L"]:
        share, count, total = variance_shares(
            times, values, known, self.lines.step, self.lines.most
        )
        twice = (2.0 * count * share).sqrt_().sub_(2.0 * _NOISE)
        # The inverse hyperbolic sine, faster than torch's; it would cancel far below -2 alone.
        size = twice.square().add_(1.0).sqrt_().add_(twice).log_()
        lines = torch.arange(self.lines.most, device=values.device)
        counts = (count >= _FEWEST_VALUES) & (total > 1e-12) & (lines < self.lines.count)
        return size.masked_fill_(~counts, 0.0)

    def _reads(self, values: Tensor, times: Tensor, known: Tensor) -> Float[Tensor, "B F R"]:
        last = self.num_reads - 1
        span = times.amax(dim=1, keepdim=True)
        times = times * (last / torch.where(span > 0, span, 1.0))
        # As parts of the end, so that rounding does not put the last read beside the last row.
        parts = torch.arange(self.num_reads, dtype=times.dtype, device=times.device) / last
        reads = parts * torch.where(span > 0, times.amax(dim=1, keepdim=True), last)
        # Both directions see the rows at a read; other rows are ahead or behind, never both.
        ahead = reads[:, :, None] - times[:, None, :]
        ahead = torch.stack((ahead, -ahead), dim=2)
        ahead = ahead.masked_fill_(ahead < 0, torch.inf)  # [B, G, 2, N]
        weights = torch.exp(ahead[..., None, :] / -self.widths[:, None])  # [B, G, 2, K, N]
        found = weights.flatten(1, 3) @ torch.cat((values, known.double()), dim=-1)
        sums, weights = found.unflatten(1, weights.shape[1:4]).chunk(2, dim=-1)
        means = (sums / (weights + _LEAST_WEIGHT)).permute(0, 4, 1, 2, 3).flatten(2)
        near = torch.log1p(weights[:, :, 0, 1])  # how many values are near: [B, G, F]
        return torch.cat((means, near.transpose(1, 2) - 0.7), dim=-1)
