"""`osciformer bench events`: the table of event prediction, cell by cell.

Each cell (a data set, a model, a fold or seed) has a JSON file in the output folder. Cells that are
there are skipped, so that the same command goes on where it was stopped, and several machines can
share the work; failed cells say why and are tried again. Without OSCIFORMER_DATA the data sets are
downloaded.

    osciformer bench events -o runs/events --jobs 4
    osciformer bench events -o runs/events --datasets taxi --models osciformer,rmtpp --seeds 0
    osciformer bench events -o runs/events --speed --device cuda
    osciformer bench events -o runs/events --report-only --json events.json --table events.md
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from osciformer.bench.events import cells as cell_files
from osciformer.bench.events.cells import MODELS, Cell, find_model, make_cells, run_cell
from osciformer.bench.events.datasets import REPEATS, TASKS
from osciformer.bench.events.neural import TrainingSettings
from osciformer.bench.events.report import check_models, document, markdown, read_speeds
from osciformer.bench.report import progress
from osciformer.bench.workers import Row, run_jobs

_PATHS = ("-o", "--output", "--json", "--table")
_BAR = 24
#: Exit codes: some cells failed; some are missing, since time ran out; Ctrl-C.
FAILED, UNFINISHED, INTERRUPTED = 1, 3, 130


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 0 if no cell is missing."""
    options = make_parser().parse_args(list(argv))
    try:
        check_models(options.models)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["osciformer", "bench", "events", *_without_folders(argv)])
    status = 0
    if not options.report_only:
        try:
            status = run_speed(options, command) if options.speed else run_table(options, command)
        except KeyboardInterrupt:
            progress("stopped; finished cells are kept, and the same command goes on")
            return INTERRUPTED
    write_report(options, command)
    return status


def run_table(options: argparse.Namespace, command: str) -> int:
    """Run the cells that the folder lacks, and return the exit status."""
    repeats = {"fold": options.folds, "seed": options.seeds}
    cells = make_cells(options.datasets, options.models, repeats)
    folder: Path = options.output
    waiting = cell_files.unfinished(cells, folder)
    settings = {
        "training": asdict(_training(options)),
        "folder": str(folder),
        "pilot": options.seeds[0],
        "with_predictions": not options.likelihood_only,
    }
    origin = cell_files.describe_origin(command, options.device, options.commit)

    def is_ready(job: dict[str, Any]) -> bool:
        """Seeds wait for the one that chooses the learning rate, unless it is not asked for."""
        pilot = Cell(job["dataset"], job["model"], options.seeds[0])
        cell = Cell(**job)
        if not cell_files.needs_pilot(cell) or cell == pilot or pilot not in cells:
            return True
        return pilot.path(folder).is_file()

    board = _Board(len(cells), len(waiting))
    deadline = time.monotonic() + 60.0 * options.minutes
    for job, row in run_jobs(
        [asdict(cell) for cell in waiting],
        run_cell,
        settings,
        num_workers=options.jobs,
        deadline=deadline,
        is_ready=is_ready,
    ):
        cell_files.write_cell(Cell(**job), folder, row, origin)
        board.tell(job, row)
    missing = cell_files.unfinished(cells, folder)
    if board.num_failed:
        return FAILED
    return UNFINISHED if missing else 0


def run_speed(options: argparse.Namespace, command: str) -> int:
    """Time an epoch of each neural model on each data set, one after the other."""
    names = [name for name in options.models if find_model(name).kind == "neural"]
    settings = {"training": asdict(_training(options)), "folder": str(options.output)}
    origin = cell_files.describe_origin(command, options.device, options.commit)
    folder: Path = options.output / "speed"
    jobs = [
        {"dataset": dataset, "model": name, "repeat": TASKS[dataset].repeats[0], "is_timing": True}
        for dataset in options.datasets
        for name in names
        if not (folder / f"{dataset}--{name}.json").is_file()
    ]
    board = _Board(len(options.datasets) * len(names), len(jobs))
    deadline = time.monotonic() + 60.0 * options.minutes
    for job, row in run_jobs(jobs, run_cell, settings, num_workers=1, deadline=deadline):
        board.tell(job, row)
        if row.get("error") is None:
            content = {"dataset": job["dataset"], "model": job["model"], **row, "origin": origin}
            path = folder / f"{job['dataset']}--{job['model']}.json"
            cell_files.write_json(path, content)
    if board.num_failed:
        return FAILED
    return UNFINISHED if board.done < board.total else 0


def write_report(options: argparse.Namespace, command: str) -> None:
    """Write the table of all cells in the folder: to files, or to standard output."""
    rows, speeds = cell_files.read_cells(options.output), read_speeds(options.output)
    page = markdown(rows, speeds, command)
    if options.json is not None:
        cell_files.write_json(options.json, document(rows, speeds, command))
    if options.table is not None:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        options.table.write_text(page, encoding="utf-8")
    else:
        print(page, flush=True)


