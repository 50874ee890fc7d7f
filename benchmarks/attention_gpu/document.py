"""The files a run writes: JSON with everything, and tables in Markdown."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from osciformer.bench.report import describe_run

from .numbers import KEYS, Row, summary

_FORMATS = {
    "ms": "{:.3f}",
    "low_ms": "{:.3f}",
    "high_ms": "{:.3f}",
    "first_ms": "{:.0f}",
    "peak_mib": "{:,.1f}",
    "ratio_ms_sdpa": "{:.2f}",
    "ratio_mem_sdpa": "{:.2f}",
    "tflops_algorithm": "{:.4g}",
    "fraction_of_peak": "{:.1%}",
    "ns_per_token": "{:.4g}",
    "horizon": "{:g}",
    "max_error": "{:.1e}",
    "frobenius_error": "{:.1e}",
}
# Left to the JSON file.
_NOT_IN_TABLES = ("part", "low_ms", "high_ms", "details")


class Document:
    """What was measured so far.

    Args:
        meta: What it was measured on.
        rows: Rows of an earlier run that are kept.
    """

    def __init__(self, meta: dict[str, Any], rows: Iterable[Row] = ()) -> None:
        self.meta = meta
        self.rows = list(rows)

    def save(self, output: Path | None, table: Path | None) -> None:
        """Write the files; a run that is stopped while writing leaves the former ones."""
        everything = {"meta": self.meta, "summary": summary(self.rows), "rows": self.rows}
        if output is not None:
            write_text(output, json.dumps(finite(everything), indent=1, allow_nan=False))
        if table is not None:
            write_text(table, self.markdown())

    def markdown(self) -> str:
        """Return the tables, one a part, then what failed and the kernels."""
        lines = [f"# {self.meta.get('gpu') or self.meta.get('cpu') or 'Results'}", ""]
        lines += [f"- {key}: {entry}" for key, entry in self.meta.items()]
        for part in dict.fromkeys(row["part"] for row in self.rows):
            of_part = [row for row in self.rows if row["part"] == part]
            lines += ["", f"## {part}", "", *part_table(of_part)]
        for row in self.rows:
            if row["part"] == "kernels" and row["details"]:
                lines += ["", *kernel_table(row)]
        return "\n".join(lines)


def part_table(rows: list[Row]) -> list[str]:
    """Return the lines of a table: columns that are the same in all rows go into a line above."""
    columns = [key for key in KEYS if key not in _NOT_IN_TABLES]
    columns = [key for key in columns if any(row[key] is not None for row in rows)]
    shared = {}
    if len(rows) > 1:
        for key in columns:
            if key != "error" and all(row[key] == rows[0][key] for row in rows):
                shared[key] = rows[0][key]
    lines = []
    if shared:
        lines += ["; ".join(f"{key} {cell(key, entry)}" for key, entry in shared.items()), ""]
    columns = [key for key in columns if key not in shared]
    body = [[cell(key, row[key]) for key in columns] for row in rows]
    return lines + markdown_table(columns, body)


def kernel_table(row: Row) -> list[str]:
    """Return the kernels of one profiled call as the lines of a table."""
    details = row["details"]
    title = (
        f"Kernels of {row['query']}, {row['pass']}, N = {row['n']}, B = {row['batch']},"
        f" C = {row['c']}: {details['kernels_ms']:.3f} ms in {details['launches']:.0f} launches,"
        f" {row['ms']:.3f} ms a call"
    )
    body = [
        [
            f"`{entry['name'][:60]}`",
            f"{entry['ms']:.3f}",
            "-" if entry["share"] is None else f"{entry['share']:.1%}",
            f"{entry['calls']:.0f}",
        ]
        for entry in details["top"]
    ]
    return [title, "", *markdown_table(["kernel", "ms", "share", "launches"], body)]


def markdown_table(columns: list[str], body: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def cell(key: str, entry: Any) -> str:
    """Return an entry of a row for a table, a dash for None."""
    if entry is None:
        return "-"
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    return _FORMATS.get(key, "{}").format(entry).replace("|", "/").replace("\n", " ")


def finite(entry: Any) -> Any:
    """Return a document in which None stands for numbers that JSON does not have."""
    if isinstance(entry, dict):
        return {key: finite(value) for key, value in entry.items()}
    if isinstance(entry, list | tuple):
        return [finite(value) for value in entry]
    return None if isinstance(entry, float) and not math.isfinite(entry) else entry


def describe(command: str, device: torch.device, commit: str | None) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a run."""
    meta = describe_run(command, device)
    try:
        import triton

        meta["triton"] = triton.__version__
    except ImportError:
        meta["triton"] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        meta["gpu_memory_mib"] = properties.total_memory // 2**20
        meta["gpu_processors"] = properties.multi_processor_count
    meta["commit"] = commit or _commit()
    return meta


def _commit() -> str | None:
    """Return the commit of this checkout, marked if files differ from it; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text + "\n", encoding="utf-8")
    os.replace(beside, path)
