"""All commands in one program, and `osciformer info`."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from osciformer import __version__
from osciformer._files import finite_json
from osciformer.cli import data, demo, evaluate, fit, predict
from osciformer.cli.errors import debugging, guarded

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
    debugging[:] = ["--debug"] * debug


def bench(context: typer.Context) -> None:
    """Measure: the attention (bench speed --quick), event prediction (bench events --help)."""
    from osciformer.bench.__main__ import main  # slow to import

    raise typer.Exit(main(context.args))


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, devices, and which backend runs and why."""
    content = _collect()
    if as_json:
        typer.echo(json.dumps(finite_json(content)))
        return
    for title, entries in content.items():
        typer.echo(title)
        for name, value in entries.items():
            typer.echo(f"  {name:<20} {value}")


def _collect() -> dict[str, dict[str, Any]]:
    """Return versions, devices and backends as plain values."""
    import torch

    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"}
    for number in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(number).total_memory / 2**30
        devices[f"cuda:{number}"] = f"{torch.cuda.get_device_name(number)}, {memory:.0f} GiB"
    backends = {
        f"{device} {str(dtype).removeprefix('torch.')}": _backend(device, dtype)
        for device in (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
        for dtype in (torch.float32, torch.bfloat16)
    }
    names = ("OSCIFORMER_BACKEND", "OSCIFORMER_DATA", "OSCIFORMER_CACHE")
    return {
        "versions": fit.find_versions(),
        "devices": devices,
        "backends": backends,
        "environment": {name: os.environ.get(name, "not set") for name in names},
    }


def _backend(device: str, dtype: Any) -> str:
    """Return the backend that a call on the device gets, and why."""
    import torch

    from osciformer import choose_backend

    one = torch.ones(1, 1, device=device)
    try:
        name, reason = choose_backend("auto", None, {"key": (one, one), "value": (one, one)}, dtype)
    except (RuntimeError, ValueError) as error:
        return f"none: {error}"
    return f"{name}: {reason}"


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
)(guarded(bench))
app.command()(guarded(info))
app.command()(guarded(demo.demo))
