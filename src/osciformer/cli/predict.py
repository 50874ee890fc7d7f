"""`osciformer predict`: predictions for the series or events of a table, written as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from typer import Argument, Option

from osciformer._text import printable
from osciformer.cli import tables
from osciformer.cli.errors import CommandError, Misuse
from osciformer.cli.fit import check_device, find_model
from osciformer.cli.runs import located, refuse_replacing
from osciformer.cli.settings import CONFIG, read_config
from osciformer.config import QUERY_TASKS

RunArgument = Annotated[Path, Argument(help="Run folder, or model file.")]
TableArgument = Annotated[Path, Argument(help="Table with the columns of training.")]
StreamOption = Annotated[bool | None, Option(help="Read Parquet part by part.")]
AcceleratorOption = Annotated[str, Option(help="auto, cpu or gpu.")]
LabelsOption = Annotated[Path | None, Option(help="Table with labels or static columns, by id.")]
LabelsIdOption = Annotated[str | None, Option(help="Its column of ids.")]
_SAFE = "Put ' before text that begins with = + - @, a formula to spreadsheets."
_COVERAGE = "Add intervals, or sets of classes, that hold the truth with this chance, such as 0.9."
NUM_STEPS = 10  # forecasts per series if nothing is said about their times
CHUNK_SEQUENCES = 256  # sequences of events that are predicted at a time
Columns = dict[str, np.ndarray]
Parts = Iterator[tuple[Columns, Columns]]  # what rows are about, and what is predicted for them
TimesOf = Callable[[np.ndarray], list[np.ndarray]]  # times to predict at for series of some ids


def predict(
    run: RunArgument,
    table: TableArgument,
    *,
    output: Annotated[Path, Option("--output", "-o", help="File to write: .parquet or .csv.")],
    times: Annotated[Path | None, Option(help="Table of times, by id or for all.")] = None,
    horizon: Annotated[float | None, Option(help="How far ahead of each series' end.")] = None,
    every: Annotated[float | None, Option(help="And at these steps on the way.")] = None,
    quantiles: Annotated[bool, Option("--quantiles", help="Write all quantiles.")] = False,
    coverage: Annotated[float | None, Option(help=_COVERAGE)] = None,
    safe_csv: Annotated[bool, Option("--safe-csv", help=_SAFE)] = False,
    labels: LabelsOption = None,
    labels_id: LabelsIdOption = None,
    stream: StreamOption = None,
    accelerator: AcceleratorOption = "auto",
) -> None:
    """Predict for each series of a table.

    Classification writes the class and the probability of each class; regression the value;
    forecasting and imputation a row for each series, time and variable; events the next event of
    each sequence, its time and type. With --coverage there are the columns lower and upper, or
    in_set_CLASS, if the model was fitted with --calibration-fraction.
    """
    tables.check_ending(output, tables.TABLE_ENDINGS)
    refuse_replacing(output, run, table, times, labels)
    if safe_csv and output.suffix.lower() != ".csv":
        raise Misuse(f"--safe-csv is for output to CSV, not to {output}; leave it out")
    model = Model.load(run, table, labels, accelerator=accelerator)
    at_times = {"times": times, "horizon": horizon, "every": every, "quantiles": quantiles or None}
    if model.task == "events":
        model.refuse(
            **at_times, coverage=coverage, labels=labels, labels_id=labels_id, stream=stream
        )
        chunks = tables.parts_of(model.open_events(table), CHUNK_SEQUENCES)
        parts: Parts = _next_events(model, chunks)
        summary = f", one per sequence; gaps in {model.estimator.time_unit_}"
    else:
        model.check_coverage(coverage)
        data = model.open_series(table, labels, labels_id, stream, None)
        summary = f" for {len(data)} series"
        if model.task in QUERY_TASKS:
            asked = _ask(model, data.ids, times, horizon, every)
            parts = _answers(model, data, *asked, is_full=quantiles, coverage=coverage)
        else:
            model.refuse(**at_times)
            parts = _labels(model, data, coverage)
    renamed: dict[str, str] = {}
    written: Iterator[Columns] = (tables.side_by_side(*part, renamed) for part in parts)
    written = map(tables.spreadsheet_safe, written) if safe_csv else written
    typer.echo(f"{output}: {tables.write_table(output, written)} rows{summary}")
    tell_renamed(renamed)


def tell_renamed(renamed: Mapping[str, str]) -> None:
    """Say which columns of the output have another name than usual."""
    for name, other in renamed.items():
        why = f"the table has a column {name!r}"
        typer.echo(printable(f"{why}, so that the predicted one is called {other!r}"), err=True)


class Model(NamedTuple):
    """A trained model and the run that it comes from."""

    estimator: Any
    task: str
    settings: Mapping[str, Any]  # what the run folder keeps; empty for a model file alone
    layout: Mapping[str, Any]  # which column means what; empty if it was not trained on a table

    @classmethod
    def load(cls, run: Path, *needed: Path | None, accelerator: str) -> Model:
        """Return the model of a run folder or a file, if the tables it is to read are there."""
        path = find_model(run)
        tables.refuse_absent(*needed)
        check_device({"accelerator": accelerator})
        from osciformer.estimators import load_estimator

        estimator = load_estimator(path)
        estimator.accelerator = accelerator
        settings = read_config(located(run, CONFIG).parent) if run.is_dir() else {}
        return cls(estimator, estimator.task, settings, dict(estimator.layout or {}))

    def refuse(self, **options: Any) -> None:
        """Refuse options that have a value, since none of them applies to the task."""
        if any(value is not None for value in options.values()):
            flags = [f"--{name.replace('_', '-')}" for name in options]
            raise Misuse(f"{', '.join(flags[:-1])} and {flags[-1]} do not apply to {self.task}")

    def check_coverage(self, coverage: float | None) -> None:
        """Refuse a coverage that the calibration of the model does not reach."""
        if coverage is None:
            return
        found = self.estimator.conformal_
        if found is None:
            raise CommandError(
                "--coverage needs a model that was fitted with --calibration-fraction, such as 0.2"
            )
        for levels in found[:1] if self.task == "classification" else found:
            levels.at(coverage)

    @property
    def id(self) -> str:
        """The name of the column of ids."""
        return str(self.layout.get("id", "id"))

    def open_series(
        self, table: Path, labels: Path | None, labels_id: str | None, stream: Any, label: Any
    ) -> Any:
        """Return the series of a table, perhaps with labels and static features of another one."""
        layout = None
        if self.layout:
            from osciformer.data import Layout

            layout = Layout.from_dict(dict(self.layout))
            features = tuple(map(str, self.estimator.feature_names_in_))
            layout = layout.replace(values=features, label=label, empty="keep")
            # In a table of (id, time, variable, value) a variable that does not occur is missing
            # throughout; a column that is not there is an error.
            layout = layout.replace(allow_absent=layout.is_narrow)
        data = tables.open_table(table, layout, stream=stream)
        absent = [n for n in self.estimator.static_names_in_ if n not in data.static_names]
        labels_id = labels_id or self.settings.get("labels_id") or self.layout.get("id")
        guess = bool(self.layout.get("guess_types"))
        return tables.join_static(
            data, absent, labels=labels, labels_id=labels_id, guess_types=guess
        )

    def open_events(self, table: Path) -> Any:
        """Return the sequences of a table read as in training."""
        if not self.layout:
            raise CommandError(
                f"the model was not trained on a table, so that the columns of {table} mean "
                "nothing to it; use it from Python, or fit it with layout=dict(id=..., time=...)"
            )
        known = self.estimator.type_names_
        return tables.read_events(table, {"type": "type", **self.layout}, known)


def _next_events(model: Model, chunks: Iterator[Any]) -> Parts:
    """Yield predictions of the next event, a row per sequence."""
    for chunk in chunks:
        columns = model.estimator.predict(chunk).columns(id="")
        yield {model.id: columns.pop("")}, columns


def _labels(model: Model, data: Any, coverage: float | None) -> Parts:
    """Yield predictions of classes or values, a row per series."""
    estimator, target = model.estimator, model.layout.get("label")
    for series in tables.parts_of(data):
        columns = {}
        if model.task == "classification":
            found = estimator.predict_proba(series)
            columns["prediction"] = estimator.classes_[found.argmax(axis=1)]
            names = [f"probability_{name}" for name in estimator.classes_.tolist()]
        else:
            found = estimator.predict(series).reshape(len(series), -1)
            of = target if isinstance(target, list | tuple) else range(found.shape[1])
            ends = [f"_{name}" for name in of] if len(of) > 1 else [""]
            names = [f"prediction{end}" for end in ends]
        columns |= dict(zip(names, found.T, strict=True))
        if coverage is not None and model.task == "classification":
            sets = estimator.sets_of(found, coverage).T
            columns |= {f"in_set_{c}": x for c, x in zip(estimator.classes_, sets, strict=True)}
        elif coverage is not None:
            margin = estimator.margin(coverage)
            for name, sign in (("lower", -1.0), ("upper", 1.0)):
                moved = (found + sign * margin).T
                columns |= {f"{name}{end}": x for end, x in zip(ends, moved, strict=True)}
        yield {model.id: series.ids}, columns


def _ask(
    model: Model, ids: np.ndarray, times: Path | None, horizon: float | None, every: float | None
) -> tuple[TimesOf | None, np.ndarray | None]:
    """Return the times to predict at, or steps from each series' end; neither for its own rows."""
    is_ahead = horizon is not None or every is not None
    if times is not None:
        if is_ahead:
            raise Misuse("give --times, or --horizon and --every, not both")
        return _read_times(times, model, ids), None
    if model.task == "imputation":
        if is_ahead:
            raise Misuse("--horizon and --every are for forecasts; use --times")
        return None, None
    horizon = model.estimator.horizon_ if horizon is None else horizon
    every = horizon / NUM_STEPS if every is None else every
    if not 0 < every <= horizon < float("inf"):
        raise Misuse(
            f"--horizon and --every must be positive, and --every not above --horizon; "
            f"got {horizon:g} and {every:g}"
        )
    return None, every * np.arange(1, int(np.floor(horizon / every * (1 + 1e-9))) + 1)


