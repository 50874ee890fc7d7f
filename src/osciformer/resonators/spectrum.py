"""Spectra: undamped oscillators that each observation kicks.

Their final amplitude at a frequency is the periodogram, which random times do not alias: lines far
above the mean sampling rate are told apart, where a path through the observations has lost them.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
import torch

from osciformer._types import Float, Tensor
from osciformer.data.batches import collate
from osciformer.data.series import IrregularSeries
from osciformer.math import centred, line_sums, variance_shares
from osciformer.ops import oscillator_response
from osciformer.resonators.families import Family, FeatureName, similar_lengths

#: Lines of a variable, and of all variables together.
MOST_LINES, ALL_LINES, FEWEST_LINES = 512, 4096, 64
STATISTICS = (
    "share of variance",
    "share of variance without the slow part",
    "share of variance in blocks",
    "share of variance in blocks without the slow part",
)
# Of the second copy of a series, which lacks its slow part: time constant in gaps, and weight.
_SLOW, _COPY = 6.0, 0.5
# Shares are raised to it: noise is small and many, lines are large and few.
_POWER = 1.5
# Fewer observations than this have no spectrum.
_FEWEST = 5
_BLOCK = 16  # rows, at least, of a part of a long series
_MOST_ROWS = 1 << 16  # of series, at a time


class Spectrum(Family):
    """Shares of the variance of each variable that a sine explains, on an even grid of lines.

    Lines reach from one turn over a few spans of the series to half a turn over its small gaps. A
    second copy is of the series without its slow part. Where the grid cannot hold all lines, one
    half of them is coarse: of parts of the series. A variable of too few observations has zeros.
    """

    name: ClassVar[str] = "spectrum"
    group: ClassVar[str] = "spectrum"
    # Lines that vary among series are those at which something happens.
    power: ClassVar[float] = 1.5

    def _learn(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        width = sample.num_features
        scales = [scales_of(sample, number) for number in range(width)]
        gap, small, mean = (np.array([s[k] for s in scales]) for k in range(3))
        span = max(s.span for s in scales) or 1.0
        most = min(MOST_LINES, max(FEWEST_LINES, ALL_LINES // width))
        top = 0.5 / small
        spacing = 1.0 / (np.clip(most / (top.max() * span), 2.0, 4.0) * span)
        reach = np.minimum(top, 1.0 / mean)
        is_long = reach.max() > 1.01 * most * spacing
        most = most // 2 if is_long else most

        def count(highest: np.ndarray, step: float) -> np.ndarray:
            return np.clip(np.ceil(highest / step - 1e-6), 1, most).astype(np.int64)

        arrays = {"gap": gap, "spacing": np.array(spacing), "lines": count(top, spacing)}
        if is_long:
            blocks = np.ceil(reach.max() / (most * spacing))
            coarse = reach.max() / most
            rows = max(_BLOCK, int(np.ceil(np.median(sample.lengths) / blocks)))
            arrays |= {"block": np.array(rows), "coarse": np.array(coarse)}
            arrays["coarse_lines"] = count(reach, coarse)
        return arrays

    def transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        """Return shares by statistic, variable and line."""
        grids = (self.arrays[x] for x in ("lines", "coarse_lines") if x in self.arrays)
        found = np.empty((len(series), 2 * sum(int(x.sum()) for x in grids)), dtype=np.float32)
        for index in similar_lengths(series, _MOST_ROWS):
            found[index] = self._transform(series.take(index))
        return found

    def _transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        batch = collate(series)
        values, times = batch.values.double(), batch.times.double()
        known = ~values.isnan() & batch.mask[..., None]
        fast = self._without_slow(values, times, batch.mask, known)
        ways = (self._shares, self._shares_of_blocks)[: 1 + ("coarse" in self.arrays)]
        copies = ((1.0, values), (_COPY, fast))
        parts = [factor * way(x, times, known) for way in ways for factor, x in copies]
        return np.concatenate(parts, axis=1)

    def names(self) -> list[FeatureName]:
        """Return names in the order statistic, variable, line."""
        grids = [(self.arrays["spacing"], self.arrays["lines"])] * 2
        if "coarse" in self.arrays:
            grids += [(self.arrays["coarse"], self.arrays["coarse_lines"])] * 2
        return [
            FeatureName(self.name, (v,), kind, float(1.0 / (k * step)), None, self.columns.unit)
            for kind, (step, lines) in zip(STATISTICS, grids, strict=False)
            for v, count in zip(self.columns.features, lines, strict=True)
            for k in range(1, count + 1)
        ]

    def _without_slow(
        self, values: Tensor, times: Tensor, mask: Tensor, known: Tensor
    ) -> Float[Tensor, "n N F"]:
        """Return the values less their means with weights that fall off exponentially."""
        omega = torch.from_numpy(1.0 / (_SLOW * self.arrays["gap"]))[:, None].repeat(2, 1)
        zeta = torch.ones_like(omega)
        # Of the values, and of ones in their place: the mean is the quotient of both.
        kicks = torch.where(known, torch.stack([values, torch.ones_like(values)]), 0.0)
        kicks = torch.cat(list(kicks), dim=-1)

        def decayed(kicks: Tensor, times: Tensor, mask: Tensor) -> Tensor:
            # At critical damping, position + velocity / omega after a kick is an exponential.
            x, v = oscillator_response(kicks, times, omega, zeta, drive="impulse", mask=mask)
            return (x + v / omega)[..., 0]

        back = decayed(kicks.flip(1), -times.flip(1), mask.flip(1)).flip(1)
        total, weight = (decayed(kicks, times, mask) + back - kicks).chunk(2, dim=-1)
        return torch.where(known, values - total / weight.clamp(min=1e-12), torch.nan)

    def _shares(self, values: Tensor, times: Tensor, known: Tensor) -> Float[np.ndarray, "n p"]:
        step, lines = float(self.arrays["spacing"]), torch.from_numpy(self.arrays["lines"])
        share, count, total = variance_shares(times, values, known, step, int(lines.max()))
        # A sine and a mean fit three numbers whatever they are.
        share = (1.0 - (1.0 - share) * (count - 1.0) / (count - 3.0).clamp(min=1.0)).clamp(0.0, 1.0)
        return _kept(share, lines, count, total)

    def _shares_of_blocks(
        self, values: Tensor, times: Tensor, known: Tensor
    ) -> Float[np.ndarray, "n p"]:
        """Return the mean over parts of a series: a drifting or short line is not lost."""
        rows, step = int(self.arrays["block"]), float(self.arrays["coarse"])
        lines = torch.from_numpy(self.arrays["coarse_lines"])
        kicks, count, total = centred(values, known)
        n, width, blocks = len(kicks), kicks.shape[2], -(-kicks.shape[1] // rows)
        extra = blocks * rows - kicks.shape[1]
        kicks = torch.nn.functional.pad(kicks, (0, 0, 0, extra)).reshape(-1, rows, width)
        times = torch.nn.functional.pad(times, (0, extra)).reshape(-1, rows)
        sums = line_sums(times, kicks, step, int(lines.max())).abs().square()
        power = sums.unflatten(0, (n, blocks)).sum(1)
        filled = (count / rows).ceil().clamp(min=1.0)  # parts with observations, about
        share = 2.0 * filled * power / (count * total.clamp(min=1e-12)) - 2.0 * filled / count
        return _kept(share.clamp(0.0, 1.0), lines, count, total)


def _kept(share: Tensor, lines: Tensor, count: Tensor, total: Tensor) -> Float[np.ndarray, "n p"]:
    """Return the columns of each variable's own lines; 0 where there is too little to say."""
    share = torch.where((count < _FEWEST) | (total <= 1e-12), 0.0, share).pow(_POWER)
    own: np.ndarray = share[:, torch.arange(share.shape[2]) < lines[:, None]].numpy()
    return own


class Scales(NamedTuple):
    """Gaps between a variable's own observations, and its span."""

    median: float
    small: float
    mean: float
    span: float


def scales_of(series: IrregularSeries, number: int) -> Scales:
    """Return the time scales of one variable; 1 and a span of 0 if none was seen twice."""
    known = ~np.isnan(series.values[:, number])
    owner = np.repeat(np.arange(len(series)), series.lengths)[known]
    times = series.times[known]
    gaps = np.diff(times)[np.diff(owner) == 0]
    gaps = gaps[gaps > 0]
    if len(gaps) == 0:
        return Scales(1.0, 1.0, 1.0, 0.0)
    first, last = (np.searchsorted(owner, np.unique(owner), side=s) for s in ("left", "right"))
    spans = (times[last - 1] - times[first])[last - first > 1]
    return Scales(
        float(np.median(gaps)),
        float(np.quantile(gaps, 0.1)),
        float(gaps.mean()),
        float(np.median(spans)),
    )
