"""The rows of a report, and the ways to write them."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch

from osciformer import __version__

#: Keys of a row, in order. Every row has all of them; what was not measured is None.
KEYS = (
    "case",
    "backend",
    "query",
    "pass",
    "n",
    "batch",
    "heads",
    "c",
    "j",
    "dtype",
    "device",
    "ms",
    "peak_mib",
    "error",
    "ratio_sdpa",
    "ratio_reference",
)
Row = dict[str, Any]

_WIDTHS = {"case": 6, "backend": 9, "query": 12, "pass": 6, "dtype": 8, "device": 6}
_FORMATS = {
    "ms": "{:.3f}",
    "peak_mib": "{:.1f}",
    "error": "{:.1e}",
    "ratio_sdpa": "{:.2f}",
    "ratio_reference": "{:.2e}",
}


def make_row(**entries: Any) -> Row:
    """Return a row with None for every key that is not given; `pass_` stands for "pass".

    Example:
        >>> row = make_row(case="speed", pass_="fwd", n=16)
        >>> row["pass"], row["n"], row["ms"]
        ('fwd', 16, None)
    """
    entries["pass"] = entries.pop("pass_", None)
    unknown = entries.keys() - set(KEYS)
    if unknown:
        raise ValueError(f"a row has no key {', '.join(sorted(unknown))}; it has {', '.join(KEYS)}")
    return {key: entries.get(key) for key in KEYS}


class Report:
    """Rows, written as they come: as JSON, one object a line, or as a table.

    Args:
        is_json: Write JSON lines.
        stream: Where to write; None is the standard output of the moment.
    """

    def __init__(self, *, is_json: bool, stream: TextIO | None = None) -> None:
        self.rows: list[Row] = []
        self._is_json = is_json
        self._stream = sys.stdout if stream is None else stream

    def add(self, rows: list[Row]) -> None:
        """Keep rows and write them."""
        for row in rows:
            if not self._is_json and not self.rows:
                self._write("  ".join(key.rjust(_width(key)) for key in KEYS))
            self.rows.append(row)
            self._write(json.dumps(row, allow_nan=False) if self._is_json else table_line(row))

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def save(self, path: Path, meta: dict[str, Any]) -> None:
        """Write the rows kept so far and what they were measured on to a JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"meta": meta, "rows": self.rows}, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


def table_line(row: Row) -> str:
    """Return one line of the table, a dash for what was not measured."""
    cells = []
    for key, entry in row.items():
        text = "-" if entry is None else _FORMATS.get(key, "{}").format(entry)
        cells.append(text.rjust(_width(key)))
    return "  ".join(cells)


def _width(key: str) -> int:
    return max(len(key), _WIDTHS.get(key, 8 if key in _FORMATS else 5))


def describe_run(command: str, device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a measurement.

    Args:
        command: The command line.
        device: Where the measurement ran.
    """
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
    return meta


def cpu_model() -> str:
    """Return the name of the processor, or of its architecture where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def progress(message: str) -> None:
    """Tell the reader of the terminal, apart from the report, what is going on."""
    print(message, file=sys.stderr, flush=True)
