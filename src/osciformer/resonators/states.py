"""States of oscillators that the series drives: values smoothed over longer and longer pasts."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from osciformer._types import Float
from osciformer.data.batches import collate
from osciformer.data.series import IrregularSeries
from osciformer.ops import oscillator_response
from osciformer.resonators.families import Family, FeatureName, similar_lengths, time_scales

NUM_OSCILLATORS = 4
ZETA = 0.5
STATISTIC = "position at the end"
# States that are held at a time: few enough for the cache of a core.
_MOST_STATES = 1 << 20


class States(Family):
    """Positions of oscillators, each driven by one variable, at its last observation.

    They are averages over longer and longer pasts: periods are log-spaced from a typical gap to a
    typical span. The drive is linear between the observations of the variable. NaN stands for a
    variable that a series lacks.
    """

    name: ClassVar[str] = "states"
    group: ClassVar[str] = "summary"

    def _learn(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        gap, span = time_scales(sample)
        periods = np.geomspace(gap, max(span, 2.0 * gap), NUM_OSCILLATORS)
        return {"period": periods, "zeta": np.full(NUM_OSCILLATORS, ZETA)}

    @torch.no_grad()
    def transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        """Return positions by variable and period."""
        omega = torch.from_numpy(2.0 * np.pi / self.arrays["period"])
        zeta = torch.from_numpy(self.arrays["zeta"])
        width = series.num_features * len(omega)
        found = np.empty((len(series), width), dtype=np.float32)
        for index in similar_lengths(series, _MOST_STATES // width):
            batch = collate(series.take(index))
            x, _ = oscillator_response(batch.values, batch.times, omega, zeta, mask=batch.mask)
            known = ~batch.values.isnan() & batch.mask[..., None]
            rows = torch.arange(known.shape[1])[:, None]
            last = torch.where(known, rows, -1).amax(dim=1)[:, None, :, None]
            ends = x.gather(1, last.clamp(min=0).expand(-1, -1, -1, len(omega)))
            found[index] = torch.where(last < 0, torch.nan, ends).flatten(1).numpy()
        return found

    def names(self) -> list[FeatureName]:
        """Return names in the order variable, period."""
        pairs = list(zip(self.arrays["period"], 0.5 / self.arrays["zeta"], strict=True))
        return [
            FeatureName(self.name, (v,), STATISTIC, float(period), float(q), self.columns.unit)
            for v in self.columns.features
            for period, q in pairs
        ]
