"""All commands in one program."""

from __future__ import annotations

from typing import Annotated

import typer

from osciformer import __version__
from osciformer.cli import data, demo, evaluate, fit, info, predict
from osciformer.cli.errors import guarded, set_debug

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"osciformer {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=False)
def osciformer(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where in the program an error arose.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and end."
        ),
    ] = False,
) -> None:
    """Learn from irregularly sampled time series: tables in, predictions out.

    Start with: osciformer demo
    """
    set_debug(debug)


@guarded
def bench(context: typer.Context) -> None:
    """Measure: the attention (bench speed --quick), event prediction (bench events --help)."""
    # Here, since it costs time to import.
    from osciformer.bench.__main__ import main

    raise typer.Exit(main(context.args))


app.command()(guarded(fit.fit))
app.command()(guarded(predict.predict))
app.command()(guarded(evaluate.evaluate))
app.add_typer(data.app, name="data")
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)(bench)
app.command()(guarded(info.info))
app.command()(guarded(demo.demo))
