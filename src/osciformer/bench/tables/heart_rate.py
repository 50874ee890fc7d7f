"""`osciformer bench hr`: the heart rate in windows of pulse and ECG, of known and new patients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from osciformer._types import Float
from osciformer.bench.tables.harness import Table
from osciformer.bench.tables.models import peak, spectral
from osciformer.bench.tables.problem import Part, Problem, split_in_three
from osciformer.data import IrregularSeries
from osciformer.data.download import DATA_VARIABLE

#: Of a window: its samples, and the seconds over which the rate is averaged.
SAMPLES, SECONDS = 4000, 32
#: First seconds of windows: 0, 3, ..., 447.
STARTS = np.arange(0, 450, 3)
#: Shares of the training and the validation part, of windows and of recordings.
SHARES = {"pooled": (0.7, 0.15), "recording": (0.6, 0.15)}


class Recordings(NamedTuple):
    """The recordings of BIDMC."""

    signals: Float[np.ndarray, "n T 2"]  #: Pulse and ECG lead II.
    rates: Float[np.ndarray, "n S"]  #: Heart rates each second, beats a minute; some are NaN.
    frequency: int  #: Samples a second.


def read_recordings() -> Recordings:
    """Return the recordings, from the folder that an environment variable names."""
    folder = os.environ.get(DATA_VARIABLE)
    path = Path(folder or ".") / "bidmc.npz"
    if folder is None or not path.exists():
        raise FileNotFoundError(
            f"heart rates need the recordings of BIDMC as bidmc.npz in the folder that "
            f"{DATA_VARIABLE} names; it is not among the data sets that are downloaded"
        )
    with np.load(path) as stored:
        signals = np.stack((stored["pleth"], stored["ecg_ii"]), axis=-1)
        return Recordings(signals, stored["numerics"][..., 0], int(stored["fs"]))


def cut_windows(
    found: Recordings, starts: np.ndarray, decimation: int
) -> tuple[Float[np.ndarray, "n W T 2"], Float[np.ndarray, "n W"]]:
    """Return windows that begin at some seconds, and their mean heart rates.

    Args:
        found: The recordings.
        starts: Their first seconds [W].
        decimation: How many samples one row is the mean of.
    """
    rows = SAMPLES // decimation * decimation
    cut = [found.signals[:, s * found.frequency :][:, :rows] for s in starts]
    windows = np.stack(cut, axis=1)
    windows = windows.reshape(*windows.shape[:2], -1, decimation, 2).mean(axis=3)
    rates = np.stack([found.rates[:, s : s + SECONDS] for s in starts], axis=1)
    return windows, np.nanmean(rates, axis=2)


def load(case: str, seed: int, size: Mapping[str, Any]) -> Problem:
    """Return the problem of a split; it does not depend on the seed."""
    found = read_recordings()
    windows, rates = cut_windows(found, STARTS[:: size["every"]], size["decimation"])
    count, each, length = windows.shape[:3]
    row = size["decimation"] / found.frequency
    times = (np.arange(length) + 0.5) * row
    generator = np.random.default_rng(0)
    if case == "pooled":
        parts = split_in_three(count * each, generator, SHARES[case])
    else:
        numbers = np.arange(count * each).reshape(count, each)
        parts = [numbers[part].ravel() for part in split_in_three(count, generator, SHARES[case])]
    flat, targets = windows.reshape(-1, length, 2), rates.ravel()
    series = [
        Part(IrregularSeries.from_padded(flat[part], times, labels=targets[part])) for part in parts
    ]
    settings = {"max_epochs": size["epochs"], "batch_size": size["batch"], "dim": size["dim"]}
    return Problem("regression", series[0], series[1], {"test": series[2]}, settings)


SUITE = Table(
    name="hr",
    module="heart_rate",
    summary="Heart rate in windows of 32 s.",
    rows=tuple(SHARES),
    load=load,
    tasks="regression",
    sizes={
        "small": {"every": 4, "decimation": 16, "epochs": 15, "batch": 32, "dim": 32},
        "full": {"every": 1, "decimation": 1, "epochs": 100, "batch": 64, "dim": 64},
        "quick": {"every": 50, "decimation": 80, "epochs": 1, "batch": 32, "dim": 8},
    },
    own={
        "lomb_scargle": spectral(1 / SECONDS, 4 * SECONDS),
        "peak": peak(1 / 240, 3 * 240, first=120, unit=60.0),
    },
    note=(
        "53 recordings of intensive care (BIDMC), cut into windows of 4,000 samples every 3 s "
        "(`every` takes each n-th window, a row is the mean of `decimation` samples). RMSE, beats "
        "a minute. `pooled` splits windows 70/15/15 at random, as the published figures do, so "
        "that each patient is in all parts; `recording` splits recordings 60/15/25, so that test "
        "patients are new. `peak` is 60 times the highest peak, from 0.5 to 3 Hz, of the pulse's "
        "periodogram, without training."
    ),
    published={
        ("pooled", "osciformer_paper"): "2.56 ± 0.18",
        ("pooled", "transformer"): "8.24 ± 2.24",
        ("pooled", "neural_cde"): "9.82 ± 0.34",
        ("pooled", "ode_rnn"): "13.06",
        ("pooled", "cornn"): "1.81",
    },
    source=(
        "all windows and samples; as printed in the OsciFormer paper, whose split is not stated, "
        "and `cornn` in the LSSL paper. The lowest found on a pooled split is 0.303 ± 0.002, "
        "Liquid-S4 (arXiv 2209.12951); RFormer has 2.66 ± 0.21"
    ),
)
