"""Rows of finished jobs in a file that the same command continues, and the tables made of it."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from osciformer._files import write_json, write_text
from osciformer.bench.report import Row, progress
from osciformer.bench.workers import Job, Work, run_jobs

# Shown in the table; the JSON file has more.
_SHOWN = ("commit", "date", "torch", "pytorch-lightning", "scikit-learn", "cpu", "gpu")


def current_commit(folder: Path) -> str | None:
    """Return the commit of a folder, marked if files differ from it; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None


class Document:
    """Rows of finished jobs, kept in a JSON file that a later run continues.

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
        """Take the rows of a file; a finished job replaces an earlier one of its kind."""
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
        self.rows = [*(other for other in self.rows if not _is_of(other, job)), row]

    def save(self) -> None:
        """Write the file; a run that is stopped while writing leaves the former one."""
        content = {"settings": self.settings, "runs": self.runs, "rows": self.rows}
        write_json(self.path, content, indent=1)

    def changes(self) -> list[str]:
        """Return, as lines of Markdown, the settings of estimators that are not the defaults."""
        changes = [f"{name}={value}" for name, value in self.settings.get("estimator", {}).items()]
        return ["", f"Toy size, not a result: {', '.join(changes)}."] if changes else []

    def origin(self) -> list[str]:
        """Return, as lines of Markdown, the commands and versions behind the rows, and failures."""
        lines = []
        for run in (self.runs[number] for number in sorted({r["run"] for r in self.finished})):
            shown = [f"{key} {run[key]}" for key in _SHOWN if run.get(key)]
            lines.append(f"- `{run['command']}`: {', '.join(shown)}")
        return lines + [f"- failed: {r['error']}" for r in self.rows if r["error"] is not None]


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


def mean_of_seeds(numbers: Sequence[float], seeds: int, form: str = "{:.3f}") -> str:
    """Return `spread`, with the number of seeds where it is not that of the others.

    >>> mean_of_seeds([0.5, 0.5], 2), mean_of_seeds([0.5], 2)
    ('0.500 ± 0.000', '0.500 (1)')
    """
    return spread(numbers, form) + (f" ({len(numbers)})" if 0 < len(numbers) != seeds else "")


def make_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser with the arguments of all benchmarks that a file continues."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, help="JSON file; it is continued")
    add("--table", type=Path, help="Markdown file; without it, standard output")
    add("--jobs", type=int, default=1, help="processes, of one thread each")
    stop = "after which jobs are stopped; 0 runs none and writes the table of the file"
    add("--minutes", type=float, default=8.5, help=stop)
    add("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    merge = "JSON file whose rows are taken, too"
    add("--merge", type=Path, action="append", default=[], help=merge)
    add("--commit", help="to record, where git cannot tell")
    add("--quick", action="store_true", help="toy size, only to see it run")
    return parser


def run_documented(
    describe: Callable[[], Row],
    options: argparse.Namespace,
    jobs: Sequence[Job],
    work: Work,
    settings: dict[str, Any],
    tables: Callable[[Document], list[str]],
    *,
    is_ready: Callable[[Document, Job], bool] | None = None,
    **more: Any,
) -> int:
    """Run the jobs that the output file lacks, write the files, and return the exit status.

    Args:
        describe: Returns the record of this run, see `describe_run`; asked if a job is to be run.
        options: Those of `make_parser`.
        jobs: All jobs of the benchmark, the most important first.
        work: What does one of them; it is given `settings` with `more`.
        settings: Plain values that all rows share.
        tables: The lines of the Markdown file.
        is_ready: Whether a job may begin; one that is not ready waits for another to finish.
        more: What `work` needs and no row depends on.

    Returns:
        0 if no job is missing, 3 if some are: run it again; 1 if some failed.
    """
    if options.jobs < 1:
        raise SystemExit(f"--jobs must be at least 1; got {options.jobs}")
    document = Document(options.output, settings)
    for path in options.merge:
        document.merge(path)
        document.save()

    def write_table() -> None:
        if options.table is not None:
            write_text(options.table, "\n".join(tables(document)) + "\n")

    missing = document.missing(jobs)
    if missing and options.minutes > 0:
        deadline = time.monotonic() + 60.0 * options.minutes
        document.runs.append(describe())
        done = len(jobs) - len(missing)
        progress(f"{len(jobs)} jobs, {done} of them done before")
        given = {**settings, **more}
        limits: dict[str, Any] = {"num_workers": options.jobs, "deadline": deadline}
        if is_ready is not None:
            limits["is_ready"] = partial(is_ready, document)
        for job, row in run_jobs(missing, work, given, **limits):
            document.add(job, row)
            write_table()
            done += row.get("error") is None
            left = (deadline - time.monotonic()) / 60.0
            progress(f"{done}/{len(jobs)}, {left:.1f} minutes left: {_in_words(job, row)}")
        document.save()
    write_table()
    if options.table is None:
        print("\n".join(tables(document)), flush=True)
    missing = document.missing(jobs)
    failed = len(document.rows) - len(document.finished)
    if missing:
        progress(f"{len(missing)} of {len(jobs)} jobs are missing, {failed} failed")
    return 1 if failed else 3 if missing else 0


def _in_words(job: Job, row: Row) -> str:
    both = {**job, **row}
    shown: Row = {key: value for key, value in both.items() if isinstance(value, str | int)}
    shown |= {key: round(v, 4) for key, v in row.items() if isinstance(v, float)}
    shown.pop("traceback", None)
    return ", ".join(f"{key} {value}" for key, value in shown.items())
