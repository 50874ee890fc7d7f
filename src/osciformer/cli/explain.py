"""`osciformer explain`: which variables and times matter to a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from osciformer._text import name_some
from osciformer.cli import evaluate, predict, tables
from osciformer.cli.errors import CommandError
from osciformer.cli.runs import refuse_replacing

NUM_PRINTED = 10
SeriesOption = Annotated[list[str] | None, Option(help="Id of a series; may be given repeatedly.")]
_OUTPUT = Option("--output", "-o", help="File to write: .parquet or .csv.")


def explain(
    run: predict.RunArgument,
    table: predict.TableArgument,
    *,
    output: Annotated[Path, _OUTPUT],
    series: SeriesOption = None,
    repeats: Annotated[int, Option(min=1, help="Exchanges of each variable.")] = 5,
    max_series: Annotated[int, Option(min=2, help="Most series that are used.")] = 1000,
    windows: Annotated[int, Option(min=1, help="Windows of time, with --series.")] = 10,
    seed: Annotated[int, Option(help="Decides what is exchanged for what.")] = 0,
    target: Annotated[str | None, Option(help="Column of true labels, if another one.")] = None,
    labels: predict.LabelsOption = None,
    labels_id: predict.LabelsIdOption = None,
    stream: predict.StreamOption = None,
    accelerator: predict.AcceleratorOption = "auto",
) -> None:
    """Say which variables matter, or, for single series, which variables and times.

    On the whole: how much worse predictions get if a variable comes from another series, with 95 %
    intervals. With --series: how the prediction changes if a part of it comes from others.
    """
    tables.check_ending(output, tables.TABLE_ENDINGS)
    refuse_replacing(output, run, table, labels)
    model = predict.Model.load(run, table, labels, accelerator=accelerator)
    if model.task == "events":
        raise CommandError("explain is for series, not for events; see osciformer evaluate")
    from osciformer.explain import occlusion, permutation_importance

    verbose = int(sys.stderr.isatty())
    if series:
        data = model.open_series(table, labels, labels_id, stream, None)
        chosen, others = find_series(data, series)
        found = occlusion(
            model.estimator,
            chosen,
            others,
            n_windows=windows,
            random_state=seed,
            verbose=verbose,
        )
        _print_parts(found)
    else:
        data, truth = evaluate.open_labelled(model, table, target, labels, labels_id, stream)
        found = permutation_importance(
            model.estimator,
            data,
            truth,
            n_repeats=repeats,
            max_samples=max_series,
            random_state=seed,
            verbose=verbose,
        )
        _print_importance(found)
    columns = {name: _column(found[name]) for name in found}
    keys = {model.id: columns.pop("id")} if "id" in columns else {}
    renamed: dict[str, str] = {}
    part = tables.side_by_side(keys, columns, renamed)
    typer.echo(f"{output}: {tables.write_table(output, [part])} rows")
    predict.tell_renamed(renamed)


def find_series(data: Any, wanted: list[str]) -> tuple[Any, Any]:
    """Return the series or sequences of some ids, in this order, and the others, or None."""
    from osciformer.data.inputs import chunks, take
    from osciformer.data.series import concatenate

    by_name = {str(id): place for place, id in enumerate(data.ids.tolist())}
    absent = [name for name in wanted if name not in by_name]
    if absent:
        raise CommandError(
            f"the table has no series {name_some(absent)}; it has {name_some(data.ids)}"
        )
    places = np.array(list(dict.fromkeys(by_name[name] for name in wanted)))
    others = np.setdiff1d(np.arange(len(data)), places)
    if not tables.is_streamed(data):
        return data[places], data[others] if len(others) else None
    rising, back = np.unique(places, return_inverse=True)
    chosen = concatenate(list(chunks(take(data, rising)))).take(back)
    return chosen, take(data, others) if len(others) else None


def _print_importance(found: Any) -> None:
    rows = [
        (row.variable, f"{row.importance:.4g}", f"{row.low:.4g} to {row.high:.4g}")
        for row in found.itertuples()
    ]
    loss = found.loss[0].replace("_", " ")
    title = f"Increase of the {loss} if a variable comes from another series"
    tables.print_table(title, ("variable", "increase", "95 % interval"), rows[:NUM_PRINTED])
    if len(rows) > NUM_PRINTED:
        typer.echo(f"and {len(rows) - NUM_PRINTED} more in the file")


def _print_parts(found: Any) -> None:
    """Print the parts with the largest effects on each output of each series."""
    for (id, output), rows in found[found.part != "cell"].groupby(["id", "output"], sort=False):
        rows = rows.reindex(rows.effect.abs().sort_values(ascending=False).index)
        shown = [
            (
                (
                    f"{_moment(row.start)} to {_moment(row.end)}"
                    if row.part == "time"
                    else str(row.variable)
                ),
                f"{row.effect:+.4g}",
                f"{row.low:.4g} to {row.high:.4g}" if "low" in found else "-",
            )
            for row in rows.head(NUM_PRINTED).itertuples()
        ]
        title = f"Series {id}, output {output}: prediction {rows.prediction.iloc[0]:.4g}"
        tables.print_table(title, ("part", "adds", "95 % interval"), shown)


def _moment(time: Any) -> str:
    """Return a number, or a date or duration to the second."""
    return f"{time:.4g}" if isinstance(time, float) else str(time.round("s"))


def _column(column: Any) -> np.ndarray:
    """Return a column of a data frame; missing text becomes None."""
    is_text = column.dtype.kind == "O"
    found: np.ndarray = np.asarray(
        column.astype(object).where(column.notna(), None) if is_text else column
    )
    return found