def _read_times(path: Path, model: Model, ids: np.ndarray) -> TimesOf:
    """Return times from a table with the time column of training and perhaps its id column."""
    from osciformer.data import Layout
    from osciformer.data.tables import as_same_kind, check_columns, read_full_codes, read_times

    columns = {"id": "id", "time": "time", **model.layout}
    layout = Layout(**columns | {"values": None, "label": None, "static": ()})
    table = tables.read_frame(path, {} if layout.guess_types else {layout.id: "text"})
    check_columns(table.column_names, [layout.time])
    ticks, axis = read_times(table.column(layout.time), layout)
    times = ticks if axis.kind == "number" else axis.decode(ticks / axis.ticks_per_unit, None)
    if layout.id not in table.column_names:
        shared = np.unique(times)
        return lambda some: [shared] * len(some)
    codes, found = read_full_codes(
        table.column(layout.id), layout.id, "an id", missing=layout.missing
    )
    known, entries = as_same_kind(ids, found)
    by_id = {entry: np.sort(times[codes == code]) for code, entry in enumerate(entries.tolist())}
    if not by_id.keys() & set(known.tolist()):
        raise CommandError(
            f"none of the ids in {path}, such as {next(iter(by_id), None)!r}, occurs in the table, "
            f"which has ids such as {ids[0]!s}; are they of the same type?"
        )

    def times_of(some: np.ndarray) -> list[np.ndarray]:
        return [by_id.get(id, times[:0]) for id in as_same_kind(some, found)[0].tolist()]

    return times_of


