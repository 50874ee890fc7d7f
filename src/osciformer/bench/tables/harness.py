"""The protocol of all tables: settings chosen on validation parts, test parts scored once a seed.

At the first seed each setting of a model's grid is tried, a job each; the one that is best on the
validation part is then used at every seed. Neural models have the same grid and the same epochs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from osciformer.bench.documents import Document, mean_of_seeds, spread
from osciformer.bench.report import Row, markdown_table, names_among
from osciformer.bench.speed import peak_mib
from osciformer.bench.suite import COLOURS, Benchmark, new_figure, rounded
from osciformer.bench.tables.models import Fitted, Model, find_model, model_names
from osciformer.bench.tables.problem import METRICS, RISING, Metric, Part, Problem, Task
from osciformer.bench.workers import Job, Work

#: What a suite may keep of a fitted model for its picture.
Keep = Callable[[Problem, Fitted], Row]
SIZES = ("small", "full")
#: So many cases have a table of their own.
MANY = 3
MOST_COLUMNS = 4  # of a picture


@dataclass(frozen=True, kw_only=True)
class Table(Benchmark):
    """A table of models; its `rows` are cases, each a problem.

    Args:
        module: The module that has it as `SUITE`, for other processes.
        load: Returns the problem of a case, a seed and a size.
        tasks: The task of each case, or of all.
        sizes: What `load` is given, by `small`, `full` and `quick`.
        note: What a reader must know of data and protocol.
        own: Models of this suite alone, by name.
        metrics: How answers are scored; the first one decides on the validation part.
        published: Published figures by case and model, as they were printed.
        source: Where they are from.
        keep: What the rows of the first seed keep for the picture.
    """

    module: str
    load: Callable[[str, int, Mapping[str, Any]], Problem]
    tasks: Task | Mapping[str, Task]
    sizes: Mapping[str, Mapping[str, Any]]
    note: str
    own: Mapping[str, Model] = field(default_factory=dict)
    metrics: Mapping[str, Metric] | None = None
    published: Mapping[tuple[str, str], str] = field(default_factory=dict)
    source: str = ""
    keep: Keep | None = None
    seeds: int = 5

    def task(self, case: str) -> Task:
        """Return the task of a case."""
        return self.tasks[case] if isinstance(self.tasks, Mapping) else self.tasks

    def metrics_of(self, case: str) -> Mapping[str, Metric]:
        """Return the metrics of a case, the deciding one first."""
        return self.metrics or METRICS[self.task(case)]

    @property
    def models(self) -> list[str]:
        """Names of all models that can do a case."""
        names = [name for case in self.rows for name in model_names(self.task(case), self.own)]
        return list(dict.fromkeys(names))

    def with_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Return the parser with models and sizes."""
        known = self.models
        told = f"of {','.join(known)}; all by default"
        parser.add_argument("--models", type=names_among(known), default=known, help=told)
        told = "of data and training; small is for a CPU"
        parser.add_argument("--size", choices=SIZES, default=SIZES[0], help=told)
        told = "that networks are trained on: cpu (one thread a process) or cuda"
        parser.add_argument("--device", default="cpu", help=told)
        return parser

    def settings_of(self, options: argparse.Namespace) -> Row:
        """Return the name of the suite and of the size."""
        return {"suite": self.module, "size": "quick" if options.quick else options.size}

    def work_on(self, options: argparse.Namespace) -> Work:
        """Return what does a job."""
        return functools.partial(run_cell, device=options.device)

    def jobs_of(self, options: argparse.Namespace) -> list[Job]:
        """Return trials and then scores, model by model; further seeds come last."""
        jobs: list[Job] = []
        for seed in range(1 if options.quick else options.seeds):
            for name in options.models:
                for case in options.rows:
                    if name not in model_names(self.task(case), self.own):
                        continue
                    job = {"case": case, "model": name, "seed": seed}
                    if seed == 0:
                        jobs += [{**job, "trial": n} for n in self._trials(job)]
                    jobs.append({**job, "trial": None})
        return jobs

    def _trials(self, job: Job) -> range:
        count = len(find_model(job["model"], self.task(job["case"]), self.own).grid)
        return range(count if count > 1 else 0)

    def is_ready(self, document: Document, job: Job) -> bool:
        """Return whether the trials of a job's cell are done."""
        trials = [{**job, "seed": 0, "trial": n} for n in self._trials(job)]
        return job["trial"] is not None or not document.missing(trials)

    def chosen(self, job: Job, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Return the settings of a job: those of its trial, or of the best trial among rows."""
        case = job["case"]
        grid = find_model(job["model"], self.task(case), self.own).grid
        if job["trial"] is not None or len(grid) == 1:
            return grid[job["trial"] or 0]
        cell = case, job["model"], 0
        mine = [r for r in rows if (r["case"], r["model"], r["seed"]) == cell]
        tried = {r["trial"]: r["validation"] for r in mine if r["trial"] is not None}
        if set(tried) != set(range(len(grid))):
            raise RuntimeError("its trials are not all there; run the command again")
        sign = 1 if next(iter(self.metrics_of(case))) in RISING else -1
        finite = {n: sign * score for n, score in tried.items() if score is not None}
        if not finite:
            raise FloatingPointError("every trial diverged")
        return grid[max(finite, key=lambda n: (finite[n], -n))]

    def tables_of(self, document: Document) -> list[str]:
        """Return the lines of the Markdown file."""
        finals = [row for row in document.finished if row["trial"] is None]
        seeds = len({row["seed"] for row in finals})
        lines = [f"# {self.name}: {self.summary}", "", self.note, "", self._protocol(document)]
        lines += self._overview(finals, seeds)
        for case in self.rows:
            mine = [row for row in finals if row["case"] == case]
            if mine:
                lines += ["", f"## {case}", "", *self._table(case, mine, seeds)]
        if self.published:
            lines += ["", f"Published: {self.source}."]
        return [*lines, "", *document.origin()]

    def _overview(self, rows: Sequence[Row], seeds: int) -> list[str]:
        """Return a table of all cases and models, if there are many cases of one test."""
        cases = [case for case in self.rows if any(row["case"] == case for row in rows)]
        if len(cases) < MANY or any(len(row["scores"]) > 1 for row in rows):
            return []
        names = [name for name in self.models if any(row["model"] == name for row in rows)]
        found: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            (scores,) = row["scores"].values()
            metric = next(iter(self.metrics_of(row["case"])))
            found.setdefault((row["case"], row["model"]), []).append(scores[metric])
        body = [
            [c, *(mean_of_seeds(found.get((c, n), []), seeds, self._form(c)) for n in names)]
            for c in cases
        ]
        means = {
            n: [statistics.fmean(found[c, n]) for c in cases if (c, n) in found] for n in names
        }
        whole = (means[n] if len(means[n]) == len(cases) else [] for n in names)
        mean = [spread([statistics.fmean(m)] if m else [], self._form(cases[0])) for m in whole]
        return ["", *markdown_table(["case", *names], [*body, ["mean", *mean]])]

    def _form(self, case: str) -> str:
        return "{:.2f}" if next(iter(self.metrics_of(case))) in RISING else "{:.4g}"

    def _protocol(self, document: Document) -> str:
        size = document.settings["size"]
        budget = ", ".join(f"{key} {value}" for key, value in self.sizes[size].items())
        return (
            f"Size {size}: {budget}. Mean ± standard deviation over seeds, 0 for a model without "
            "randomness where all seeds have the same data; in brackets their number where it is "
            "not that of the others. Seconds are those of an epoch (of a whole "
            "fit without a network): of one processor, or by the clock where cuda stands behind "
            "them. MiB is what a fit adds to the memory of the process, or of the device."
        )

    def _table(self, case: str, rows: Sequence[Row], seeds: int) -> list[str]:
        metrics = list(self.metrics_of(case))
        form = self._form(case)
        tests = list(rows[0]["scores"])
        is_printed = any(of == case for of, _ in self.published)
        body = []
        for name in model_names(self.task(case), self.own):
            mine = [row for row in rows if row["model"] == name]
            printed = self.published.get((case, name))
            if not mine:
                continue
            line = [name]
            for test in tests:
                for metric in metrics:
                    found = [row["scores"][test][metric] for row in mine]
                    line.append(mean_of_seeds(found, seeds, form))
            line += [printed or "-"] if is_printed else []
            line.append(", ".join(f"{k} {v:g}" for k, v in mine[0]["chosen"].items()) or "-")
            for key, shape in (("epochs", "{:.0f}"), ("parameters", "{:,.0f}")):
                line.append(shape.format(mine[0][key]) if key in mine[0] else "-")
            cost = mine[0].get("epoch_seconds", mine[0].get("fit_seconds"))
            where = "" if mine[0].get("device", "cpu") == "cpu" else " cuda"
            line.append("-" if cost is None else f"{cost:.3g}{where}")
            line.append(spread([row["mib"] for row in mine[:1] if row.get("mib")], "{:.0f}"))
            body.append(line)
        columns = ["model", *(f"{t}: {m}" for t in tests for m in metrics)]
        columns += ["published"] if is_printed else []
        columns += ["chosen", "epochs", "parameters", "s", "MiB"]
        return markdown_table(columns, body)

    def figures(self) -> Mapping[str, Callable[[Document], Any]]:
        """Return what draws the scores, and pictures of the suite's own."""
        return {f"table_{self.name}": self.draw, **self.pictures}

    def draw(self, document: Document) -> Any:
        """Return the figure: the first metric of each model on each test, a panel per case."""
        finals = [row for row in document.finished if row["trial"] is None]
        cases = [case for case in self.rows if any(row["case"] == case for row in finals)]
        names = [name for name in self.models if any(row["model"] == name for row in finals)]
        columns = min(len(cases), MOST_COLUMNS)
        lines = -(-len(cases) // columns)
        size = 2.0 + 3.2 * columns, lines * (1.0 + 0.24 * len(names))
        figure, panels = new_figure(lines, columns, size)
        for axis in panels.flat[len(cases) :]:
            axis.set_axis_off()
        for number, case in enumerate(cases):
            axis = panels.flat[number]
            metric = next(iter(self.metrics_of(case)))
            mine = [row for row in finals if row["case"] == case]
            for place, test in enumerate(mine[0]["scores"]):
                marks = {"fmt": "osd^"[place % 4], "ms": 5, "capsize": 3, "color": COLOURS[place]}
                axis.errorbar([], [], label=test, **marks)
                for height, name in enumerate(names):
                    found = [r["scores"][test][metric] for r in mine if r["model"] == name]
                    if found:
                        # Rounding may put the mean of equal scores beside them.
                        mean = min(max(statistics.fmean(found), min(found)), max(found))
                        reach = [[mean - min(found)], [max(found) - mean]]
                        axis.errorbar(mean, height, xerr=reach, **marks)
            axis.set(ylim=(len(names) - 0.5, -0.5), xlabel=metric, title=case)
            axis.set_yticks(range(len(names)), [] if number % columns else names)
            if len(mine[0]["scores"]) > 1:
                axis.legend(fontsize=7)
        return figure


def find_table(module: str) -> Table:
    """Return the table of a module."""
    found: Table = importlib.import_module(f"osciformer.bench.tables.{module}").SUITE
    return found


def run_cell(job: Job, settings: Mapping[str, Any], *, device: str = "cpu") -> Row:
    """Fit a model and score it: on the validation part, and if it is no trial on the tests."""
    table = find_table(settings["suite"])
    case, is_trial = job["case"], job["trial"] is not None
    rows = [] if is_trial else _finished(Path(settings["file"]))
    chosen = table.chosen(job, rows)
    problem = table.load(case, job["seed"], table.sizes[settings["size"]])
    accelerator = "cpu" if device == "cpu" else "gpu"
    problem = dataclasses.replace(
        problem, settings={**problem.settings, "accelerator": accelerator}
    )
    model = find_model(job["model"], table.task(case), table.own)
    row: Row = {"size": settings["size"], "chosen": dict(chosen), "device": device}
    found: list[Fitted] = []
    try:
        row["mib"] = peak_mib(
            lambda: found.append(model.fit(problem, chosen, job["seed"])), torch.device(device)
        )
    except FloatingPointError as error:
        if not is_trial:
            raise
        return {**row, "validation": None, "diverged": str(error)}
    (fitted,) = found
    metrics = table.metrics_of(case)
    first = next(iter(metrics))
    score = _scores(fitted, problem.validation, {first: metrics[first]})[first]
    row["validation"] = score if math.isfinite(score) else None
    row |= fitted.facts
    if not is_trial:
        row["scores"] = {name: _scores(fitted, p, metrics) for name, p in problem.tests.items()}
        if not all(math.isfinite(x) for one in row["scores"].values() for x in one.values()):
            raise FloatingPointError("its answers to a test part are not finite")
        row["test_sizes"] = {name: len(part.truth) for name, part in problem.tests.items()}
        if table.keep is not None and job["seed"] == 0:
            row |= table.keep(problem, fitted)
    kept: Row = rounded(row)
    return kept


def _finished(path: Path) -> list[Row]:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return [row for row in rows if row["error"] is None]


def _scores(fitted: Fitted, part: Part, metrics: Mapping[str, Metric]) -> dict[str, float]:
    found = fitted.predict(part)
    return {name: metric(part.truth, found) for name, metric in metrics.items()}
