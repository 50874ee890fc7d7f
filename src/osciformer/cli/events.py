"""Tables of events for `fit`, `predict` and `evaluate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from osciformer.cli import event_pictures, pictures, run_folder, tables, training
from osciformer.cli.config import estimator_arguments
from osciformer.cli.errors import MISUSED, CommandError
from osciformer.cli.output import TableWriter, print_scores, replacing, to_json, write_json
from osciformer.cli.progress import progress
from osciformer.cli.scoring import bootstrap
from osciformer.cli.settings import SETTINGS

if TYPE_CHECKING:
    from osciformer.events import EventSequences

ESTIMATOR = "OsciFormerEventPredictor"
_LAYOUT = ("id", "time", "type", "start", "end", "unit", "origin", "time_format", "time_unit")
# Sequences that are predicted at a time.
_CHUNK = 256


def make_layout(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return which column means what, as arguments of `events_from_frame`."""
    if tables.is_self_describing(path):
        raise CommandError(
            f"{path} holds series; events are read from CSV or Parquet, with a row per event",
            MISUSED,
        )
    for name in ("id", "time"):
        if given.get(name) is None:
            raise CommandError(f"--{name} is needed: the column of {path} that holds it", MISUSED)
    if "type" not in given:
        raise CommandError(
            f"--type is needed: the column of {path} that holds the types of events, or none if "
            "all are of one type",
            MISUSED,
        )
    names = (*_LAYOUT, "num_types", "duplicates")
    return {n: given[n] for n in names if given.get(n) is not None} | {"type": given["type"]}


def read_events(
    path: Path, layout: Mapping[str, Any], type_names: Sequence[str] | None = None
) -> EventSequences:
    """Return the sequences of a CSV file, a Parquet file or a folder of such.

    Args:
        path: The file or folder.
        layout: Arguments of `events_from_frame`.
        type_names: The types that there may be; those that there are if not given.
    """
    from osciformer.events import events_from_frame, events_from_parquet

    tables.refuse_absent(path)
    settings = dict(layout)
    if type_names is not None and settings["type"] is not None:
        settings |= {"type_names": tuple(type_names), "num_types": len(type_names)}
    if tables.is_parquet(path):
        return events_from_parquet(path, **settings)
    return events_from_frame(tables.read_frame(path), **settings)


def fit_events(
    given: Mapping[str, Any], folder: run_folder.RunFolder, *, resume: bool, verbose: int
) -> None:
    """Train on a table of events, and write the run folder.

    Args:
        given: All settings that were given.
        folder: The run folder.
        resume: Whether to go on with the run in it.
        verbose: Kind of progress report.
    """
    path = Path(given["table"])
    layout = make_layout(given, path)
    training.check_device(given)
    events = read_events(path, layout)
    if run_folder.is_first_process():
        typer.echo(f"{path}: {events!r}", err=True)
    watched = None
    if given.get("validation"):
        watched = read_events(Path(given["validation"]), layout, events.type_names)
    estimator = training.estimator_class("events")(
        **estimator_arguments(given),
        layout=layout,
        run_dir=folder.path,
        resume=resume,
        verbose=verbose,
    )
    metrics = training.train(
        estimator,
        folder,
        events,
        settings={"task": "events", "seed": SETTINGS["seed"].default, **given},
        facts={
            "table": given["table"],
            "series": len(events),
            "events": len(events.times),
            "types": events.type_names,
        },
        validation_data=watched,
    )
    if run_folder.is_first_process():
        index: Any = estimator.validation_index_  # type: ignore[attr-defined]
        kept: EventSequences = events[index]
        shown = watched if watched is not None else kept if len(kept) else events
        event_pictures.draw_run(estimator, shown, folder.path)
        training.print_validation(metrics, folder.path)


def is_event_model(run: Path, table: Path) -> bool:
    """Return whether a run folder or model file holds a model of events.

    Args:
        run: Run folder, or model file.
        table: The table to ask it about; both are refused if they are not there.
    """
    model = run_folder.find_model(run)
    tables.refuse_absent(table)
    from osciformer.saving import read_header  # after what needs no torch

    content = read_header(model)["content"]
    return bool(content.get("estimator") == ESTIMATOR)


def open_event_run(run: Path, table: Path, *, accelerator: str) -> tuple[Any, EventSequences]:
    """Return the estimator of a run, and the sequences of a table read as in training."""
    training.check_device({"accelerator": accelerator})
    from osciformer.estimators import load_estimator

    estimator: Any = load_estimator(run_folder.find_model(run))
    estimator.accelerator = accelerator
    if estimator.layout is None:
        raise CommandError(
            f"the model in {run} was not trained on a table, so that the columns of {table} mean "
            "nothing to it; use it from Python, or fit it with layout=dict(id=..., time=...)"
        )
    layout = {"type": "type", **estimator.layout}
    return estimator, read_events(table, layout, estimator.type_names_)


def predict_events(run: Path, table: Path, output: Path, *, accelerator: str) -> None:
    """Write the next event of each sequence of a table.

    Args:
        run: Run folder, or model file.
        table: The table.
        output: The table to write.
        accelerator: Where to compute.
    """
    estimator, events = open_event_run(run, table, accelerator=accelerator)
    id = dict(estimator.layout).get("id", "id")
    with replacing(output) as part, TableWriter(part) as writer:
        for chunk in progress(_chunks(events), len(events)):
            writer.write(estimator.predict(chunk).columns(id=id))
    typer.echo(f"{output}: {len(events)} rows, one per sequence; gaps in {estimator.time_unit_}")


def evaluate_events(
    run: Path,
    table: Path,
    *,
    rounds: int,
    seed: int,
    json: bool,
    output: Path | None,
    picture: Path | None,
    accelerator: str,
) -> None:
    """Score a trained model on the events of a table; arguments as of `evaluate`."""
    estimator, events = open_event_run(run, table, accelerator=accelerator)
    if not (events.lengths > 1).any():
        raise CommandError(f"{table} has nothing to score: no sequence has a second event")
    found = estimator.evaluate_sequences(events)
    scores = bootstrap(found.means, len(events), rounds=rounds, seed=seed)
    calibration = estimator.calibration(events)
    if picture is not None:
        pictures.save_figure(event_pictures.calibration_figure(calibration), picture)
    likelihood = found.log_likelihood
    content = {
        "task": "events",
        "series": len(events),
        "events": likelihood.num_scored,
        "time_unit": likelihood.time_unit,
        "quadrature_error": likelihood.error,
        "horizon": found.horizon,
        "bootstrap": rounds,
        "metrics": {name: asdict(interval) for name, interval in scores.items()},
        "calibration": {"statistic": calibration.statistic, "p_value": calibration.p_value},
    }
    if output is not None:
        write_json(output, content)
    if json:
        typer.echo(to_json(content))
        return
    title = f"Events, {len(events)} sequences, {likelihood.num_scored} scored events"
    print_scores(title, scores)
    typer.echo(
        f"log-likelihoods in nats per event, times in {likelihood.time_unit}; quadrature error "
        f"{likelihood.error:.1e}\ntime rescaling: KS distance {calibration.statistic:.4f}, p = "
        f"{calibration.p_value:.3g}"
    )


def _chunks(events: EventSequences) -> Iterator[EventSequences]:
    for first in range(0, len(events), _CHUNK):
        yield events[first : first + _CHUNK]