class _Board:
    """Tells how far a run has come.

    Args:
        total: Number of cells, those that were there before among them.
        waiting: Number of cells that are to run.
    """

    def __init__(self, total: int, waiting: int) -> None:
        self.total, self.done, self.num_failed = total, total - waiting, 0
        self._began = time.monotonic()
        progress(f"{total} cells, {self.done} of them there before")

    def tell(self, job: dict[str, Any], row: Row) -> None:
        """Say which cell is finished, and what it gave."""
        error = row.get("error")
        self.done += error is None
        self.num_failed += error is not None
        filled = round(_BAR * self.done / max(1, self.total))
        bar = "#" * filled + "-" * (_BAR - filled)
        minutes = (time.monotonic() - self._began) / 60
        what = f"{job['dataset']} {job['model']} {job['repeat']}"
        if error is not None:
            said = f"failed: {error}"
        elif "ll_micro" in row:
            said = f"LL {row['ll_micro']:.4f}"
            accuracy = row.get("accuracy")
            said += "" if accuracy is None else f", accuracy {accuracy:.4f}"
            seconds = row.get("fit_seconds")
            said += "" if seconds is None else f", {row.get('epochs', '-')} epochs, {seconds:.0f} s"
            said += ", stopped by the time limit" if row.get("hit_time_limit") else ""
        else:
            said = f"{row['seconds']:.3g} s an epoch"
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        progress(f"[{bar}] {self.done}/{self.total}{failed}, {minutes:.1f} min: {what}: {said}")


def _training(options: argparse.Namespace) -> TrainingSettings:
    checkpoints = options.output / "running" if options.checkpoints else None
    return TrainingSettings(
        learning_rates=tuple(options.learning_rates),
        dropouts=tuple(options.dropouts),
        dims=None if options.dims is None else tuple(options.dims),
        num_layers=options.num_layers,
        steps=options.steps,
        max_epochs=options.max_epochs,
        patience=options.patience,
        batch_size=options.batch_size,
        device=options.device,
        cell_minutes=options.cell_minutes,
        checkpoints=None if checkpoints is None else str(checkpoints),
    )


def _without_folders(argv: Sequence[str]) -> list[str]:
    """Return the arguments with names in place of paths, which say nothing elsewhere."""
    shown = list(argv)
    for place, argument in enumerate(shown):
        if os.path.isabs(argument) and place and shown[place - 1] in _PATHS:
            shown[place] = Path(argument).name
    return shown


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    defaults = TrainingSettings()
    parser = argparse.ArgumentParser(
        prog="osciformer bench events",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, help="folder of the cells")
    add("--json", type=Path, help="write every cell and a summary to this file")
    add("--table", type=Path, help="Markdown file; without it, standard output")
    standard = [name for name, task in TASKS.items() if task.is_default]
    add("--datasets", type=_among(TASKS), default=standard, help=f"of {','.join(TASKS)}")
    add(
        "--models",
        type=lambda text: text.split(","),
        default=list(MODELS),
        help=f"of {','.join(MODELS)}, or ENCODER+HEAD",
    )
    for name in ("fold", "seed"):
        shown = ",".join(map(str, REPEATS[name]))
        add(f"--{name}s", type=_numbers, default=list(REPEATS[name]), help=f"{shown} by default")
    add("--jobs", type=_positive, default=1, help="processes, of one thread each")
    add("--device", default="cpu", help="cpu or cuda; of neural models")
    add("--minutes", type=float, default=math.inf, help="after which cells are stopped; status 3")
    add("--cell-minutes", type=float, help="after which a cell takes its best epoch so far")
    add("--steps", type=_positive, default=defaults.steps, help="about, of a training; 2000")
    add("--max-epochs", type=_positive, help="by default for that many steps, 10 to 200")
    add("--patience", type=_positive, help="by default a fifth of the epochs, at least 10")
    add("--batch-size", type=_positive, help="by default an eighth of the sequences, 8 to 64")
    add("--learning-rates", type=_rates, default=list(defaults.learning_rates))
    add("--dropouts", type=_rates, default=list(defaults.dropouts))
    add("--dims", type=_numbers, help="widths to choose among, in place of that of each model")
    add("--num-layers", type=_positive, help="blocks of all neural models, likewise")
    add("--checkpoints", action="store_true", help="let killed trainings go on where they were")
    add("--likelihood-only", action="store_true", help="no predictions, which may cost much more")
    add("--speed", action="store_true", help="time epochs, one model at a time, and train nothing")
    add("--report-only", action="store_true", help="run nothing")
    add("--commit", help="of the code, to record")
    return parser


def _among(allowed: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(
                    f"there is no {name!r}; choose among {', '.join(allowed)}"
                )
        return names

    return parse


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
