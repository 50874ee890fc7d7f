"""Peaks: at which frequency the spectrum of a variable is highest, and how high it is there.

The shares of a spectrum say how much there is at each frequency, so a number that depends on the
frequency itself, such as a heart rate, is no linear function of them. It is one of the peak.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from osciformer._types import Float, Int, Tensor
from osciformer.data.batches import collate
from osciformer.data.series import IrregularSeries
from osciformer.math import variance_shares
from osciformer.resonators.families import Family, FeatureName, similar_lengths
from osciformer.resonators.spectrum import scales_of

#: Lines of a variable, and of all variables together.
MOST_LINES, ALL_LINES, FEWEST_LINES = 1024, 4096, 32
#: Lines a turn over the span: the top of a peak is a parabola through three of them.
LINES_A_TURN = 4.0
#: Weights of a frequency's first harmonics when a fundamental is looked for. They fall, or else
#: half of a lone frequency would be as good as the frequency.
HARMONICS = (1.0, 0.5, 0.3)
STATISTICS = (
    "frequency of the peak",
    "log frequency of the peak",
    "share of variance at the peak",
    "fundamental frequency",
    "log fundamental frequency",
    "share of variance of the fundamental and its harmonics",
)
_FEWEST = 5  # observations; fewer have no spectrum
_MOST_ROWS = 1 << 15  # of series, at a time


class Peaks(Family):
    """Frequency and share of variance of each variable's highest spectral line.

    Once among single lines, and once among fundamentals with their harmonics, as in the beat of a
    heart. NaN stands for a variable with too few observations.
    """

    name: ClassVar[str] = "peaks"
    group: ClassVar[str] = "peaks"

    def _learn(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        scales = [scales_of(sample, number) for number in range(sample.num_features)]
        spacing = 1.0 / (LINES_A_TURN * (max(s.span for s in scales) or 1.0))
        most = min(MOST_LINES, max(FEWEST_LINES, ALL_LINES // sample.num_features))
        top = np.array([0.5 / s.small for s in scales])
        lines = np.clip(np.ceil(top / spacing - 1e-6), 3, most).astype(np.int64)
        return {"spacing": np.array(spacing), "lines": lines}

    def transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        """Return frequencies, in turns a unit of time, and shares by statistic and variable."""
        width = len(STATISTICS) * series.num_features
        found = np.empty((len(series), width), dtype=np.float32)
        for index in similar_lengths(series, _MOST_ROWS):
            found[index] = self._transform(series.take(index)).reshape(len(index), -1)
        return found

    def _transform(self, series: IrregularSeries) -> Float[np.ndarray, "n S F"]:
        batch = collate(series)
        values = batch.values.double()
        known = ~values.isnan() & batch.mask[..., None]
        step, lines = float(self.arrays["spacing"]), self.arrays["lines"]
        share, count, total = variance_shares(
            batch.times.double(), values, known, step, int(lines.max())
        )
        columns = []
        for curves in (share, with_harmonics(share)):
            place, height = highest(curves, lines)
            columns += [place * step, torch.log(place * step), height]
        found = torch.stack(columns, dim=1)
        has_spectrum = ((count >= _FEWEST) & (total > 1e-12))[..., 0]
        kept: np.ndarray = torch.where(has_spectrum[:, None], found, torch.nan).numpy()
        return kept

    def names(self) -> list[FeatureName]:
        """Return names in the order statistic, variable."""
        return [
            FeatureName(self.name, (variable,), statistic)
            for statistic in STATISTICS
            for variable in self.columns.features
        ]


def with_harmonics(share: Float[Tensor, "n F L"]) -> Float[Tensor, "n F L"]:
    """Return the weighted sum of each line's share and those of its harmonics on the grid.

    Example:
        >>> with_harmonics(torch.tensor([0.2, 0.5, 0.0, 0.4])).tolist()[:2]  # lines 1 and 2
        [0.44999998807907104, 0.699999988079071]
    """
    found = torch.zeros_like(share)
    for number, weight in enumerate(HARMONICS, start=1):
        among = share[..., number - 1 :: number]  # line k number of the grid, k = 1, 2, ...
        found[..., : among.shape[-1]] += weight * among
    return found


def highest(
    curves: Float[Tensor, "n F L"], lines: Int[np.ndarray, "F"]
) -> tuple[Float[Tensor, "n F"], Float[Tensor, "n F"]]:
    """Return where each curve is highest, counted from 1 and between lines, and how high.

    The top is that of the parabola through the highest line and its neighbours.

    Args:
        curves: Curves over lines.
        lines: How many lines count for each variable.
    """
    is_own = torch.arange(curves.shape[-1]) < torch.from_numpy(lines)[:, None]
    curves = torch.where(is_own, curves, -torch.inf)
    best = curves.argmax(dim=-1, keepdim=True)
    middle = best.clamp(1, curves.shape[-1] - 2)
    left, top, right = (curves.gather(-1, middle + k)[..., 0] for k in (-1, 0, 1))
    bend = left - 2.0 * top + right
    # At an end of the grid there is no parabola, nor where neighbours are no lower.
    is_inside = (best == middle)[..., 0] & bend.isfinite() & (bend < 0.0)
    shift = torch.where(is_inside, 0.5 * (left - right) / bend, 0.0).clamp(-0.5, 0.5)
    height = curves.gather(-1, best)[..., 0]
    slope = torch.where(is_inside, right - left, 0.0)
    return best[..., 0] + 1.0 + shift, height + 0.25 * slope * shift
