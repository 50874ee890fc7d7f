"""All commands in one program, and `osciformer info`."""

from __future__ import annotations

import itertools
import json
import os
from typing import Annotated

import typer
from typer import Option

from osciformer import __version__
from osciformer._files import finite_json
from osciformer.cli import (
    data,
    demo,
    evaluate,
    explain,
    fit,
    inspect,
    plot,
    predict,
    tune,
    warm_up,
)
from osciformer.cli.errors import debugging, guarded

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
app.pretty_exceptions_enable = False


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"osciformer {__version__}")
        raise typer.Exit


_DEBUG = Option("--debug", help="Show where in the program an error arose.")
_VERSION = Option("--version", callback=_version, is_eager=True, help="Show the version and end.")


@app.callback()
def osciformer(
    debug: Annotated[bool, _DEBUG] = False, version: Annotated[bool, _VERSION] = False
) -> None:
    """Learn from irregularly sampled time series: tables in, predictions out.

    Start with: osciformer demo
    """
    debugging[:] = ["--debug"] * debug


def bench(context: typer.Context) -> None:
    """Measure: attention (bench speed --quick) and more suites, which bench --help lists."""
    from osciformer.bench.__main__ import main  # slow to import

    raise typer.Exit(main(context.args))


def info(as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, devices, and which backend runs and why."""
    import torch

    from osciformer import choose_backend

    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"}
    for number in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(number).total_memory / 2**30
        devices[f"cuda:{number}"] = f"{torch.cuda.get_device_name(number)}, {memory:.0f} GiB"
    backends = {}
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for device, dtype in itertools.product(kinds, (torch.float32, torch.bfloat16)):
        name = f"{device} {dtype}".replace("torch.", "")
        pair = (torch.ones(1, 1, device=device),) * 2
        try:
            found = choose_backend("auto", None, {"key": pair, "value": pair}, dtype)
            backends[name] = ": ".join(found)
        except (RuntimeError, ValueError) as error:
            backends[name] = f"none: {error}"
    content = {"versions": fit.find_versions(), "devices": devices, "backends": backends}
    names = ("OSCIFORMER_BACKEND", "OSCIFORMER_DATA", "OSCIFORMER_CACHE")
    content["environment"] = {name: os.environ.get(name, "not set") for name in names}
    if as_json:
        typer.echo(json.dumps(finite_json(content)))
        return
    for title, entries in content.items():
        typer.echo(title)
        for name, value in entries.items():
            typer.echo(f"  {name:<20} {value}")


app.add_typer(data.app, name="data")
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_OF_MODELS = (fit.fit, predict.predict, evaluate.evaluate, explain.explain, plot.plot)
_OTHERS = (inspect.inspect, tune.tune, bench, warm_up.warm_up, info, demo.demo)
for command in (*_OF_MODELS, *_OTHERS):
    app.command(context_settings=_PASSED_ON if command is bench else None)(guarded(command))
