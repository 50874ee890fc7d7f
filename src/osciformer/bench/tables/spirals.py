"""`osciformer bench spirals`: plane spirals, inside what was seen and beyond it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from osciformer._types import Float
from osciformer.bench.documents import Document
from osciformer.bench.report import Row
from osciformer.bench.suite import COLOURS, REFERENCE, new_figure
from osciformer.bench.tables.harness import Table
from osciformer.bench.tables.models import Fitted, Model
from osciformer.bench.tables.problem import Part, Problem
from osciformer.data import IrregularSeries
from osciformer.data.ragged import offsets_of

END, POINTS = 6 * np.pi, 150
#: Points that may be seen are those of the first half; and how many of them are.
HALF, SEEN = POINTS // 2, 50
TRAIN, VALIDATION, TEST = 160, 40, 100
TOTAL = TRAIN + VALIDATION + TEST
#: Standard deviations of both parameters, mean of the second, and noise before scaling.
SPREAD, MEAN_B, NOISE = 0.02, 0.3, 0.05
ANGLES = np.linspace(0.0, END, POINTS)
#: Test spirals that the picture shows.
SHOWN = 4


def basis(is_inward: bool) -> tuple[Float[np.ndarray, "T 2 2"], Float[np.ndarray, "2"]]:
    r"""Return a family of spirals as a matrix and a shift: points are `shift + matrix @ (a, b)`.

    Outward, $(a + b \theta)(\cos\theta, \sin\theta)$ moved by 5; inward,
    $(a + 50 b / z)(\cos z, \sin z)$ with $z = 6 \pi + 1 - \theta$, moved by -5.
    """
    angle = END + 1.0 - ANGLES if is_inward else ANGLES
    direction = np.stack((np.cos(angle), np.sin(angle)), axis=1)
    growth = 50.0 / angle if is_inward else angle
    shift = np.array([-5.0 if is_inward else 5.0, 0.0])
    return np.stack((direction, growth[:, None] * direction), axis=2), shift


class Spirals(NamedTuple):
    """Points of spirals, scaled to [0, 1] by the range of all true ones."""

    true: Float[np.ndarray, "n T 2"]
    noisy: Float[np.ndarray, "n T 2"]
    scale: Float[np.ndarray, "2"]  #: Points are `scale * unscaled + shift`.
    shift: Float[np.ndarray, "2"]


@functools.cache
def make_spirals(count: int, seed: int) -> Spirals:
    """Return spirals of both families, with normal parameters and noise."""
    generator = np.random.default_rng(seed)
    families = [basis(bool(kind)) for kind in generator.random(count) < 0.5]
    parameters = generator.normal((0.0, MEAN_B), SPREAD, (count, 2))
    pairs = zip(families, parameters, strict=True)
    true = np.stack([matrix @ two + shift for (matrix, shift), two in pairs])
    noisy = true + generator.normal(0.0, NOISE, true.shape)
    low, high = true.min(axis=(0, 1)), true.max(axis=(0, 1))
    scale = 1.0 / (high - low)
    return Spirals(scale * (true - low), scale * (noisy - low), scale, -scale * low)


def thin(series: IrregularSeries, generator: np.random.Generator) -> IrregularSeries:
    """Return 50 of the rows of each series, the same ones of all."""
    length = int(series.lengths[0])
    kept = np.sort(generator.permutation(length)[:SEEN])
    rows = (series.offsets[:-1, None] + kept).ravel()
    offsets = offsets_of(np.full(len(series), len(kept)))
    return series.replace(times=series.times[rows], values=series.values[rows], offsets=offsets)


def load(case: str, seed: int, size: Mapping[str, Any]) -> Problem:
    """Return the problem; the seed decides nothing but the training."""
    true, noisy, *_ = make_spirals(TOTAL, 0)
    generator = np.random.default_rng(1)

    def part(rows: slice, first: int = 0, last: int = POINTS) -> Part:
        some, at = noisy[rows, :HALF], np.tile(ANGLES[first:last], (len(true[rows]), 1))
        seen = IrregularSeries.from_arrays(list(np.tile(ANGLES[:HALF], (len(some), 1))), list(some))
        asked = IrregularSeries.from_arrays(list(at), list(true[rows, first:last]))
        return Part(seen, asked)

    count = size.get("train", TRAIN)
    train, held = part(slice(count)), part(slice(TRAIN, TRAIN + VALIDATION))
    held = held._replace(series=thin(held.series, generator))
    tests = {
        "interpolation": part(slice(-TEST, None), 0, HALF),
        "extrapolation": part(slice(-TEST, None), HALF, POINTS),
    }
    seen = thin(tests["interpolation"].series, generator)
    tests = {name: test._replace(series=seen) for name, test in tests.items()}
    settings: dict[str, Any] = {"max_epochs": size["epochs"], "batch_size": size["batch"]}
    settings |= {"dim": size["dim"], "dropout": 0.0}
    return Problem("interpolation", train, held, tests, settings, thin)


def distance_rmse(truth: np.ndarray, found: np.ndarray) -> float:
    """Return the root of the mean squared Euclidean distance."""
    return float(np.sqrt(np.square(found - truth).sum(axis=-1).mean()))


def distance_mae(truth: np.ndarray, found: np.ndarray) -> float:
    """Return the mean of the absolute errors, summed over both coordinates."""
    return float(np.abs(found - truth).sum(axis=-1).mean())


def fit_curve(
    times: Float[np.ndarray, "N"], points: Float[np.ndarray, "N 2"]
) -> Float[np.ndarray, "T 2"]:
    """Return the curve of the family and (a, b) that fit scaled points at some angles best."""
    *_, scale, offset = make_spirals(TOTAL, 0)
    rows = np.abs(ANGLES[:, None] - times).argmin(axis=0)
    best: tuple[float, np.ndarray] | None = None
    for kind in (False, True):
        matrix, shift = basis(kind)
        matrix, shift = scale[:, None] * matrix, scale * shift + offset
        wanted = (points - shift).ravel()
        found, *_ = np.linalg.lstsq(matrix[rows].reshape(-1, 2), wanted, rcond=None)
        error = float(np.square(matrix[rows].reshape(-1, 2) @ found - wanted).sum())
        if best is None or error < best[0]:
            best = error, matrix @ found + shift
    assert best is not None
    return best[1]


def _fit_least_squares(problem: Problem, chosen: Mapping[str, Any], seed: int) -> Fitted:
    def predict(part: Part) -> np.ndarray:
        assert part.asked is not None
        found = []
        for seen, asked in zip(part.series, part.asked, strict=True):
            rows = np.abs(ANGLES[:, None] - asked.times).argmin(axis=0)
            found.append(fit_curve(seen.times, seen.values)[rows])
        return np.concatenate(found)

    return Fitted(predict, {})


def keep(problem: Problem, fitted: Fitted) -> Row:
    """Return the answers for the first test spirals, for the picture."""
    curves = []
    for test in problem.tests.values():
        assert test.asked is not None
        found = fitted.predict(Part(test.series[:SHOWN], test.asked[:SHOWN]))
        curves.append(found.reshape(-1, HALF, 2))
    return {"curves": np.concatenate(curves, axis=1).tolist()}


def draw(document: Document) -> Any:
    """Return the figure: a column per test spiral, a row per model, the best ones first."""
    mine = [row for row in document.finished if "curves" in row]
    mine.sort(key=lambda row: row["scores"]["extrapolation"]["rmse"])
    mine = mine[:6]
    true, *_ = make_spirals(TOTAL, 0)
    test = load("", 0, SUITE.sizes["quick"]).tests["interpolation"].series
    figure, panels = new_figure(len(mine), SHOWN, (2.6 * SHOWN, 2.2 * len(mine)))
    for line, row in zip(panels, mine, strict=True):
        for number, axis in enumerate(line):
            curve = np.array(row["curves"][number])
            axis.plot(*true[number - TEST].T, color=REFERENCE, lw=1, label="true")
            axis.plot(*test[number].values.T, ".", color="0.6", ms=3, label="seen")
            axis.plot(*curve[:HALF].T, color=COLOURS[0], lw=1.2, label="inside")
            axis.plot(*curve[HALF:].T, "--", color=COLOURS[1], lw=1.2, label="beyond")
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(row["model"], fontsize=8)
    panels[0, 0].legend(fontsize=6)
    return figure


SUITE = Table(
    name="spirals",
    module="spirals",
    summary="Plane spirals, inside what was seen and beyond.",
    rows=("spirals",),
    load=load,
    tasks="interpolation",
    sizes={
        "small": {"epochs": 200, "batch": 32, "dim": 32},
        "full": {"epochs": 2000, "batch": 32, "dim": 64},
        "quick": {"train": 16, "epochs": 1, "batch": 16, "dim": 8},
    },
    own={"least_squares": Model(_fit_least_squares, tasks=("interpolation",))},
    metrics={"rmse": distance_rmse, "mae": distance_mae},
    note=(
        "Spirals of two families, each with two parameters: 160 to train on, 40 for validation, "
        "100 to score. 50 of the first 75 points are seen, with noise, another choice in each "
        "epoch of the training; the true points are asked, of the first half (interpolation) and "
        "of the second (extrapolation). Coordinates are scaled to [0, 1]. RMSE is of the Euclidean "
        "distance, MAE sums both coordinates. `least_squares` knows both families and fits two "
        "numbers; seeds change the training alone. Published figures for this protocol were not "
        "found in a text that could be read."
    ),
    keep=keep,
    pictures={"table_spirals_curves": draw},
)
