"""`osciformer demo`: from real clinical data to honest scores, in about a minute on a CPU."""

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

from osciformer._files import replacing, write_json
from osciformer._optional import need
from osciformer.cli import fit, pictures, predict, tables
from osciformer.cli.evaluate import bootstrap, class_scores
from osciformer.cli.runs import hold

if TYPE_CHECKING:
    from osciformer.data import IrregularSeries

TRAIN, TEST, ATTRIBUTION = "stays-train.parquet", "stays-test.parquet", "ATTRIBUTION.txt"
SCORES, CURVES, REPORT = "test_metrics.json", "curves.png", "report.html"
# One block and few epochs: the demo is to end in two minutes on a CPU.
SETTINGS: dict[str, Any] = {
    **{"task": "classification", "id": "record_id", "time": "minute"},
    "target": ("in_hospital_death",),
    "static": ("Age", "Gender", "Height", "ICUType", "AdmissionWeight"),
    **{"num_layers": 1, "batch_size": 32, "learning_rate": 4e-3},
}
# What the trees see, and slow learning in small trees, which suits tables of this size.
SUMMARIES = ("summary", "observation", "static")
BOOSTING: dict[str, Any] = {
    **{"learning_rate": 0.05, "max_leaf_nodes": 8, "max_features": 0.3, "max_iter": 200},
    "early_stopping": False,
}
NUM_LINES = 5  # of the explanation
_OUTPUT = Option("--output", "-o", help="Folder to write; another demo is replaced.")
INTRODUCTION = """\
Stays in intensive care, of the PhysioNet 2012 challenge (ODC-By 1.0; Silva et al. 2012, Goldberger
et al. 2000): 37 measurements at irregular minutes of the first two days. Will the patient die in
hospital? {train} stays to learn from, {test} others to test. First each stay drives a bank of
resonators, and a regression reads what they do; then a small network is trained, and both join."""
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
    """Train a mortality classifier on real clinical data, and compare it with boosting."""
    import torch

    from osciformer.cli.report import write_report
    from osciformer.data import read_parquet

    need("matplotlib.figure", extra="plot")  # asked for here, not after the training
    started = time.perf_counter()
    source = files("osciformer") / "demo_data"
    given = {**SETTINGS, "max_epochs": epochs, "seed": seed, "table": str(source / TRAIN)}
    layout = tables.make_layout(given, given["task"], Path(TRAIN))
    train, test = (read_parquet(Path(str(source / name)), layout)[:size] for name in (TRAIN, TEST))
    typer.echo(INTRODUCTION.format(train=len(train), test=len(test)))
    facts = {"table": TRAIN, "series": len(train), "features": train.feature_names}
    job = fit.Job(train, layout, facts)
    # More threads make so small a model no faster, and on a busy machine slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with hold(output, is_resuming=False, is_overwriting=True) as run:
            shown = {"run_dir": run.work, "verbose": fit.verbosity("auto")}
            estimator = fit.make_estimator(given, job, **shown)
            fit.train(estimator, job, given, run)
            run.record(TRAIN, TEST, ATTRIBUTION, SCORES, CURVES, REPORT)
            for name in (TRAIN, TEST, ATTRIBUTION):
                with replacing(output / name) as part:
                    shutil.copyfile(str(source / name), part)
            _compare(estimator, train, test, output, seed)
            model = predict.Model(estimator, estimator.task, given, {"time": given["time"]})
            write_report(model, output / REPORT, test, test.labels)
        _explain(estimator.resonator_)
    finally:
        torch.set_num_threads(threads)
    typer.echo(f"{time.perf_counter() - started:.0f} s in all; picture: {output / CURVES}")
    typer.echo(f"what the model looks at, to open in a browser: {output / REPORT}\n")
    typer.echo(NEXT.format(run=output, train=TRAIN, test=TEST))


def _compare(estimator: Any, train: Any, test: Any, output: Path, seed: int) -> None:
    """Print, write and draw the scores of both models and of boosting, and a difference."""
    chances = {"OsciFormer": estimator.predict_proba(test)[:, 1]}
    chances["resonators alone"] = estimator.resonator_.predict_proba(test)[:, 1]
    chances["boosting on summaries"] = _boosting_chances(train, test, seed)
    labels = test.labels

    def score(name: str, index: np.ndarray) -> dict[str, float]:
        chance = chances[name][index]
        return class_scores(np.stack((1.0 - chance, chance), axis=1), labels[index])

    def differences(index: np.ndarray) -> dict[str, float]:
        first, second = (score(name, index) for name in ("OsciFormer", "boosting on summaries"))
        return {name: first[name] - second[name] for name in first}

    parts: dict[str, Any] = {name: partial(score, name) for name in chances}
    parts["OsciFormer less boosting"] = differences
    sample = partial(bootstrap, count=len(labels), rounds=1000, seed=seed)
    scores = {name: sample(part) for name, part in parts.items()}
    tables.print_table(
        f"{len(test)} stays not seen in training, {int(labels.sum())} deaths; 95 % intervals",
        ("model", "AUROC", "AUPRC"),
        [(name, f"{one['auroc']:.3f}", f"{one['auprc']:.3f}") for name, one in scores.items()],
    )
    content = {name: {k: v._asdict() for k, v in one.items()} for name, one in scores.items()}
    write_json(output / SCORES, content)
    pictures.draw_classes(labels == 1, chances, output / CURVES)


def _explain(resonators: Any) -> None:
    """Print which variables and periods the resonators look at."""
    tables.print_table(
        "What speaks most for (+) or against (-) death, to the resonators; periods in minutes",
        ("feature", "change of log-odds by one standard deviation"),
        [(row["feature"], f"{row['weight']:+.2f}") for row in resonators.explain(top=NUM_LINES)],
    )


def _boosting_chances(train: IrregularSeries, test: IrregularSeries, seed: int) -> np.ndarray:
    """Return the chance of the second class, by gradient boosting on summaries."""
    from osciformer.resonators import ResonatorFeatures

    features = ResonatorFeatures(families=SUMMARIES, random_state=seed).fit(train)
    make = need("sklearn.ensemble", extra="train").HistGradientBoostingClassifier
    model = make(**BOOSTING, random_state=seed).fit(features.transform(train), train.labels)
    chance: np.ndarray = model.predict_proba(features.transform(test))
    return chance[:, 1]
