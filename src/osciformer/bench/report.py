"""What all benchmarks share: rows, tables, a record of the run, and types of arguments."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from osciformer import __version__
from osciformer._files import write_json

Row = dict[str, Any]
#: Keys of a row, in order. Every row has all of them; what was not measured is None.
KEYS = (
    *("case", "backend", "query", "pass", "n", "batch", "heads", "c", "j", "dtype", "device"),
    *("ms", "peak_mib", "error", "ratio_sdpa", "ratio_reference"),
)
_WIDTHS = {"case": 6, "backend": 9, "query": 12, "pass": 6, "dtype": 8, "device": 6}
_FORMATS = {
    "ms": "{:.3f}",
    "peak_mib": "{:.1f}",
    "error": "{:.1e}",
    "ratio_sdpa": "{:.2f}",
    "ratio_reference": "{:.2e}",
}


def make_row(keys: Sequence[str] = KEYS, **entries: Any) -> Row:
    """Return a row with None for every key that is not given; `pass_` stands for "pass".

    Example:
        >>> row = make_row(case="speed", pass_="fwd", n=16)
        >>> row["pass"], row["n"], row["ms"]
        ('fwd', 16, None)
    """
    if "pass_" in entries:
        entries["pass"] = entries.pop("pass_")
    unknown = entries.keys() - set(keys)
    if unknown:
        raise ValueError(f"a row has no key {', '.join(sorted(unknown))}; it has {', '.join(keys)}")
    return {key: entries.get(key) for key in keys}


class Report:
    """Rows, written to standard output as they come: as JSON, one object per line, or a table."""

    def __init__(self, *, is_json: bool) -> None:
        self.rows: list[Row] = []
        self._is_json = is_json

    def add(self, rows: list[Row]) -> None:
        """Keep rows and write them."""
        for row in rows:
            if not self._is_json and not self.rows:
                print("  ".join(key.rjust(_width(key)) for key in KEYS))
            self.rows.append(row)
            line = json.dumps(row, allow_nan=False) if self._is_json else _table_line(row)
            print(line, flush=True)

    def save(self, path: Path, meta: dict[str, Any]) -> None:
        """Write all rows and the record of the run to a JSON file."""
        write_json(path, {"meta": meta, "rows": self.rows}, indent=1)


def _table_line(row: Row) -> str:
    """Return one line of the table, with a dash for None."""
    cells = []
    for key, entry in row.items():
        text = "-" if entry is None else _FORMATS.get(key, "{}").format(entry)
        cells.append(text.rjust(_width(key)))
    return "  ".join(cells)


def _width(key: str) -> int:
    return max(len(key), _WIDTHS.get(key, 8 if key in _FORMATS else 5))


def markdown_table(columns: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def describe_run(
    command: str, device: torch.device, *, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a measurement; None for absent packages."""
    meta = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "osciformer": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        meta["gpu"] = torch.cuda.get_device_name(device)
        meta["cuda"] = torch.version.cuda
    for package in packages:
        try:
            meta[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            meta[package] = None
    return meta


def cpu_model() -> str:
    """Return the name of the processor, or of its architecture if the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def shown_command(*program: str, arguments: Sequence[str]) -> str:
    """Return a command line in which file names stand for absolute paths.

    Example:
        >>> shown_command("osciformer", "bench", arguments=["-o", "/home/me/cells", "--jobs=2"])
        'osciformer bench -o cells --jobs=2'
    """
    shown = []
    for argument in arguments:
        flag, equals, path = argument.rpartition("=")
        shown.append(flag + equals + (Path(path).name if os.path.isabs(path) else path))
    return shlex.join([*program, *shown])


def progress(message: str) -> None:
    """Print a message to standard error, apart from the report."""
    print(message, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def tuple_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of values with commas between them."""

    def values(text: str) -> tuple[Any, ...]:
        return tuple(parse(part) for part in text.split(","))

    return values


def names_among(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of names with commas between them, which refuses unknown ones."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; choose among {', '.join(allowed)}"
            )
        return names

    return parse
