"""`osciformer plot`: a picture of what a trained model says about single series."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from osciformer.cli import pictures, predict
from osciformer.cli.explain import SeriesOption, find_series
from osciformer.cli.runs import refuse_replacing

_OUTPUT = Option("--output", "-o", help="File to draw: .png, .pdf or .svg.")
_VARIABLES = Option(help="Variables to draw, with commas; by default the most observed.")


def plot(
    run: predict.RunArgument,
    table: predict.TableArgument,
    *,
    output: Annotated[Path, _OUTPUT],
    series: SeriesOption = None,
    variables: Annotated[str | None, _VARIABLES] = None,
    labels: predict.LabelsOption = None,
    labels_id: predict.LabelsIdOption = None,
    stream: predict.StreamOption = None,
    accelerator: predict.AcceleratorOption = "auto",
) -> None:
    """Draw predictions for up to four series of a table, by default the first.

    Forecasts and imputations come with intervals over what was observed; classes and values as
    predicted if the series ended at each of its observations; events as rates along time.
    """
    pictures.check_picture(output)
    refuse_replacing(output, run, table, labels)
    model = predict.Model.load(run, table, labels, accelerator=accelerator)
    if model.task == "events":
        model.refuse(variables=variables, labels=labels, labels_id=labels_id, stream=stream)
        data = model.open_events(table)
    else:
        data = model.open_series(table, labels, labels_id, stream, None)
    chosen, _ = find_series(data, series or [str(data.ids[0])])
    from osciformer.plots import plot_predictions

    names = None if variables is None else variables.split(",")
    time = str(model.layout.get("time", "time"))
    pictures.save(plot_predictions(model.estimator, chosen, variables=names, time=time), output)
    typer.echo(f"{output}: {model.task}, series {', '.join(map(str, chosen.ids))}")