def _answers(
    model: Model,
    data: Any,
    times_of: TimesOf | None,
    steps: np.ndarray | None,
    *,
    is_full: bool,
    coverage: float | None,
) -> Parts:
    """Yield predictions at what `_ask` returns, a row per series, time and variable."""
    from osciformer.data.ragged import offsets_of, series_of_rows
    from osciformer.estimators.queries import last_target_times

    estimator, levels = model.estimator, tuple(map(float, model.estimator.quantiles))
    variables = np.array(list(map(str, estimator.target_names_)))
    is_target = np.isin(estimator.feature_names_in_, estimator.target_names_)
    for series in tables.parts_of(data):
        if times_of is not None:
            lists = times_of(series.ids)
            answers = estimator.predict_quantiles(series, lists)
            owner = series_of_rows(offsets_of(np.array([len(item) for item in lists])))
            times = np.concatenate(lists)
        elif steps is not None:
            answers = estimator.predict_quantiles(series, [steps] * len(series), relative=True)
            owner = np.repeat(np.arange(len(series)), len(steps))
            ends = last_target_times(series, is_target)[owner]
            times = series.decode_times(np.tile(steps, len(series)) + ends, owner)
        else:
            answers = estimator.predict_quantiles(series)
            owner, times = series_of_rows(series.offsets), series.decode_times()
        found = np.concatenate(answers)  # [Q, F, L]
        keys = {
            model.id: np.repeat(series.ids[owner], len(variables)),
            model.layout.get("time", "time"): np.repeat(times, len(variables)),
        }
        columns = {
            "variable": np.tile(variables, len(found)),
            "prediction": found[..., levels.index(0.5)].reshape(-1),
        }
        if is_full:
            columns |= {f"q{level:g}": found[..., k].reshape(-1) for k, level in enumerate(levels)}
        if coverage is not None:
            ends = estimator.intervals_of(found, coverage).reshape(-1, 2).T
            columns |= dict(zip(("lower", "upper"), ends, strict=True))
        yield keys, columns
