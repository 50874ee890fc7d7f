"""Cells of the table: a data set, a model and a fold or seed; each has a file of its own."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from osciformer.bench.events.datasets import TASKS, EventTask, Parts, describe_parts
from osciformer.bench.events.models import CLASSICAL, BenchModel, FitRequest
from osciformer.bench.events.neural import (
    ROWS,
    TrainingSettings,
    chosen_rate,
    neural_model,
    seconds_per_epoch,
)
from osciformer.bench.report import describe_run
from osciformer.events import EventProcess, log_likelihood, score

Row = dict[str, Any]
#: All models in the order of the table.
MODELS: dict[str, BenchModel] = {
    **{model.name: model for model in CLASSICAL},
    **{name: neural_model(name) for name in ROWS},
}
# Of integrals. Those of networks cost much; the error of their likelihood is reported.
_CLOSELY: dict[str, Any] = {"prediction_tolerance": 1e-4}
_ROUGHLY: dict[str, Any] = {"tolerance": 5e-4, "max_halvings": 4, "prediction_tolerance": 1e-3}
# Events of a batch that is scored; some encoders have a state for each pair of them.
_EVENTS_AT_ONCE = 1024
# How long an epoch of a model takes, roughly, beside that of RMTPP, and a fit of a classical one.
_COST = {
    "osciformer": 4.0,
    "rmtpp": 1.0,
    "neural_hawkes": 10.0,
    "transformer_hawkes": 1.5,
    "ode_rnn": 12.0,
    "mtan": 3.0,
    "contiformer": 12.0,
    "hawkes": 0.5,
}


@dataclass(frozen=True)
class Cell:
    """One cell: which data set, which model, which fold or seed.

    Attributes:
        dataset: Name of a task.
        model: Name of a model.
        repeat: Fold or seed.
    """

    dataset: str
    model: str
    repeat: int

    @property
    def task(self) -> EventTask:
        """The data set."""
        return TASKS[self.dataset]

    def path(self, folder: Path) -> Path:
        """Return the file of the cell."""
        return folder / f"{self.dataset}--{self.model}--{self.task.repeat}{self.repeat}.json"


def find_model(name: str) -> BenchModel:
    """Return a model by its name; `encoder+head` for a pair that has no row of its own."""
    return MODELS[name] if name in MODELS else neural_model(name)


def make_cells(
    datasets: Sequence[str], models: Sequence[str], repeats: dict[str, Sequence[int]]
) -> list[Cell]:
    """Return the cells of a table, those that take longest first.

    A model that is not random has one cell where only seeds differ, one that is about types none
    where there is one type. The true process has cells where it is known.

    Args:
        datasets: Names of tasks.
        models: Names of models.
        repeats: Folds and seeds to run, by `fold` and `seed`.
    """
    cells = []
    for dataset in datasets:
        task = TASKS[dataset]
        for name in models:
            model = find_model(name)
            if model.kind == "truth" and task.truth is None:
                continue
            if model.is_about_types and task.num_types == 1:
                continue
            numbers = [number for number in repeats[task.repeat] if number in task.repeats]
            if task.repeat == "seed" and not model.is_random:
                numbers = numbers[:1]
            cells += [Cell(dataset, name, number) for number in numbers]
    return sorted(cells, key=lambda cell: (not _is_pilot(cell, repeats), -_cost(cell)))


def _cost(cell: Cell) -> float:
    # Events of a training set and how often it is passed over, in thousands.
    sizes = {"stackoverflow": 45 * 184, "taobao": 96 * 75, "hawkes": 63 * 108, "taxi": 91 * 52}
    size = sizes.get(cell.dataset, 200 * 10)
    encoder = ROWS[cell.model].encoder if cell.model in ROWS else cell.model.partition("+")[0]
    return size * _COST.get(encoder, 0.01)


def _is_pilot(cell: Cell, repeats: dict[str, Sequence[int]]) -> bool:
    """Return whether a cell chooses the learning rate for the other seeds of its kind."""
    return needs_pilot(cell) and cell.repeat == repeats["seed"][0]


def needs_pilot(cell: Cell) -> bool:
    """Return whether one seed chooses the learning rate of all.

    Folds choose for themselves: the dev part of one may be in the test part of another.
    """
    return cell.task.repeat == "seed" and find_model(cell.model).is_random


def run_cell(job: dict[str, Any], settings: dict[str, Any]) -> Row:
    """Fit and score a model; this is what a worker does.

    Args:
        job: `dataset`, `model` and `repeat`; with `is_timing`, an epoch is timed and no more.
        settings: `training`, arguments of `TrainingSettings`; `folder` of the cells; `pilot`, the
            seed that chooses the learning rate; `with_predictions`, whether more than the
            likelihood is scored, as it is if not given.
    """
    cell = Cell(job["dataset"], job["model"], job["repeat"])
    training = TrainingSettings(**settings["training"])
    parts = cell.task.load(cell.repeat)
    model = find_model(cell.model)
    if job.get("is_timing"):
        return {**seconds_per_epoch(cell.model, parts.train, training), "device": training.device}
    rates = None
    if needs_pilot(cell) and cell.repeat != settings["pilot"]:
        pilot = Cell(cell.dataset, cell.model, settings["pilot"])
        rate = chosen_rate(pilot.path(Path(settings["folder"])))
        rates = None if rate is None else (rate,)
    fitted = model.fit(
        FitRequest(cell.task, parts.train, parts.dev, cell.repeat, training, learning_rates=rates)
    )
    began = time.perf_counter()
    # Nothing has seen the test part before.
    scores = _score(
        fitted.process,
        parts,
        tolerances=_ROUGHLY if model.kind == "neural" else _CLOSELY,
        with_predictions=settings.get("with_predictions", True),
    )
    if not math.isfinite(scores["ll_micro"]):
        raise FloatingPointError(f"the test log-likelihood is {scores['ll_micro']}")
    return {
        **scores,
        "dev_ll": fitted.dev_ll,
        "parameters": fitted.parameters,
        "chosen": dict(fitted.chosen),
        **fitted.training,
        "score_seconds": round(time.perf_counter() - began, 2),
        "device": str(fitted.process.device),
        "data": describe_parts(parts),
        "training": training.shared if model.kind == "neural" else None,
    }


def _score(
    process: EventProcess, parts: Parts, *, tolerances: dict[str, Any], with_predictions: bool
) -> Row:
    """Return the entries of a cell that say how good a model is on the test part."""
    batch_size = max(1, _EVENTS_AT_ONCE // int(parts.test.lengths.max()))
    names = ("accuracy", "accuracy_at_time", "time_rmse", "time_mae", "horizon", "never")
    if with_predictions:
        found = score(
            process,
            parts.test,
            horizon=float(parts.train.gaps.max()),
            expectation="restricted",
            **tolerances,
            batch_size=batch_size,
        )
        likelihood = found.log_likelihood
        more = {name: getattr(found, name) for name in names}
    else:
        of_likelihood = {k: v for k, v in tolerances.items() if k != "prediction_tolerance"}
        likelihood = log_likelihood(process, parts.test, **of_likelihood, batch_size=batch_size)
        more = dict.fromkeys(names)
    return {
        "ll_micro": likelihood.micro,
        "ll_macro": likelihood.macro,
        "ll_error": likelihood.error,
        **more,
        "num_scored": likelihood.num_scored,
    }


def describe_origin(command: str, device: str, commit: str | None) -> dict[str, Any]:
    """Return what the cells of a run were made with.

    Args:
        command: The command line.
        device: Where it ran.
        commit: Of the code, if it is known.
    """
    meta = describe_run(command, torch.device(device))
    for package in ("pytorch-lightning", "scikit-learn", "pyarrow"):
        try:
            meta[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            meta[package] = None
    return {**meta, "commit": commit}


def write_cell(cell: Cell, folder: Path, row: Row, origin: dict[str, Any]) -> None:
    """Write the file of a cell, as a whole or not at all."""
    content = {
        "dataset": cell.dataset,
        "model": cell.model,
        "repeat": cell.repeat,
        "error": None,
        **row,
        "origin": origin,
    }
    write_json(cell.path(folder), content)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, as a whole or not at all; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    text = json.dumps(_finite(content), indent=1, allow_nan=False)
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_cells(folder: Path) -> list[Row]:
    """Return the contents of all cells in a folder, failed ones among them."""
    rows = []
    for path in sorted(folder.glob("*--*--*.json")):
        try:
            rows.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON; delete it to run its cell again") from error
    return rows


def unfinished(cells: Iterable[Cell], folder: Path) -> list[Cell]:
    """Return the cells without a file, or whose file says that they failed."""
    done = {
        (row["dataset"], row["model"], row["repeat"])
        for row in read_cells(folder)
        if row["error"] is None
    }
    return [c for c in cells if (c.dataset, c.model, c.repeat) not in done]
