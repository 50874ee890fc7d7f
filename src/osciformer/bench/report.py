"""What all benchmarks share: rows, tables, a record of the run, and types of arguments."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from osciformer import __version__
from osciformer._optional import version_of

Row = dict[str, Any]
#: Keys of a row, in order. Every row has all of them; what was not measured is None.
KEYS = (
    *("case", "backend", "query", "pass", "n", "batch", "heads", "c", "j", "dtype", "device"),
    *("ms", "peak_mib", "error", "ratio_sdpa", "ratio_reference"),
)
# Of the table, if a column is wider than its name and 5; and how it shows numbers.
_WIDTHS = {
    "case": 6,
    "layer": 7,
    "backend": 9,
    "query": 12,
    "pass": 6,
    "dtype": 8,
    "ms": 8,
    "error": 8,
}
_FORMATS = {"ms": ".3f", "peak_mib": ".1f", "error": ".1e", "ratio_reference": ".2e"}


def make_row(keys: Sequence[str] = KEYS, **entries: Any) -> Row:
    """Return a row with None for every key that is not given; `pass_` stands for "pass"."""
    entries = {key.removesuffix("_"): entry for key, entry in entries.items()}
    unknown = entries.keys() - set(keys)
    if unknown:
        raise ValueError(f"a row has no key {', '.join(sorted(unknown))}; it has {', '.join(keys)}")
    return {key: entries.get(key) for key in keys}


class Report:
    """Rows, written to standard output as they come: as JSON, one object per line, or a table."""

    def __init__(self, *, is_json: bool, keys: Sequence[str] = KEYS) -> None:
        self.rows: list[Row] = []
        self._is_json, self._keys = is_json, keys

    def add(self, rows: list[Row]) -> None:
        """Keep rows and write them."""
        for row in rows:
            if not self._is_json and not self.rows:
                print("  ".join(_cell(key, key) for key in self._keys))
            self.rows.append(row)
            told = "  ".join(_cell(key, entry) for key, entry in row.items())
            print(json.dumps(row, allow_nan=False) if self._is_json else told, flush=True)


def _cell(key: str, entry: Any) -> str:
    text = "-" if entry is None else str(entry)
    if isinstance(entry, float):
        text = format(entry, _FORMATS.get(key, ".2f"))
    return text.rjust(max(len(key), _WIDTHS.get(key, 5)))


def markdown_table(columns: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def describe_run(command: str, device: torch.device, *, packages: Sequence[str] = ()) -> Row:
    """Return what a reader needs to judge or repeat a measurement; None for absent packages."""
    meta: Row = {"command": command, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    meta |= {"osciformer": __version__, "torch": torch.__version__, "numpy": numpy.__version__}
    system = f"{platform.system()} {platform.machine()}"
    meta |= {"python": platform.python_version(), "system": system, "cpu": _cpu_model()}
    meta |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        meta |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return meta | {package: version_of(package) for package in packages}


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def shown_command(*program: str, arguments: Sequence[str]) -> str:
    """Return a command line in which file names stand for absolute paths."""
    shown = []
    for argument in arguments:
        flag, equals, path = argument.rpartition("=")
        shown.append(flag + equals + (Path(path).name if os.path.isabs(path) else path))
    return shlex.join([*program, *shown])


def progress(message: str) -> None:
    """Print a message to standard error."""
    print(message, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def tuple_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of values with commas between them."""

    def values(text: str) -> tuple[Any, ...]:  # argparse says its name
        return tuple(parse(part) for part in text.split(","))

    return values


def names_among(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of names with commas between them, which refuses unknown ones."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown, known = ", ".join(n for n in names if n not in allowed), ", ".join(allowed)
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {unknown}; choose among {known}")
        return names

    return parse
