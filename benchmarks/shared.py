"""What the benchmarks share: a record of the run, a queue of jobs, and the file they write."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from osciformer._files import write_json, write_text
from osciformer.bench.report import Row, describe_run, progress, shown_command
from osciformer.bench.workers import Job, Work, run_jobs
from osciformer.config import estimator_arguments
from osciformer.data import IrregularSeries
from osciformer.estimators import OsciFormerClassifier

PACKAGES = ("pytorch-lightning", "scikit-learn", "pandas", "pyarrow")
#: Settings of estimators at toy size.
TINY = {"dim": 8, "num_layers": 1, "num_heads": 1, "max_epochs": 1}
# Shown in the table; the JSON file has more.
_SHOWN = ("commit", "date", "torch", "pytorch-lightning", "scikit-learn", "cpu", "gpu")


def describe(
    script: str,
    arguments: Sequence[str],
    *,
    device: str | torch.device = "cpu",
    commit: str | None = None,
    packages: Sequence[str] = PACKAGES,
) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a run of `benchmarks/SCRIPT`."""
    device = torch.device(device)
    command = shown_command("python", f"benchmarks/{script}", arguments=arguments)
    meta = describe_run(command, device, packages=packages)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        meta["gpu_memory_mib"] = properties.total_memory // 2**20
        meta["gpu_processors"] = properties.multi_processor_count
    return {**meta, "commit": commit or _commit()}


def _commit() -> str | None:
    """Return the commit of this checkout, marked if files differ from it; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    folder = Path(__file__).parent
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
        changes = [f"{name}={value}" for name, value in self.settings["estimator"].items()]
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


def mean_of_seeds(numbers: Sequence[float], seeds: int) -> str:
    """Return `spread`, with the number of seeds where it is not that of the others.

    >>> mean_of_seeds([0.5, 0.5], 2), mean_of_seeds([0.5], 2)
    ('0.500 ± 0.000', '0.500 (1)')
    """
    return spread(numbers) + (f" ({len(numbers)})" if 0 < len(numbers) != seeds else "")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all benchmarks that train estimators."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file; it is continued")
    add("--table", type=Path, help="Markdown file; without it, standard output")
    add("--jobs", type=int, default=1, help="processes, of one thread each")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    stop = "after which jobs are stopped; 0 runs none and writes the table of the file"
    add("--minutes", type=float, default=8.5, help=stop)
    add("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    add("--checkpoints", type=Path, help="folder from which jobs that were stopped go on")
    merge = "JSON file whose rows are taken, too"
    add("--merge", type=Path, action="append", default=[], help=merge)
    add("--commit", help="to record, where git cannot tell")
    add("--quick", action="store_true", help="toy size, only to see it run")
    return parser


def run_benchmark(
    script: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    jobs: Sequence[Job],
    work: Work,
    settings: dict[str, Any],
    tables: Callable[[Document], list[str]],
    **more: Any,
) -> int:
    """Run the jobs that the output file lacks, write the files, and return the exit status.

    Args:
        script: Name of the script.
        arguments: Its command line.
        options: The same, parsed.
        jobs: All jobs of the benchmark, the most important first.
        work: What does one of them; it is given `settings` with `device`, `checkpoints` and `more`.
        settings: Plain values that all rows share.
        tables: The lines of the Markdown file.
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
        meta = describe(script, arguments, device=options.device, commit=options.commit)
        document.runs.append(meta)
        done = len(jobs) - len(missing)
        progress(f"{len(jobs)} jobs, {done} of them done before")
        given = {**settings, "device": options.device, "checkpoints": options.checkpoints}
        given |= more
        for job, row in run_jobs(missing, work, given, num_workers=options.jobs, deadline=deadline):
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
    shown = {key: value for key, value in {**job, **row}.items() if isinstance(value, str | int)}
    shown |= {key: round(v, 4) for key, v in row.items() if isinstance(v, float)}
    shown.pop("traceback", None)
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def estimator_settings(backbone: str, job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an estimator that a job needs beside those of its task."""
    chosen: dict[str, Any] = {
        **settings["estimator"],
        "backbone": backbone,
        "random_state": job["seed"],
        "accelerator": "gpu" if settings["device"] == "cuda" else "cpu",
    }
    folder = _checkpoint(job, settings)
    chosen = estimator_arguments("classification", chosen)  # where they go is the same in all tasks
    return chosen if folder is None else {**chosen, "run_dir": folder, "resume": True}


def training_entries(estimator: Any, job: Job, settings: dict[str, Any]) -> Row:
    """Return what a row says about the training of a fitted estimator; drop its checkpoint."""
    folder = _checkpoint(job, settings)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "device": settings["device"],
        "epochs": estimator.n_iter_,
        "best_epoch": estimator.best_epoch_,
        # Those of an interrupted and continued training, too.
        "fit_seconds": round(sum(epoch["seconds"] for epoch in estimator.history_), 2),
        "parameters": sum(p.numel() for p in estimator.model_.parameters()),
    }


def _checkpoint(job: Job, settings: dict[str, Any]) -> Path | None:
    """Return the folder of a job's checkpoint, if there are to be some."""
    if settings["checkpoints"] is None:
        return None
    return Path(settings["checkpoints"]) / "-".join(map(str, job.values()))


def score_network(
    train: IrregularSeries, test: IrregularSeries, job: Job, settings: dict[str, Any]
) -> Row:
    """Return accuracy and training of `OsciFormerClassifier` with the job's model as backbone.

    `osciformer` is the default classifier, with resonators; its row has the accuracy of each of the
    two, too. The others are networks alone.
    """
    chosen = estimator_settings(job["model"], job, settings)
    is_joined = job["model"] == "osciformer"
    started = time.process_time()
    model = OsciFormerClassifier(**{**chosen, "resonators": is_joined}).fit(train)
    found: Row = {
        "cpu_seconds": round(time.process_time() - started, 2),
        **training_entries(model, job, settings),
        "accuracy": model.score(test),
    }
    if not is_joined:
        return found
    found |= {"network_weight": model.network_weight_}
    found |= {"resonator_accuracy": model.resonator_.score(test)}
    model.network_weight_ = 1.0  # the network alone answers
    return {**found, "network_accuracy": model.score(test)}


def accuracies(row: Row) -> dict[str, float]:
    """Return the accuracies in a row by model; `network` is that of `osciformer` alone."""
    found = {row["model"]: row["accuracy"]}
    return found | ({"network": row["network_accuracy"]} if "network_accuracy" in row else {})
