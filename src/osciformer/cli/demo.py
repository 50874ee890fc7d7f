"""`osciformer demo`: from real clinical data to honest scores, in a minute or two on a CPU."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from osciformer._optional import need
from osciformer.cli import pictures, tables, training
from osciformer.cli.config import estimator_arguments
from osciformer.cli.output import print_table, write_json
from osciformer.cli.run_folder import RunFolder
from osciformer.cli.scoring import bootstrap, class_scores

DATA = "demo_data"
TRAIN, TEST, ATTRIBUTION = "stays-train.parquet", "stays-test.parquet", "ATTRIBUTION.txt"
# One block and few epochs: the demo is to end in two minutes on a CPU.
SETTINGS: dict[str, Any] = {
    "task": "classification",
    "id": "record_id",
    "time": "minute",
    "target": ("in_hospital_death",),
    "static": ("Age", "Gender", "Height", "ICUType", "AdmissionWeight"),
    "num_layers": 1,
    "batch_size": 32,
    "learning_rate": 4e-3,
}
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
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write; another demo is replaced.")
    ] = Path("outputs/demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 8,
    seed: Annotated[int, typer.Option(help="Decides all that is random.")] = 0,
    size: Annotated[int | None, typer.Option(hidden=True, help="Stays of each table.")] = None,
) -> None:
    """Train a mortality classifier on real clinical data, and compare it with a baseline."""
    from osciformer.data import read_parquet

    need("matplotlib.figure", extra="plot")  # asked for here, not after the training
    started = time.perf_counter()
    given = {
        **SETTINGS,
        "max_epochs": epochs,
        "seed": seed,
        "table": str(files("osciformer") / DATA / TRAIN),
    }
    folder = RunFolder(output, is_overwriting=True, is_resuming=False)
    source = files("osciformer") / DATA
    layout = tables.make_layout(given, given["task"], Path(TRAIN))
    train, test = (read_parquet(Path(str(source / name)), layout)[:size] for name in (TRAIN, TEST))
    typer.echo(INTRODUCTION.format(train=len(train), test=len(test)))
    estimator = training.estimator_class(given["task"])(
        **estimator_arguments(given),
        layout=layout,
        run_dir=output,
        verbose=training.verbosity("auto"),
    )
    with _one_thread():
        training.train(
            estimator,
            folder,
            train,
            settings=given,
            facts={"table": TRAIN, "series": len(train), "features": train.feature_names},
        )
        for name in (TRAIN, TEST, ATTRIBUTION):
            shutil.copyfile(str(source / name), output / name)
        _compare(estimator, train, test, output, seed)
    typer.echo(f"{time.perf_counter() - started:.0f} s in all; picture: {output / 'curves.png'}\n")
    typer.echo(NEXT.format(run=output, train=TRAIN, test=TEST))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: more make so small a model no faster.

    And where other programs keep a core busy, threads that wait for each other at every step take
    many times as long.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compare(estimator: Any, train: Any, test: Any, output: Path, seed: int) -> None:
    from osciformer.cli.baseline import logistic_chances

    chances = {
        "OsciFormer": estimator.predict_proba(test)[:, 1],
        "logistic regression on last values": logistic_chances(train, test, seed),
    }
    first, second = (np.stack((1.0 - c, c), axis=1) for c in chances.values())
    labels = test.labels

    def scores_of(chance: np.ndarray, index: np.ndarray) -> dict[str, float]:
        return class_scores(chance[index], labels[index])

    def differences(index: np.ndarray) -> dict[str, float]:
        one, two = scores_of(first, index), scores_of(second, index)
        return {name: one[name] - two[name] for name in one}

    parts = (partial(scores_of, first), partial(scores_of, second), differences)
    found = [bootstrap(part, len(labels), rounds=1000, seed=seed) for part in parts]
    scores = dict(zip((*chances, "difference"), found, strict=True))
    print_table(
        f"{len(test)} stays not seen in training, {int(labels.sum())} deaths; 95 % intervals",
        ("model", "AUROC", "AUPRC"),
        [(name, str(item["auroc"]), str(item["auprc"])) for name, item in scores.items()],
    )
    content = {name: {k: vars(v) for k, v in item.items()} for name, item in scores.items()}
    write_json(output / "test_metrics.json", content)
    pictures.draw_classes(labels == 1, chances, output / "curves.png")
