"""`osciformer info`: versions, devices, and the backend that a call would get."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from osciformer.cli.output import to_json
from osciformer.cli.run_folder import find_versions


def info(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, devices, and which backend runs and why."""
    content = collect()
    if json:
        typer.echo(to_json(content))
        return
    for title, entries in content.items():
        typer.echo(title)
        for name, value in entries.items():
            typer.echo(f"  {name:<20} {value}")


def collect() -> dict[str, dict[str, Any]]:
    """Return versions, devices and backends as plain values."""
    import torch

    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"}
    for number in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(number).total_memory / 2**30
        devices[f"cuda:{number}"] = f"{torch.cuda.get_device_name(number)}, {memory:.0f} GiB"
    backends = {}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dtype in (torch.float32, torch.bfloat16):
            backends[f"{device} {str(dtype).removeprefix('torch.')}"] = _backend(device, dtype)
    places = {
        name: os.environ.get(name, "not set")
        for name in ("OSCIFORMER_BACKEND", "OSCIFORMER_DATA", "OSCIFORMER_CACHE")
    }
    return {
        "versions": find_versions(),
        "devices": devices,
        "backends": backends,
        "environment": places,
    }


def _backend(device: str, dtype: Any) -> str:
    import torch

    from osciformer import choose_backend

    one = torch.ones(1, 1, device=device)
    try:
        name, reason = choose_backend("auto", None, {"key": (one, one), "value": (one, one)}, dtype)
    except (RuntimeError, ValueError) as error:
        return f"none: {error}"
    return f"{name}: {reason}"
