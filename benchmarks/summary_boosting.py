"""Gradient boosting on summaries of each series, a baseline for classes of two kinds.

    python benchmarks/summary_boosting.py TRAIN.parquet TEST.parquet --id id --time time \
        --target label --static Age,Gender --seed 0 -o predictions.parquet --metrics metrics.json

Of every feature a tree sees how often it was measured, its first, last, smallest and largest value,
its mean, spread and slope, and the times of its first and last value; and the static features.
Settings and number of trees are those with the best AUROC in five-fold cross-validation on the
training table; the model is then fitted to all of it. The predictions have the columns that
`osciformer predict` writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

from osciformer.data import IrregularSeries, Layout, read_parquet
from osciformer.data.ragged import series_of_rows

#: scikit-learn's defaults, and smaller trees that learn more slowly; what is not named is default.
CANDIDATES: tuple[dict[str, Any], ...] = (
    {"learning_rate": 0.1, "max_leaf_nodes": 31},
    {"learning_rate": 0.05, "max_leaf_nodes": 8, "max_features": 0.3},
)
NUM_FOLDS = 5
#: Columns with fewer known values are left out: a fold without any cannot be fitted.
FEWEST_KNOWN = 20
SUMMARIES = (
    *("count", "first", "min", "max", "mean", "std", "slope", "first_time", "last_time", "last"),
)


def summaries(series: IrregularSeries) -> np.ndarray:
    """Return the summaries of all features, in the order of `SUMMARIES`, then static features.

    Args:
        series: n series of F features, none without rows.

    Returns:
        Array [n, 10 F + S]; NaN where a feature has no value, or its slope only one time.
    """
    if len(series) == 0 or series.lengths.min() == 0:
        raise ValueError("series without rows have no summaries; leave them out")
    starts, owner = series.offsets[:-1], series_of_rows(series.offsets)
    values = series.values.astype(np.float64)
    is_known = ~np.isnan(values)
    times = np.where(is_known, series.times[:, None], np.nan)

    def total(of: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.where(is_known, of, 0.0), starts)

    with np.errstate(divide="ignore", invalid="ignore"):
        count = total(is_known)
        mean, middle = total(values) / count, total(times) / count
        off, apart = values - mean[owner], times - middle[owner]
        spread = np.sqrt(total(off * off) / count)
        slope = total(off * apart) / total(apart * apart)
    slope[~np.isfinite(slope)] = np.nan
    columns = (
        count,
        first_values(values, series.offsets),
        np.fmin.reduceat(values, starts),
        np.fmax.reduceat(values, starts),
        mean,
        spread,
        slope,
        np.fmin.reduceat(times, starts),
        np.fmax.reduceat(times, starts),
        last_values(series),
    )
    return np.hstack(columns)


def first_values(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the first known value of each feature [n, F], NaN if there is none.

    Args:
        values: Of all series [R, F], NaN where missing.
        offsets: Where the series begin and end [n + 1].
    """
    rows = np.where(np.isnan(values), len(values), np.arange(len(values))[:, None])
    first = np.minimum.reduceat(rows, offsets[:-1])
    known = np.take_along_axis(values, np.minimum(first, len(values) - 1), axis=0)
    return np.where(first < len(values), known, np.nan)


def last_values(series: IrregularSeries) -> np.ndarray:
    """Return [n, F]: last known values of features, NaN if there are none, and static features."""
    row = np.where(np.isnan(series.values), -1, np.arange(len(series.values))[:, None])
    latest = np.maximum.accumulate(row, axis=0)[series.offsets[1:] - 1]
    # A value of the series before is not this one's.
    is_own = (latest >= series.offsets[:-1, None]) & (series.lengths[:, None] > 0)
    known = np.take_along_axis(series.values, np.maximum(latest, 0), axis=0)
    found = np.where(is_own, known, np.float32(np.nan))
    return found if series.static is None else np.hstack((found, series.static))


def choose(
    features: np.ndarray, labels: np.ndarray, seed: int, max_trees: int
) -> tuple[dict[str, Any], int, float]:
    """Return settings, number of trees and AUROC of the best candidate in cross-validation.

    Args:
        features: Of the training series [n, P].
        labels: Their classes [n], 0 or 1.
        seed: Decides the folds and the features that trees see.
        max_trees: Most trees.
    """
    folds = StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=seed)
    best: tuple[dict[str, Any], int, float] | None = None
    for candidate in CANDIDATES:
        curves = np.zeros((NUM_FOLDS, max_trees))
        for number, (train, held) in enumerate(folds.split(features, labels)):
            model = boosting(candidate, seed, max_trees).fit(features[train], labels[train])
            stages = model.staged_predict_proba(features[held])
            curves[number] = [roc_auc_score(labels[held], stage[:, 1]) for stage in stages]
        curve = curves.mean(axis=0)
        if best is None or curve.max() > best[2]:
            best = candidate, int(curve.argmax()) + 1, float(curve.max())
    assert best is not None
    return best


def boosting(candidate: dict[str, Any], seed: int, trees: int) -> HistGradientBoostingClassifier:
    """Return a model that is not fitted, without early stopping of its own."""
    return HistGradientBoostingClassifier(
        **candidate, max_iter=trees, early_stopping=False, random_state=seed
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(argv)
    layout = Layout(
        id=options.id,
        time=options.time,
        label=options.target,
        static=tuple(options.static.split(",")) if options.static else (),
    )
    train, test = (read_parquet(path, layout) for path in (options.train, options.test))
    classes, labels = np.unique(np.asarray(train.labels), return_inverse=True)
    if len(classes) != 2:
        raise SystemExit(f"{options.target} must have two classes; {options.train} has {classes}")
    features = summaries(train)
    is_used = (~np.isnan(features)).sum(axis=0) >= FEWEST_KNOWN
    features = features[:, is_used]
    candidate, trees, auroc = choose(features, labels, options.seed, options.max_trees)
    model = boosting(candidate, options.seed, trees).fit(features, labels)
    chance = model.predict_proba(summaries(test)[:, is_used])
    columns = {options.id: test.ids, "prediction": classes[chance.argmax(axis=1)]}
    columns |= {f"probability_{name}": chance[:, k] for k, name in enumerate(classes.tolist())}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), options.output)
    found = {"num_epochs": trees, "settings": candidate, "validation": {"auroc": auroc}}
    options.metrics.parent.mkdir(parents=True, exist_ok=True)
    options.metrics.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(f"{trees} trees, {candidate}, AUROC {auroc:.4f} in cross-validation")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    found.add_argument("train", type=Path, help="table to train on, Parquet")
    found.add_argument("test", type=Path, help="table to predict")
    found.add_argument("--id", required=True, help="column of ids")
    found.add_argument("--time", required=True, help="column of times")
    found.add_argument("--target", required=True, help="column of classes")
    found.add_argument("--static", default="", help="static columns, with commas")
    found.add_argument("--seed", type=int, default=0, help="decides folds and trees")
    found.add_argument("--max-trees", type=int, default=300, help="most trees")
    found.add_argument("-o", "--output", type=Path, required=True, help="predictions, .parquet")
    found.add_argument("--metrics", type=Path, required=True, help="what was chosen, JSON")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
