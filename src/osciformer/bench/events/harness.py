"""`osciformer bench events`: the table of event prediction, cell by cell.

Each cell (a data set, a model, a fold or seed) has a JSON file in the output folder. Cells that are
there are skipped, so that the same command continues a stopped run, and several machines can
share the work; failed cells say why and are tried again. Without OSCIFORMER_DATA the data sets are
downloaded.

    osciformer bench events -o runs/events --jobs 4
    osciformer bench events -o runs/events --datasets taxi --models osciformer,rmtpp --seeds 0
    osciformer bench events -o runs/events --speed --device cuda
    osciformer bench events -o runs/events --report-only --json events.json --table events.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from osciformer._files import write_json, write_text
from osciformer.bench import report as common
from osciformer.bench.events import horizon, models
from osciformer.bench.events.datasets import REPEATS, TASKS, describe_parts
from osciformer.bench.events.models import MODELS, TrainingSettings, find_model
from osciformer.bench.events.report import document, markdown
from osciformer.bench.report import Row, names_among, positive, progress, tuple_of
from osciformer.bench.workers import Job, run_jobs
from osciformer.events import log_likelihood, score

#: Exit codes: some cells failed; some are missing, because time ran out; Ctrl-C.
FAILED, UNFINISHED, INTERRUPTED = 1, 3, 130
_PACKAGES = ("pytorch-lightning", "scikit-learn", "pyarrow")
# Tolerances of integrals. Those of networks cost much; the error of their likelihood is reported.
_CLOSELY: dict[str, Any] = {"prediction_tolerance": 1e-4}
_ROUGHLY: dict[str, Any] = {"tolerance": 5e-4, "max_halvings": 4, "prediction_tolerance": 1e-3}
_PREDICTIONS = ("accuracy", "accuracy_at_time", "time_rmse", "time_mae", "horizon", "never")
_EVENTS_AT_ONCE = 1024  # to score; some encoders have a state for each pair of them
# Time of an epoch of an encoder relative to RMTPP, roughly, and of a fit of a classical model; then
# the events of a training set times the epochs, in thousands.
_COST = {
    **{"osciformer": 4.0, "rmtpp": 1.0, "neural_hawkes": 10.0, "transformer_hawkes": 1.5},
    **{"ode_rnn": 12.0, "mtan": 3.0, "contiformer": 12.0, "hawkes": 0.5},
    **{"attnhp": 4.0, "s2p2": 3.0},
}
_SIZE = {"stackoverflow": 45 * 184, "hawkes": 63 * 108, "taxi": 91 * 52}
_SIZE |= {"taobao": 96 * 75, "taobao_alike": 96 * 75, "taobao_folds": 67 * 17}


class Cell(NamedTuple):
    """A data set, a model, a fold or seed; or the timing of an epoch, at any repeat."""

    dataset: str
    model: str
    repeat: int
    is_timing: bool = False

    @property
    def needs_pilot(self) -> bool:
        """Whether one seed chooses the learning rate of all."""
        # Folds choose for themselves: the dev part of one may be in the test part of another.
        return TASKS[self.dataset].repeat == "seed" and find_model(self.model).is_random

    @property
    def cost(self) -> float:
        """Time it takes, roughly, in any unit."""
        network = find_model(self.model).network
        encoder = self.model if network is None else network.encoder
        return _SIZE.get(self.dataset, 200 * 10) * _COST.get(encoder, 0.01)

    def path(self, folder: Path) -> Path:
        """Return the file of the cell."""
        name, repeat = f"{self.dataset}--{self.model}", f"{TASKS[self.dataset].repeat}{self.repeat}"
        return folder / (f"speed/{name}.json" if self.is_timing else f"{name}--{repeat}.json")


def make_cells(
    datasets: Sequence[str],
    names: Sequence[str],
    repeats: Mapping[str, Sequence[int]],
    with_horizon: bool = False,
) -> list[Cell]:
    """Return the cells of a table: those that choose learning rates first, then the costliest."""
    cells = []
    for dataset, name in itertools.product(datasets, names):
        task, model = TASKS[dataset], find_model(name)
        is_known = {"truth": task.truth is not None, "rule": with_horizon}.get(model.kind, True)
        if is_known and not (model.is_about_types and task.num_types == 1):
            numbers = [number for number in repeats[task.repeat] if number in task.repeats]
            is_constant = task.repeat == "seed" and not model.is_random
            cells += [Cell(dataset, name, n) for n in (numbers[:1] if is_constant else numbers)]
    pilot = repeats["seed"][0]
    return sorted(cells, key=lambda c: (not (c.needs_pilot and c.repeat == pilot), -c.cost))


def run_cell(job: Job, settings: Mapping[str, Any]) -> Row:
    """Fit and score a model, or time an epoch, by the settings of `run`; a worker does this."""
    cell, training = Cell(**job), TrainingSettings(**settings["training"])
    task, model = TASKS[cell.dataset], find_model(cell.model)
    parts = task.load(cell.repeat)
    if cell.is_timing:
        assert model.network is not None
        found = models.seconds_per_epoch(model.network, parts.train, training)
        return {**found, "device": training.device}
    if model.fit is None:
        return {"data": describe_parts(parts), **horizon.score_rule(cell.model, parts)}
    tried = training
    if cell.needs_pilot and cell.repeat != settings["pilot"]:
        pilot = cell._replace(repeat=settings["pilot"]).path(Path(settings["folder"]))
        # Without the cell of the pilot, the seed chooses for itself.
        with suppress(OSError, KeyError, TypeError, ValueError):
            chosen = json.loads(pilot.read_text(encoding="utf-8"))["chosen"]
            tried = replace(training, learning_rates=(float(chosen["learning_rate"]),))
    fitted = model.fit(models.FitRequest(task, parts.train, parts.dev, cell.repeat, tried))
    began = time.perf_counter()
    # Nothing has seen the test part before.
    tolerances = dict(_ROUGHLY if model.kind == "neural" else _CLOSELY)
    tolerances["batch_size"] = max(1, _EVENTS_AT_ONCE // int(parts.test.lengths.max()))
    predictions: Row = dict.fromkeys(_PREDICTIONS)
    if settings.get("with_predictions", True):
        tolerances |= {"horizon": float(parts.train.gaps.max()), "expectation": "restricted"}
        scores = score(fitted.process, parts.test, **tolerances)
        likelihood = scores.log_likelihood
        predictions = {name: getattr(scores, name) for name in _PREDICTIONS}
    else:
        del tolerances["prediction_tolerance"]
        likelihood = log_likelihood(fitted.process, parts.test, **tolerances)
    if not math.isfinite(likelihood.micro):
        raise FloatingPointError(f"the test log-likelihood is {likelihood.micro}")
    score_seconds = round(time.perf_counter() - began, 2)
    ahead = horizon.score_process(fitted.process, parts) if settings.get("with_horizon") else {}
    decisive = {k: v for k, v in asdict(training).items() if k not in ("device", "checkpoints")}
    return {
        **{f"ll_{name}": getattr(likelihood, name) for name in ("micro", "macro", "error")},
        **predictions,
        "num_scored": likelihood.num_scored,
        "dev_ll": fitted.dev_ll,
        "parameters": fitted.parameters,
        "chosen": dict(fitted.chosen),
        **fitted.training,
        "score_seconds": score_seconds,
        "device": str(fitted.process.device),
        "data": describe_parts(parts),
        "training": decisive if model.kind == "neural" else None,
        **ahead,
    }


def read_cells(folder: Path, pattern: str = "*--*--*.json") -> list[Row]:
    """Return the contents of all cells in a folder, including failed ones."""
    rows = []
    for path in sorted(folder.glob(pattern)):
        try:
            rows.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON; delete it to run its cell again") from error
    return rows


def unfinished(cells: Iterable[Cell], folder: Path) -> list[Cell]:
    """Return the cells without a file, or whose file says that they failed."""
    rows = read_cells(folder)
    done = {(r["dataset"], r["model"], r["repeat"]) for r in rows if r["error"] is None}
    return [c for c in cells if not (c.path(folder).is_file() if c.is_timing else c[:3] in done)]


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 0 if no cell is missing."""
    options = make_parser().parse_args(list(argv))
    try:
        for name in options.models:
            find_model(name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = common.shown_command("osciformer", "bench", "events", arguments=argv)
    status = 0
    if not options.report_only:
        try:
            status = run(options, command)
        except KeyboardInterrupt:
            progress("stopped; finished cells are kept, and the same command continues")
            return INTERRUPTED
    rows, speeds = read_cells(options.output), read_cells(options.output / "speed", "*.json")
    if options.json is not None:
        write_json(options.json, document(rows, speeds, command), indent=1)
    notes = "" if options.notes is None else options.notes.read_text(encoding="utf-8")
    page = markdown(rows, speeds, command, notes)
    if options.table is None:
        print(page, flush=True)
    else:
        write_text(options.table, page)
    return status


def run(options: argparse.Namespace, command: str) -> int:
    """Run the cells that the folder lacks, and return the exit status."""
    folder: Path = options.output
    if options.speed:
        names = [name for name in options.models if find_model(name).kind == "neural"]
        cells = [Cell(d, m, TASKS[d].repeats[0], True) for d in options.datasets for m in names]
    else:
        repeats = {"fold": options.folds, "seed": options.seeds}
        cells = make_cells(options.datasets, options.models, repeats, options.horizon)
    options.checkpoints = str(folder / "running") if options.checkpoints else None
    known = asdict(TrainingSettings())
    training = known | {k: v for k, v in vars(options).items() if k in known}
    settings = {"training": training, "folder": str(folder), "pilot": options.seeds[0]}
    settings["with_predictions"] = not options.likelihood_only
    settings["with_horizon"] = options.horizon
    origin = common.describe_run(command, torch.device(options.device), packages=_PACKAGES)
    origin["commit"] = options.commit

    def is_ready(job: Job) -> bool:
        # Seeds wait for the one that chooses the learning rate, if it is among the cells.
        cell = Cell(**job)
        pilot = cell._replace(repeat=options.seeds[0])
        is_free = cell.is_timing or not cell.needs_pilot or cell == pilot or pilot not in cells
        return is_free or pilot.path(folder).is_file()

    jobs = [cell._asdict() for cell in unfinished(cells, folder)]
    done, failed, began = len(cells) - len(jobs), 0, time.monotonic()
    progress(f"{len(cells)} cells, {done} of them there before")
    limits = {"num_workers": 1 if options.speed else options.jobs}
    limits["deadline"] = began + 60.0 * options.minutes
    for job, row in run_jobs(jobs, run_cell, settings, is_ready=is_ready, **limits):
        cell = Cell(**job)
        content: Row = {"dataset": cell.dataset, "model": cell.model}
        if not cell.is_timing:
            content |= {"repeat": cell.repeat, "error": None}
        if not (cell.is_timing and "error" in row):
            write_json(cell.path(folder), {**content, **row, "origin": origin}, indent=1)
        done, failed = done + ("error" not in row), failed + ("error" in row)
        state = f"{done}/{len(cells)}{f', {failed} failed' if failed else ''}"
        progress(f"{state}, {(time.monotonic() - began) / 60:.1f} min: {_told(cell, row)}")
    return FAILED if failed else UNFINISHED if unfinished(cells, folder) else 0


def _told(cell: Cell, row: Row) -> str:
    shown = {"LL": "ll_micro", "accuracy": "accuracy", "epochs": "epochs", "seconds": "fit_seconds"}
    words = [f"{name} {row[key]:.5g}" for name, key in shown.items() if row.get(key) is not None]
    words += ["stopped by the time limit"] if row.get("hit_time_limit") else []
    if cell.is_timing and "error" not in row:
        words = [f"{row['seconds']:.3g} s an epoch"]
    told = f"failed: {row['error']}" if "error" in row else ", ".join(words)
    return f"{cell.dataset} {cell.model} {cell.repeat}: {told}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    defaults = TrainingSettings()
    parser = argparse.ArgumentParser(prog="osciformer bench events", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, help="folder of the cells")
    add("--json", type=Path, help="write every cell and a summary to this file")
    add("--table", type=Path, help="Markdown file; without it, standard output")
    add("--notes", type=Path, help="Markdown file that the page has after its overviews")
    standard, names = [n for n, task in TASKS.items() if task.is_default], names_among(TASKS)
    add("--datasets", type=names, default=standard, help=f"of {','.join(TASKS)}")
    known = f"of {','.join(MODELS)}, or ENCODER+HEAD"
    add("--models", type=tuple_of(str), default=list(MODELS), help=known)
    for name, numbers in REPEATS.items():
        shown = ",".join(map(str, numbers))
        add(f"--{name}s", type=tuple_of(int), default=numbers, help=f"{shown} by default")
    add("--jobs", type=positive, default=1, help="processes, of one thread each")
    add("--device", default="cpu", help="cpu or cuda; of neural models")
    add("--minutes", type=float, default=math.inf, help="after which cells are stopped; status 3")
    add("--cell-minutes", type=float, help="after which a cell takes its best epoch so far")
    add("--steps", type=positive, default=defaults.steps, help="about, of a training; 2000")
    add("--max-epochs", type=positive, help="by default for that many steps, 10 to 200")
    add("--patience", type=positive, help="by default a fifth of the epochs, at least 10")
    add("--batch-size", type=positive, help="by default an eighth of the sequences, 8 to 64")
    add("--learning-rates", type=tuple_of(float), default=defaults.learning_rates)
    add("--dropouts", type=tuple_of(float), default=defaults.dropouts)
    add("--dims", type=tuple_of(int), help="widths to choose among, instead of each model's own")
    add("--num-layers", type=positive, help="blocks of all neural models, likewise")
    add("--checkpoints", action="store_true", help="let killed trainings continue later")
    add("--likelihood-only", action="store_true", help="no predictions, which may cost much more")
    add("--horizon", action="store_true", help="also score the last ten events, drawn at once")
    add("--speed", action="store_true", help="time epochs, one model at a time, and train nothing")
    add("--report-only", action="store_true", help="run nothing")
    add("--commit", help="of the code, to record")
    return parser
