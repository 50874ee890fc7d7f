"""`osciformer demo`: from real clinical data to honest scores, in a minute or two on a CPU."""

from __future__ import annotations

import shutil
import time
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from typer import Option

from osciformer._files import write_json
from osciformer._optional import need
from osciformer.cli import fit, pictures, tables
from osciformer.cli.evaluate import bootstrap, class_scores

if TYPE_CHECKING:
    from osciformer.data import IrregularSeries

TRAIN, TEST, ATTRIBUTION = "stays-train.parquet", "stays-test.parquet", "ATTRIBUTION.txt"
# One block and few epochs: the demo is to end in two minutes on a CPU.
SETTINGS: dict[str, Any] = {
    **{"task": "classification", "id": "record_id", "time": "minute"},
    "target": ("in_hospital_death",),
    "static": ("Age", "Gender", "Height", "ICUType", "AdmissionWeight"),
    **{"num_layers": 1, "batch_size": 32, "learning_rate": 4e-3},
}
_OUTPUT = Option("--output", "-o", help="Folder to write; another demo is replaced.")
INTRODUCTION = """\
Stays in intensive care, of the PhysioNet 2012 challenge (ODC-By 1.0; Silva et al. 2012, Goldberger
et al. 2000): 37 measurements at irregular minutes of the first two days. Will the patient die in
hospital? A small model is trained on {train} stays and tested on {test} others."""
NEXT = """\
What to do next
  osciformer predict {run} {run}/{test} -o predictions.csv
  osciformer evaluate {run} {run}/{test}
  osciformer fit {run}/{train} --config {run}/config.yaml --max-epochs 15 --num-layers 2 -o run/
  osciformer fit --help   for tables of your own: CSV or Parquet, one row per observation"""


def demo(
    output: Annotated[Path, _OUTPUT] = Path("outputs/demo"),
    epochs: Annotated[int, Option(min=1, help="Passes over the data.")] = 8,
    seed: Annotated[int, Option(help="Decides all that is random.")] = 0,
    size: Annotated[int | None, Option(hidden=True, help="Stays of each table.")] = None,
) -> None:
    """Train a mortality classifier on real clinical data, and compare it with a baseline."""
    import torch

    from osciformer.data import read_parquet

    need("matplotlib.figure", extra="plot")  # asked for here, not after the training
    started = time.perf_counter()
    source = files("osciformer") / "demo_data"
    given = {**SETTINGS, "max_epochs": epochs, "seed": seed, "table": str(source / TRAIN)}
    fit.refuse_occupied(output, is_overwriting=True)
    layout = tables.make_layout(given, given["task"], Path(TRAIN))
    train, test = (read_parquet(Path(str(source / name)), layout)[:size] for name in (TRAIN, TEST))
    typer.echo(INTRODUCTION.format(train=len(train), test=len(test)))
    facts = {"table": TRAIN, "series": len(train), "features": train.feature_names}
    job = fit.Job(train, layout, facts)
    estimator = fit.make_estimator(given, job, run_dir=output, verbose=fit.verbosity("auto"))
    # More threads make so small a model no faster, and on a busy machine slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fit.train(estimator, job, given, output)
        for name in (TRAIN, TEST, ATTRIBUTION):
            shutil.copyfile(str(source / name), output / name)
        _compare(estimator, train, test, output, seed)
    finally:
        torch.set_num_threads(threads)
    typer.echo(f"{time.perf_counter() - started:.0f} s in all; picture: {output / 'curves.png'}\n")
    typer.echo(NEXT.format(run=output, train=TRAIN, test=TEST))


def _compare(estimator: Any, train: Any, test: Any, output: Path, seed: int) -> None:
    """Print, write and draw the scores of the model, of the baseline, and their difference."""
    chances = {"OsciFormer": estimator.predict_proba(test)[:, 1]}
    chances["logistic regression on last values"] = _logistic_chances(train, test, seed)
    labels = test.labels

    def score(name: str, index: np.ndarray) -> dict[str, float]:
        chance = chances[name][index]
        return class_scores(np.stack((1.0 - chance, chance), axis=1), labels[index])

    def differences(index: np.ndarray) -> dict[str, float]:
        first, second = (score(name, index) for name in chances)
        return {name: first[name] - second[name] for name in first}

    parts = {name: partial(score, name) for name in chances} | {"difference": differences}
    sample = partial(bootstrap, count=len(labels), rounds=1000, seed=seed)
    scores = {name: sample(part) for name, part in parts.items()}
    tables.print_table(
        f"{len(test)} stays not seen in training, {int(labels.sum())} deaths; 95 % intervals",
        ("model", "AUROC", "AUPRC"),
        [(name, f"{one['auroc']:.3f}", f"{one['auprc']:.3f}") for name, one in scores.items()],
    )
    content = {name: {k: v._asdict() for k, v in one.items()} for name, one in scores.items()}
    write_json(output / "test_metrics.json", content)
    pictures.draw_classes(labels == 1, chances, output / "curves.png")


def last_values(series: IrregularSeries) -> np.ndarray:
    """Return [n, F]: last known values of features, NaN if there are none, and static features."""
    row = np.where(np.isnan(series.values), -1, np.arange(len(series.values))[:, None])
    latest = np.maximum.accumulate(row, axis=0)[series.offsets[1:] - 1]
    # A value of the series before is not this one's.
    is_own = (latest >= series.offsets[:-1, None]) & (series.lengths[:, None] > 0)
    known = np.take_along_axis(series.values, np.maximum(latest, 0), axis=0)
    found = np.where(is_own, known, np.float32(np.nan))
    return found if series.static is None else np.hstack((found, series.static))


def _logistic_chances(train: IrregularSeries, test: IrregularSeries, seed: int) -> np.ndarray:
    """Return the chance of the second class, by logistic regression on last values."""
    find = partial(need, extra="train")
    selection, impute = find("sklearn.model_selection"), find("sklearn.impute").SimpleImputer
    pipeline = find("sklearn.pipeline").make_pipeline(
        impute(strategy="median", add_indicator=True, keep_empty_features=True),
        find("sklearn.preprocessing").StandardScaler(),
        find("sklearn.linear_model").LogisticRegression(max_iter=2000),
    )
    folds = selection.StratifiedKFold(5, shuffle=True, random_state=seed)
    penalties = {"logisticregression__C": (0.001, 0.01, 0.1, 1.0)}  # inverse strengths
    search = selection.GridSearchCV(pipeline, penalties, scoring="roc_auc", cv=folds)
    search.fit(last_values(train), train.labels)
    chance: np.ndarray = search.predict_proba(last_values(test))
    return chance[:, 1]
