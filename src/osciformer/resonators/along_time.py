"""The response of oscillators along the time of one series: which variable, which period, when."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from osciformer._optional import need
from osciformer._types import Float
from osciformer.data.series import IrregularSeries
from osciformer.ops import oscillator_response


class ResponseAlongTime(NamedTuple):
    """Amplitudes of oscillators that the variables of one series drive."""

    times: Float[np.ndarray, "M"]  #: Times, in the unit of the series.
    periods: Float[np.ndarray, "K"]  #: Periods, in the same unit.
    variables: tuple[str, ...]  #: Names of the variables.
    amplitude: Float[np.ndarray, "M F K"]  #: In units of the spread of each variable.
    unit: str | None = None  #: Unit of times and periods; None for plain numbers.

    def plot(self) -> Any:
        """Return a figure: amplitude by time and period, a panel per variable."""
        make = need("matplotlib.figure", extra="plot").Figure
        count = len(self.variables)
        figure = make(figsize=(7.0, 1.2 + 1.8 * count), layout="constrained")
        axes = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
        unit = f", {self.unit}" if self.unit else ""
        top = float(self.amplitude.max(initial=0.0)) or 1.0
        for number, axis in enumerate(axes):
            mesh = axis.pcolormesh(
                self.times, self.periods, self.amplitude[:, number].T, vmin=0.0, vmax=top
            )
            axis.set(yscale="log", ylabel=f"period{unit}", title=self.variables[number])
        axes[-1].set_xlabel(f"time{unit}")
        figure.colorbar(mesh, ax=list(axes), label="amplitude, spreads of the variable")
        return figure


@torch.no_grad()
def respond_along(
    series: IrregularSeries, periods: Float[np.ndarray, "K"], q: float, num_times: int
) -> ResponseAlongTime:
    """Return the response to the one series of a container, driven by what differs from its mean.

    `q` is the quality of the oscillators, 1 / (2 zeta): a higher one tells periods apart more
    sharply, and times less.
    """
    values, times = series.values.astype(np.float64), series.times
    observed = ~np.isnan(values)
    count = np.maximum(observed.sum(axis=0), 1)
    values = values - np.where(observed, values, 0.0).sum(axis=0) / count
    reads = np.linspace(times[0], times[-1], num_times)
    omega = torch.from_numpy(2.0 * np.pi / periods)
    found = oscillator_response(
        torch.from_numpy(values)[None],
        torch.from_numpy(times)[None],
        omega,
        torch.full_like(omega, 0.5 / q),
        query_times=torch.from_numpy(reads)[None],
    )
    amplitude = torch.hypot(found.position, found.velocity / omega)[0].numpy()
    names, unit = series.feature_names, series.time_axis.unit
    return ResponseAlongTime(reads, periods, names, amplitude, unit)
