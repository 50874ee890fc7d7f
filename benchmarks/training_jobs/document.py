"""The JSON file of a benchmark: its settings, the runs that filled it, and a row per job."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attention_gpu.document import describe, finite, write_text

from osciformer.bench.workers import Job, Row

# Shown in the table; the JSON file has more.
_SHOWN = ("command", "commit", "date", "torch", "pytorch-lightning", "scikit-learn", "cpu", "gpu")


class Document:
    """Rows of finished jobs, kept in a file that a later run goes on with.

    Args:
        path: The file; it need not exist.
        settings: Plain values that all rows share. A file with other settings is refused.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))  # as the file will have them
        self.runs: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        if path.exists():
            self.merge(path)

    def merge(self, path: Path) -> None:
        """Take the rows of a file; a finished job takes the place of an earlier one of its kind."""
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] != self.settings:
            raise SystemExit(
                f"{path} has rows of the settings {found['settings']}, and these are "
                f"{self.settings}; give another --output"
            )
        before = len(self.runs)
        self.runs += found["runs"]
        for row in found["rows"]:
            job = {key: row[key] for key in row["job"]}
            if row["error"] is None or job in self.missing([job]):
                self._put(job, {**row, "run": row["run"] + before})

    def begin_run(self, command: str, device: torch.device, commit: str | None) -> None:
        """Note what the rows that follow were made with."""
        meta = describe(command, device, commit)
        for package in ("pytorch-lightning", "scikit-learn", "pandas", "pyarrow"):
            try:
                meta[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                meta[package] = None
        self.runs.append(meta)

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs without a row; one that failed is tried again."""
        return [job for job in jobs if not any(_is_of(row, job) for row in self.finished)]

    @property
    def finished(self) -> list[Row]:
        """Rows of jobs that did not fail."""
        return [row for row in self.rows if row["error"] is None]

    def add(self, job: Job, row: Row) -> None:
        """Keep a row in place of an earlier one of the same job, and write the file."""
        origin = {"run": len(self.runs) - 1, "job": list(job)}
        self._put(job, {**job, "error": None, **row, **origin})
        self.save()

    def _put(self, job: Job, row: Row) -> None:
        self.rows = [other for other in self.rows if not _is_of(other, job)]
        self.rows.append(row)

    def save(self) -> None:
        """Write the file; a run that is stopped while writing leaves the former one."""
        content = {"settings": self.settings, "runs": self.runs, "rows": self.rows}
        write_text(self.path, json.dumps(finite(content), indent=1, allow_nan=False))

    def changes(self) -> list[str]:
        """Return, as lines of Markdown, the settings of estimators that are not the defaults."""
        changes = [f"{name}={value}" for name, value in self.settings["estimator"].items()]
        return ["", f"Toy size, not a result: {', '.join(changes)}."] if changes else []

    def origin(self) -> list[str]:
        """Return, as lines of Markdown, the commands and versions behind the rows, and failures."""
        lines = []
        for number in sorted({row["run"] for row in self.finished}):
            run = self.runs[number]
            shown = [f"{key} {run[key]}" for key in _SHOWN[1:] if run.get(key)]
            lines.append(f"- `{run['command']}`: {', '.join(shown)}")
        failed = [row for row in self.rows if row["error"] is not None]
        lines += [f"- failed: {row['error']}" for row in failed]
        return lines


def _is_of(row: Row, job: Job) -> bool:
    return all(row.get(key) == value for key, value in job.items())


def spread(numbers: Sequence[float], form: str = "{:.3f}") -> str:
    """Return mean and standard deviation of a sample in words; a dash for none.

    >>> spread([1.0, 2.0, 3.0], "{:.1f}")
    '2.0 ± 1.0'
    """
    if not numbers:
        return "-"
    text = form.format(statistics.fmean(numbers))
    return text if len(numbers) == 1 else f"{text} ± {form.format(statistics.stdev(numbers))}"
