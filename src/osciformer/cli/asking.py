"""The times at which forecasts and imputations are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from osciformer.cli.errors import MISUSED, CommandError
from osciformer.cli.tables import read_frame

# Forecasts per series if nothing is said about their times.
NUM_STEPS = 10


@dataclass(frozen=True)
class Asked:
    """What is asked of each series.

    Attributes:
        shared: Times for all series [M], or None.
        by_id: Times of single series by id, or None.
        is_relative: Whether shared times count from the end of each series.
    """

    shared: np.ndarray | None = None
    by_id: dict[Any, np.ndarray] | None = None
    is_relative: bool = False

    def of(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return the times of each of these series."""
        if self.by_id is None:
            assert self.shared is not None
            return [self.shared] * len(ids)
        nothing = next(iter(self.by_id.values()))[:0]
        return [self.by_id.get(id, nothing) for id in ids.tolist()]


def ask(
    estimator: Any,
    task: str,
    ids: np.ndarray,
    *,
    times: Path | None,
    horizon: float | None,
    every: float | None,
) -> Asked | None:
    """Return what is asked; None for the rows of the table itself.

    Args:
        estimator: A forecaster or an imputer.
        task: Its task.
        ids: All series.
        times: File of times, with a column of ids or without.
        horizon: How far ahead of the end of each series.
        every: Steps on the way there.
    """
    if times is not None:
        if horizon is not None or every is not None:
            raise CommandError("give --times, or --horizon and --every, not both", MISUSED)
        return read_times_file(times, estimator.layout, ids)
    if task == "imputation":
        if horizon is not None or every is not None:
            raise CommandError("--horizon and --every are for forecasts; use --times", MISUSED)
        return None
    horizon = estimator.horizon_ if horizon is None else horizon
    every = horizon / NUM_STEPS if every is None else every
    if not 0 < every <= horizon < float("inf"):
        raise CommandError(
            f"--horizon and --every must be positive, and --every not above --horizon; "
            f"got {horizon:g} and {every:g}",
            MISUSED,
        )
    count = int(np.floor(horizon / every * (1 + 1e-9)))
    return Asked(shared=every * np.arange(1, count + 1), is_relative=True)


def read_times_file(path: Path, saved: Any, ids: np.ndarray) -> Asked:
    """Return times from a table with the time column of training and perhaps its id column."""
    from osciformer.data import Layout
    from osciformer.data.tables import check_columns, read_codes, read_times

    table = read_frame(path)
    settings = {"id": "id", "time": "time"} if saved is None else dict(saved)
    layout = Layout(**settings | {"values": None, "label": None, "static": ()})
    check_columns(table.column_names, [layout.time])
    ticks, axis = read_times(table.column(layout.time), layout)
    moments = ticks if axis.kind == "number" else axis.decode(ticks / axis.ticks_per_unit, None)
    if layout.id not in table.column_names:
        return Asked(shared=np.unique(moments))
    codes, entries = read_codes(table.column(layout.id))
    by_id = {
        entry: np.sort(moments[codes == number]) for number, entry in enumerate(entries.tolist())
    }
    if not by_id.keys() & set(ids.tolist()):
        raise CommandError(
            f"none of the ids in {path}, such as {next(iter(by_id), None)!r}, occurs in the table, "
            f"which has ids such as {ids[0]!s}; are they of the same type?"
        )
    return Asked(by_id=by_id)
