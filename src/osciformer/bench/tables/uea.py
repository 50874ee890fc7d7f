"""`osciformer bench uea`: multivariate series of the UEA archive, also with dropped rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from osciformer.bench.tables.harness import Table
from osciformer.bench.tables.problem import Part, Problem
from osciformer.data import IrregularSeries, get_dataset
from osciformer.data.ragged import offsets_of
from osciformer.estimators.base import split, training_length

#: Sets with a complete official split, those of the fewest numbers first.
OFFICIAL = (
    *("Libras", "AtrialFibrillation", "BasicMotions", "RacketSports", "ERing", "JapaneseVowels"),
    *("StandWalkJump", "UWaveGestureLibrary", "Handwriting", "FingerMovements"),
    *("ArticularyWordRecognition", "HandMovementDirection", "PenDigits", "LSST"),
    *("SelfRegulationSCP1", "MotorImagery"),
)
PERCENTAGES = (0, 30, 50, 70)
#: Long ones in five published random splits.
RESAMPLED = (
    *("SelfRegulationSCP1-resampled", "SelfRegulationSCP2-partial"),
    "EthanolConcentration-partial",
)
FEWEST_ROWS = 2
#: Part of the official training series that is kept for validation.
HELD = 0.2


def drop_rows(
    series: IrregularSeries, percentage: int, generator: np.random.Generator
) -> IrregularSeries:
    """Return the series without a percentage of their rows, rounded down; at least 2 rows stay."""
    kept = []
    for start, length in zip(series.offsets[:-1], series.lengths, strict=True):
        fewest = min(FEWEST_ROWS, int(length))
        stay = max(int(length) - percentage * int(length) // 100, fewest)
        kept.append(start + np.sort(generator.permutation(length)[:stay]))
    index = np.concatenate(kept)
    return series.replace(
        times=series.times[index],
        values=series.values[index],
        offsets=offsets_of(np.array([len(rows) for rows in kept])),
    )


def load(case: str, seed: int, size: Mapping[str, Any]) -> Problem:
    """Return the problem of a set: the seed decides its fold, or what is dropped and held back."""
    if case in RESAMPLED:
        parts = [get_dataset(case, part, fold=seed % 5 + 1) for part in ("train", "val", "test")]
    else:
        name, _, percentage = case.rpartition("-")
        percent = int(percentage)
        # Drawn apart, so that the test series do not depend on the number of training series.
        whole, rest = (
            drop_rows(get_dataset(name, part), percent, np.random.default_rng([seed, percent, k]))
            for k, part in enumerate(("train", "test"))
        )
        numbers = np.unique(np.asarray(whole.labels), return_inverse=True)[1]
        rows = split(numbers, HELD, np.random.default_rng([seed, 2]))
        parts = [*(whole.take(index) for index in rows), rest]
    order = np.random.default_rng(0)
    train, validation, test = (
        Part(part.take(order.permutation(len(part))[: size["most"]])) for part in parts
    )
    length = training_length(len(train.series))
    epochs = size["epochs"] or size["times"] * length.max_epochs
    settings = {"max_epochs": epochs, "batch_size": length.batch_size, "dim": size["dim"]}
    return Problem("classification", train, validation, {"test": test}, settings)


SUITE = Table(
    name="uea",
    module="uea",
    summary="Multivariate series of the UEA archive.",
    rows=(*(f"{name}-{p}" for p in PERCENTAGES for name in OFFICIAL), *RESAMPLED),
    load=load,
    tasks="classification",
    sizes={
        "small": {"times": 1, "epochs": 0, "dim": 32, "most": None},
        "full": {"times": 4, "epochs": 0, "dim": 64, "most": None},
        "quick": {"times": 1, "epochs": 1, "dim": 8, "most": 40},
    },
    note=(
        "A set and the percentage of the rows of each series, in all parts, that is dropped at "
        "random; the rows that stay keep their times. The archive's own training and test series; "
        "a fifth of the training series is held back for validation, class by class; a seed "
        "decides what is dropped and held back. `resampled` and `partial` are published splits of "
        "all series 70/15/15 (those `partial` lack some training series), a fold a seed; settings "
        "are chosen on the first fold, which has most test series of the others. Epochs "
        "are those of `training_length`, 600 steps or 15 passes, times `times`."
    ),
    published={
        ("SelfRegulationSCP1-resampled", name): figure
        for name, figure in {
            "linoss": "87.8 ± 2.6",
            "log_ncde": "83.1 ± 2.8",
            "s5": "89.9",
            "lru": "82.6",
            "mamba": "80.7",
            "neural_cde": "79.8",
            "osciformer_paper": "84.1 ± 3.0",
        }.items()
    },
    source=(
        "on the same five splits; as printed in the OsciFormer paper, whose own split is not "
        "stated, and `linoss` from the result files of its authors"
    ),
)
