"""Mortality in PhysioNet 2012 by the command line alone: trained on set-a, scored on set-b.

    PYTHONPATH=src python benchmarks/physionet2012.py --work runs --output OUT.json --table OUT.md
    PYTHONPATH=src python benchmarks/physionet2012.py --work two --models osciformer --threads 2
    PYTHONPATH=src python benchmarks/physionet2012.py --work toy --demo --fit-options="--dim 8"

Each job (a model, a seed) is `osciformer fit` with default settings, `osciformer evaluate` and
`osciformer predict`, each a process of its own, one after the other; the JSON file has the
commands. Set-b is used for scores alone: `fit` keeps a tenth of set-a to choose the epoch by. The
neural baselines are other backbones in the same harness, with the same inputs and statistics, twice
the width, and one of two learning rates, chosen by the validation AUROC at the first seed;
`boosting` is `summary_boosting.py` beside this file. A stay without measurements has no row in a
table, so that no model can predict it: for all models alike it is given the frequency of deaths in
set-a, and all stays of set-b are scored.

Finished jobs are kept in the work folder and skipped when the command is given again; the JSON file
and the tables are written anew after each job. The data are downloaded, or found through the
environment variable OSCIFORMER_DATA.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from attention_gpu.document import describe, finite, markdown_table, write_text
from command_line_jobs import SCORES, FailedJob, Row, Tables, Truth, Workplace

from osciformer.bench.report import progress

PHYSIONET = Tables(
    train="set-a.parquet",
    test="set-b.parquet",
    id="id",
    time="time",
    target="label",
    static=("Age", "Gender", "Height", "ICUType", "static_Weight"),
    dataset="physionet2012",
)
DEMO = Tables(
    train="stays-train.parquet",
    test="stays-test.parquet",
    id="record_id",
    time="minute",
    target="in_hospital_death",
    static=("Age", "Gender", "Height", "ICUType", "AdmissionWeight"),
    dataset=None,
)
#: The width of the baselines; the default, 32, was chosen for OsciFormer.
WIDE = ("--dim=64", "--num-heads=2")
#: Flags of `osciformer fit`, in the order in which models run; `boosting` has a script of its own.
MODELS: dict[str, tuple[str, ...]] = {
    "osciformer": (),
    "transformer": ("--backbone=transformer", *WIDE),
    "gru_d": ("--backbone=gru_d", *WIDE),
    "boosting": (),
}
#: Models for which a learning rate is chosen, and the rates; None is the default.
TUNED = ("transformer", "gru_d")
RATES = (None, 2e-3)
#: What tables show: key of a row, title, format.
COLUMNS = (
    ("auroc", "AUROC", "{:.4f}"),
    ("auprc", "AUPRC", "{:.4f}"),
    ("log_loss", "log loss", "{:.4f}"),
    ("epochs", "epochs", "{:.0f}"),
    ("wall_s", "wall s", "{:.0f}"),
    ("cpu_s", "CPU s", "{:.0f}"),
)


class Bench:
    """The jobs that the options ask for.

    Args:
        options: Of the command line.
        command: The command, to be recorded.
    """

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options = options
        self.meta = describe(command, torch.device("cpu"), options.commit)
        for package in ("scikit-learn", "pytorch-lightning", "pyarrow"):
            self.meta[package] = importlib.metadata.version(package)
        self.meta["threads"] = options.threads
        self.meta.pop("triton")
        tables = DEMO if options.demo else PHYSIONET
        self.place = Workplace(
            options.work.absolute(), tables, options.threads, self.meta["commit"]
        )
        self.rows: list[Row] = []
        self.compared: dict[str, Row] = {}
        self.num_failed = 0

    def run(self) -> None:
        """Run all jobs, or take their rows from the work folder."""
        truth = self.place.prepare()
        first, *others = self.options.seeds
        for model in self.options.models:
            for rate in self.options.learning_rates if model in TUNED else (None,):
                self._add(model, rate, first, truth)
            for seed in others:
                self._add(model, chosen_rate(self.rows, model, first), seed, truth)
        self._compare(truth)

    def _add(self, model: str, rate: float | None, seed: int, truth: Truth) -> None:
        name = job_name(model, rate, seed)
        job = {"model": model, "seed": seed, "learning_rate": rate}
        try:
            row = self.place.row(job, name, self._commands(model, rate, seed, name), truth)
        except FailedJob as error:
            progress(f"failed: {error}")
            self.num_failed += 1
            return
        self.rows.append(row)
        self._save()
        progress(
            f"{row['date']} {name}: AUROC {row['auroc']:.4f} (validation "
            f"{row['validation_auroc']:.4f}), AUPRC {row['auprc']:.4f}, {row['epochs']} epochs, "
            f"{row['wall_s']} s, {row['cpu_s']} s of processor time"
        )

    def _commands(self, model: str, rate: float | None, seed: int, name: str) -> list[list[str]]:
        tables, run, found = self.place.tables, f"{name}/run", f"{name}/predictions.parquet"
        more = [*tables.flags, f"--seed={seed}"]
        if model == "boosting":
            script = ["python", "benchmarks/summary_boosting.py", tables.train, tables.test]
            if self.options.max_trees is not None:
                more.append(f"--max-trees={self.options.max_trees}")
            return [[*script, *more, "--metrics", f"{run}/metrics.json", "-o", found]]
        flags = [*MODELS[model], *([] if rate is None else [f"--learning-rate={rate:g}"])]
        flags += shlex.split(self.options.fit_options)
        task = ["--task", "classification", "--progress", "lines"]
        scores = ["--json", "-o", f"{name}/evaluate.json"]
        return [
            ["osciformer", "fit", tables.train, *task, *more, *flags, "-o", run],
            ["osciformer", "evaluate", run, tables.test, *scores],
            ["osciformer", "predict", run, tables.test, "-o", found],
        ]

    def _compare(self, truth: Truth) -> None:
        """Compare the first model with each of the others."""
        chances = {
            model: np.stack(
                [
                    truth.fill(self.place.chances(job_name(model, entry["learning_rate"], seed)))
                    for seed in entry["seeds"]
                ]
            )
            for model, entry in summarize(self.rows, self.options.seeds[0]).items()
        }
        if not chances:
            return
        (first, ours), *others = chances.items()
        self.compared = {
            f"{first} - {model}": truth.compare(ours, theirs) for model, theirs in others
        }
        self._save()

    def _save(self) -> None:
        summary = summarize(self.rows, self.options.seeds[0])
        content = {"meta": self.meta, "summary": summary, "auroc_differences": self.compared}
        content = finite({**content, "rows": self.rows})
        if self.options.output is not None:
            write_text(self.options.output, json.dumps(content, indent=1, allow_nan=False))
        if self.options.table is not None:
            write_text(self.options.table, markdown(self.meta, self.rows, summary, self.compared))


def job_name(model: str, rate: float | None, seed: int) -> str:
    """Return the name of the folder of a job."""
    return f"{model}-seed{seed}" + ("" if rate is None else f"-lr{rate:g}")


def chosen_rate(rows: Sequence[Row], model: str, seed: int) -> float | None:
    """Return the learning rate with the best validation AUROC among runs of one seed.

    Args:
        rows: Of all models.
        model: The model.
        seed: The seed at which all rates were tried.
    """
    tried = [row for row in rows if row["model"] == model and row["seed"] == seed]
    best = max(tried, key=lambda row: row["validation_auroc"], default=None)
    return None if best is None else best["learning_rate"]


def summarize(rows: Sequence[Row], first_seed: int) -> dict[str, Row]:
    """Return mean and standard deviation over seeds of each model, at the chosen learning rate.

    The deviation is that of a sample (n - 1), None for a single seed.
    """
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        rate = chosen_rate(rows, model, first_seed)
        kept = [r for r in rows if r["model"] == model and r["learning_rate"] == rate]
        entry: Row = {"learning_rate": rate, "seeds": [row["seed"] for row in kept]}
        for key in (*SCORES, "epochs", "wall_s", "cpu_s"):
            values = [row[key] for row in kept]
            entry[key] = {"mean": fmean(values), "sd": stdev(values) if len(kept) > 1 else None}
        found[model] = entry
    return found


def markdown(
    meta: Row, rows: Sequence[Row], summary: dict[str, Row], compared: dict[str, Row]
) -> str:
    """Return what was measured as tables: the models, their differences, then every run."""
    titles = [title for _, title, _ in COLUMNS]
    models = []
    for model, entry in summary.items():
        cells = [model, rate_name(entry["learning_rate"]), str(len(entry["seeds"]))]
        for key, _, form in COLUMNS:
            spread = entry[key]["sd"] if key in SCORES else None
            around = "" if spread is None else f" ± {form.format(spread)}"
            cells.append(form.format(entry[key]["mean"]) + around)
        models.append(cells)
    runs = [
        [
            *(row["model"], rate_name(row["learning_rate"]), str(row["seed"])),
            f"{row['validation_auroc']:.4f}",
            *(form.format(row[key]) for key, _, form in COLUMNS),
        ]
        for row in rows
    ]
    lines = [
        "# Mortality in PhysioNet 2012",
        "",
        *(f"- {key}: {entry}" for key, entry in meta.items()),
        "",
        "Mean ± standard deviation over seeds; time of training.",
        "",
        *markdown_table(["model", "learning rate", "seeds", *titles], models),
        "",
        "Differences of mean AUROC, with 95 % intervals of resampled stays.",
        "",
        *(
            f"- {name}: {entry['difference']:+.4f} ({entry['low']:+.4f} to {entry['high']:+.4f})"
            for name, entry in compared.items()
        ),
        "",
        "Every run.",
        "",
        *markdown_table(["model", "learning rate", "seed", "validation AUROC", *titles], runs),
    ]
    return "\n".join(lines)


def rate_name(rate: float | None) -> str:
    """Return a learning rate for a table."""
    return "default" if rate is None else f"{rate:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a job failed, else 0."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = make_parser().parse_args(arguments)
    unknown = [model for model in options.models if model not in MODELS]
    if unknown:
        raise SystemExit(f"there is no model {unknown[0]!r}; known are {', '.join(MODELS)}")
    # Only names: paths say nothing to a reader on another machine.
    shown = [Path(part).name if os.path.isabs(part) else part for part in arguments]
    bench = Bench(options, shlex.join(["python", "benchmarks/physionet2012.py", *shown]))
    bench.run()
    return 1 if bench.num_failed else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""

    def texts(text: str) -> list[str]:
        return text.split(",")

    def seeds(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def rates(text: str) -> list[float | None]:
        return [None if part == "default" else float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder of tables, runs and logs")
    add("--output", type=Path, help="JSON file with every row")
    add("--table", type=Path, help="Markdown file")
    add("--models", type=texts, default=list(MODELS), help=f"of {','.join(MODELS)}")
    add("--seeds", type=seeds, default=list(range(5)), help="0,1,2,3,4 if not given")
    add(
        "--learning-rates",
        type=rates,
        default=list(RATES),
        help="for the neural baselines; default,0.002 if not given",
    )
    add("--threads", type=int, default=1, help="OMP_NUM_THREADS of every process")
    add("--commit", help="of the code; asked of git if not given")
    add("--demo", action="store_true", help="the small data of the package, to see it run")
    add("--fit-options", default="", help="more flags for `osciformer fit`")
    add("--max-trees", type=int, help="for boosting")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
