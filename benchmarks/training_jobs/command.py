"""The command line that the benchmarks of trained estimators share."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attention_gpu.document import write_text

from osciformer.bench.report import progress
from osciformer.bench.workers import Job, Row, Work, run_jobs

from .document import Document

_PATHS = ("--output", "--table", "--checkpoints", "--merge")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all these benchmarks."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file; it is continued")
    parser.add_argument("--table", type=Path, help="Markdown file; without it, standard output")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.5,
        help="after which jobs are stopped; 0 runs none and writes the table of the file",
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder from which jobs that were stopped go on"
    )
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        help="JSON file whose rows are taken, too",
    )
    parser.add_argument("--commit", help="to record, where git cannot tell")
    parser.add_argument("--quick", action="store_true", help="toy size, only to see it run")
    return parser


def names_among(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of lists with commas, which refuses what is not allowed."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; choose among {', '.join(allowed)}"
            )
        return names

    return parse


def run_benchmark(
    script: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    jobs: Sequence[Job],
    work: Work,
    settings: dict[str, Any],
    tables: Callable[[Document], list[str]],
) -> int:
    """Run the jobs that the output file lacks, write the files, and return the exit status.

    Args:
        script: Path of the script from the root of the repository.
        arguments: Its command line.
        options: The same, parsed.
        jobs: All jobs of the benchmark, the most important first.
        work: What does one of them; it is given `settings` with `device` and `checkpoints`.
        settings: Plain values that all rows share.
        tables: The lines of the Markdown file.

    Returns:
        0 if no job is missing, 3 if some are: run it again; 1 if some failed.
    """
    if options.jobs < 1:
        raise SystemExit(f"--jobs must be at least 1; got {options.jobs}")
    document = Document(options.output, settings)
    for path in options.merge:
        document.merge(path)
        document.save()
    missing = document.missing(jobs)
    if missing and options.minutes > 0:
        deadline = time.monotonic() + 60.0 * options.minutes
        device = torch.device(options.device)
        document.begin_run(_command(script, arguments), device, options.commit)
        progress(f"{len(jobs)} jobs, {len(jobs) - len(missing)} of them done before")
        given = {**settings, "device": options.device, "checkpoints": options.checkpoints}
        done = len(jobs) - len(missing)
        for job, row in run_jobs(missing, work, given, num_workers=options.jobs, deadline=deadline):
            document.add(job, row)
            _write_table(document, options.table, tables)
            done += row.get("error") is None
            left = (deadline - time.monotonic()) / 60.0
            progress(f"{done}/{len(jobs)}, {left:.1f} minutes left: {_in_words(job, row)}")
        document.save()
    _write_table(document, options.table, tables)
    if options.table is None:
        print("\n".join(tables(document)), flush=True)
    missing = document.missing(jobs)
    failed = [row for row in document.rows if row["error"] is not None]
    if missing:
        progress(f"{len(missing)} of {len(jobs)} jobs are missing, {len(failed)} failed")
    return 1 if failed else 3 if missing else 0


def estimator_settings(backbone: str, job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an estimator that a job needs beside those of its task."""
    chosen: dict[str, Any] = {
        **settings["estimator"],
        "backbone": backbone,
        "random_state": job["seed"],
        "accelerator": "gpu" if settings["device"] == "cuda" else "cpu",
    }
    folder = job_folder(job, settings)
    return chosen if folder is None else {**chosen, "run_dir": folder, "resume": True}


def training_entries(estimator: Any, job: Job, settings: dict[str, Any]) -> Row:
    """Return what a row says about the training of a fitted estimator; drop its checkpoint."""
    folder = job_folder(job, settings)
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


def job_folder(job: Job, settings: dict[str, Any]) -> Path | None:
    """Return the folder of a job's checkpoint, if there are to be some."""
    if settings["checkpoints"] is None:
        return None
    return Path(settings["checkpoints"]) / "-".join(map(str, job.values()))


def _in_words(job: Job, row: Row) -> str:
    shown = {key: value for key, value in {**job, **row}.items() if isinstance(value, str | int)}
    shown |= {key: round(v, 4) for key, v in row.items() if isinstance(v, float)}
    shown.pop("traceback", None)
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _write_table(
    document: Document, path: Path | None, tables: Callable[[Document], list[str]]
) -> None:
    if path is not None:
        write_text(path, "\n".join(tables(document)))


def _command(script: str, arguments: Sequence[str]) -> str:
    """Return the command line, with the names of files in place of their paths."""
    shown = list(arguments)
    for place, argument in enumerate(shown):
        flag, is_joined, path = argument.partition("=")
        if flag in _PATHS and is_joined:
            shown[place] = f"{flag}={Path(path).name}"
        elif place and shown[place - 1] in _PATHS:
            shown[place] = Path(argument).name
    return shlex.join(["python", script, *shown])


def command_line(argv: Sequence[str] | None) -> list[str]:
    """Return the arguments of a `main` function."""
    return list(sys.argv[1:] if argv is None else argv)
