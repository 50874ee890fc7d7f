"""`osciformer inspect`: a page that shows what a trained model does and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from osciformer.cli import evaluate, predict, tables
from osciformer.cli.errors import CommandError, Misuse
from osciformer.cli.explain import SeriesOption, find_series
from osciformer.cli.runs import refuse_replacing
from osciformer.config import SERIES_TASKS

MOST_SERIES = 1000  # of the table that the page scores the model with
MOST_EXPLAINED = 6
_OUTPUT = Option("--output", "-o", help="File to write: .html.")


def inspect(
    run: predict.RunArgument,
    table: predict.TableArgument,
    *,
    output: Annotated[Path, _OUTPUT] = Path("report.html"),
    series: SeriesOption = None,
    target: Annotated[str | None, Option(help="Column of true labels, if another one.")] = None,
    labels: predict.LabelsOption = None,
    labels_id: predict.LabelsIdOption = None,
    stream: predict.StreamOption = None,
    accelerator: predict.AcceleratorOption = "auto",
) -> None:
    """Write a page that shows what a model does and why, to open in a browser.

    Training, scores, the periods that it has learned, and a few series explained: which
    observations drove a prediction, and what it would be without one of them. The page is one file
    and needs no network. It holds values and ids of the series that it explains.
    """
    from osciformer.cli.report import write_report

    started = time.perf_counter()
    tables.check_ending(output, (".html",))
    refuse_replacing(output, run, table, labels)
    model = predict.Model.load(run, table, labels, accelerator=accelerator)
    if model.task == "events":
        model.refuse(target=target, labels=labels, labels_id=labels_id, stream=stream)
        data, truth = model.open_events(table), None
    elif _has_labels(model, table, target, labels):
        data, truth = evaluate.open_labelled(model, table, target, labels, labels_id, stream)
    else:
        data, truth = model.open_series(table, labels, labels_id, stream, None), None
    if len(data) == 0:
        raise CommandError(f"{table} has no series to look at")
    chosen = None
    if series:
        if len(set(series)) > MOST_EXPLAINED:
            raise Misuse(f"--series may be given {MOST_EXPLAINED} times; got {len(set(series))}")
        chosen, _ = find_series(data, series)
    size = write_report(model, output, *_some(model, data, truth, chosen), chosen)
    seconds = time.perf_counter() - started
    typer.echo(f"{output}: {size / 1e6:.1f} MB, {seconds:.0f} s; open it in a browser")


def _has_labels(model: predict.Model, table: Path, target: str | None, labels: Path | None) -> bool:
    """Return whether the true labels are known: they need not be."""
    if model.task not in SERIES_TASKS or target or labels or tables.format_of(table) == "own":
        return True
    wanted = tables.label_of({**model.settings}, model.task)
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    return bool(names) and set(names) <= set(tables.column_names(table))


def _some(
    model: predict.Model, data: Any, truth: Any, chosen: Any
) -> tuple[Any, np.ndarray | None]:
    """Return series of the table in memory, the chosen ones among them, and their labels."""
    if model.task == "events":
        return data[:MOST_SERIES], None
    from osciformer.data.inputs import chunks, labels_of, take
    from osciformer.data.series import concatenate

    places = np.random.default_rng(0).permutation(len(data))[:MOST_SERIES]
    if chosen is not None:
        places = np.append(places, np.flatnonzero(np.isin(data.ids, chosen.ids)))
    places = np.unique(places)
    if model.task not in SERIES_TASKS:
        truth = None  # labels that the file has are not what is predicted
    elif truth is None and getattr(data, "labels", None) is not None:
        truth = labels_of(data)
    some = concatenate(list(chunks(take(data, places))))
    return some.replace(labels=None, static_names=some.static_names), (
        None if truth is None else np.asarray(truth)[places]
    )
