"""Mortality in PhysioNet 2012 by the command line alone: trained on set-a, scored on set-b.

    PYTHONPATH=src python benchmarks/physionet2012.py --work runs --output OUT.json --table OUT.md
    PYTHONPATH=src python benchmarks/physionet2012.py --work two --models osciformer --threads 2
    PYTHONPATH=src python benchmarks/physionet2012.py --work toy --demo --fit-options="--dim 8"

Each job (a model, a seed) is `osciformer fit` with default settings, `osciformer evaluate` and
`osciformer predict`, each a process of its own, one after the other; the JSON file has the
commands. Set-b is used for scores alone: `fit` keeps a tenth of set-a to choose the epoch, and the
weight of the network, by. `osciformer` is a network joined with resonators, `network` and
`resonator` are each of them alone; the first and the last are compared with all others, by
intervals of the same resampled stays. The neural baselines are other backbones in the same harness,
with the same inputs and statistics, twice the width, and one of two learning rates, chosen by the
validation AUROC at the first seed; `boosting` is `summary_boosting.py` beside this file. A stay
without measurements has no row in a table, so that no model can predict it: for all models alike it
is given the frequency of deaths in set-a, and all stays of set-b are scored.

Finished jobs are kept in the work folder and skipped when the command is given again; the JSON file
and the tables are written anew after each job. The data are downloaded, or found through the
environment variable OSCIFORMER_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from pyarrow import parquet
from scipy.stats import rankdata
from shared import describe

from osciformer._files import write_json, write_text
from osciformer.bench.report import Row, markdown_table, progress, tuple_of
from osciformer.cli.evaluate import class_scores
from osciformer.data import IrregularSeries, Layout, get_dataset, read_parquet

HERE = Path(__file__).parent
SCORES = ("auroc", "auprc", "log_loss", "brier", "calibration_error")
#: How often series are resampled for an interval.
ROUNDS = 2000


class FailedJob(Exception):
    """A command ended with an error, or its predictions cannot be scored."""


@dataclass(frozen=True)
class Tables:
    """Two tables in the work folder, and their columns.

    Attributes:
        train: Name of the table to train on.
        test: Name of the table to score.
        id: Column of ids.
        time: Column of times.
        target: Column of classes, 0 and 1.
        static: Static columns.
        dataset: Data set with splits set-a and set-b to get them from; None for the data of the
            package.
    """

    train: str
    test: str
    id: str
    time: str
    target: str
    static: tuple[str, ...]
    dataset: str | None

    @property
    def flags(self) -> list[str]:
        """The columns as flags of a command."""
        columns = {"id": self.id, "time": self.time, "target": self.target}
        columns["static"] = ",".join(self.static)
        return [f"--{name}={column}" for name, column in columns.items()]

    def read(self, path: Path) -> IrregularSeries:
        """Return the series of a table with these columns."""
        layout = Layout(id=self.id, time=self.time, label=self.target, static=self.static)
        return read_parquet(path, layout)


@dataclass(frozen=True)
class Truth:
    """Every series to score, those that no table can hold for want of rows among them.

    Attributes:
        ids: Their ids [n].
        labels: Their classes [n], 0 or 1.
        frequency: Of class 1 in the training set.
    """

    ids: np.ndarray
    labels: np.ndarray
    frequency: float

    def fill(self, chances: dict[Any, float]) -> np.ndarray:
        """Return the probabilities of all series [n]; one without is given the frequency.

        Args:
            chances: Probability of class 1 by id.
        """
        ids = self.ids.tolist()
        unknown = chances.keys() - set(ids)
        if unknown:
            raise FailedJob(f"there are predictions for unknown ids: {sorted(unknown)[:5]}")
        return np.array([chances.get(id, self.frequency) for id in ids])

    def score(self, chances: dict[Any, float]) -> Row:
        """Return the scores of probabilities by id, after `fill`."""
        chance = self.fill(chances)
        found = class_scores(np.stack((1.0 - chance, chance), axis=1), self.labels)
        scores = {name: found[name] for name in SCORES}
        return scores | {"series": len(chance), "without_rows": len(chance) - len(chances)}

    def resample(self, chances: np.ndarray, rounds: int = ROUNDS) -> dict[str, np.ndarray]:
        """Return mean scores of runs on all series, then on resampled ones, [1 + rounds] each.

        The series of each round are the same whatever the runs, so that `compare` pairs them.

        Args:
            chances: Probabilities of the runs [r, n].
            rounds: How often to resample.
        """
        generator, count = np.random.default_rng(0), len(self.labels)
        draws = [np.arange(count), *(generator.integers(0, count, count) for _ in range(rounds))]
        return {
            name: np.array([score(chances[:, index], self.labels[index]) for index in draws])
            for name, score in COMPARED.items()
        }


@dataclass(frozen=True)
class Workplace:
    """Where commands run and what they leave.

    Attributes:
        folder: Work folder, in which commands run, so that their paths are relative to it.
        tables: The tables.
        threads: OMP_NUM_THREADS of each process.
        commit: Of the code.
    """

    folder: Path
    tables: Tables
    threads: int
    commit: str | None

    def prepare(self) -> Truth:
        """Write the tables, if they are not there, and return what is to be predicted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = {"set-a": self.tables.train, "set-b": self.tables.test}
        for split, name in names.items():
            if (self.folder / name).exists():
                continue
            if self.tables.dataset is None:
                shutil.copy(str(files("osciformer") / "demo_data" / name), self.folder / name)
            else:
                get = ["osciformer", "data", "get", self.tables.dataset, "--split", split]
                self.run([*get, "-o", name], self.folder / "data.log")
        if self.tables.dataset is None:
            train, test = (self.tables.read(self.folder / name) for name in names.values())
        else:
            train, test = (get_dataset(self.tables.dataset, split) for split in names)
        return Truth(test.ids, np.asarray(test.labels), float(np.mean(train.labels)))

    def run(self, command: Sequence[str], log: Path) -> tuple[float, float]:
        """Run a command and return its wall and processor seconds.

        Args:
            command: `osciformer ...`, or `python benchmarks/NAME.py ...`.
            log: File to which its output is added.
        """
        if command[0] == "osciformer":
            arguments = [sys.executable, "-m", *command]
        else:
            arguments = [sys.executable, str(HERE / Path(command[1]).name), *command[2:]]
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        start = time.perf_counter()
        with log.open("a", encoding="utf-8") as lines:
            print("$", shlex.join(command), file=lines, flush=True)
            process = subprocess.Popen(
                arguments, cwd=self.folder, stdout=lines, stderr=lines, env=os.environ | threads
            )
            try:
                # Unlike Popen.wait, this says how much processor time the process took.
                _, status, usage = os.wait4(process.pid, 0)
            except BaseException:
                process.terminate()
                raise
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            last = log.read_text(encoding="utf-8").rstrip().splitlines()[-1]
            raise FailedJob(
                f"{shlex.join(command)}: status {process.returncode}: {last}; see {log}"
            )
        return time.perf_counter() - start, usage.ru_utime + usage.ru_stime

    def row(self, job: Row, name: str, commands: Sequence[list[str]], truth: Truth) -> Row:
        """Return the row of a job, from its folder if it has run before.

        Args:
            job: What the row begins with.
            name: Of its folder.
            commands: The first trains and writes `NAME/run/metrics.json`; in the end there are
                `NAME/predictions.parquet` and perhaps `NAME/evaluate.json`.
            truth: What is to be predicted.
        """
        folder = self.folder / name
        kept = folder / "row.json"
        shown = [shlex.join(command) for command in commands]
        if kept.exists():
            row: Row = json.loads(kept.read_text(encoding="utf-8"))
            for key, now in (("commit", self.commit), ("commands", shown)):
                if row[key] != now:
                    raise SystemExit(
                        f"{kept} has the {key} {row[key]}, and this is {now}; take another --work, "
                        "since the rows of a file must be comparable"
                    )
            return row
        shutil.rmtree(folder, ignore_errors=True)  # a job that was stopped begins again
        folder.mkdir(parents=True)
        log = folder / "log.txt"
        wall, cpu = self.run(commands[0], log)
        load = os.getloadavg()[2]
        for command in commands[1:]:
            self.run(command, log)
        trained = json.loads((folder / "run" / "metrics.json").read_text(encoding="utf-8"))
        evaluated = folder / "evaluate.json"
        row = {
            **job,
            **truth.score(self.chances(name)),
            "validation_auroc": trained["validation"]["auroc"],
            "epochs": trained.get("num_epochs"),
            "best_epoch": trained["best_epoch"] + 1 if "best_epoch" in trained else None,
            "settings": trained.get("settings"),
            "blend_weights": trained.get("blend_weights"),
            "wall_s": round(wall, 1),
            "cpu_s": round(cpu, 1),
            "threads": self.threads,
            "load_15_min": round(load, 2),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
            "commands": shown,
            "evaluate": json.loads(evaluated.read_text()) if evaluated.exists() else None,
        }
        write_json(kept, row, indent=1)
        return row

    def chances(self, name: str) -> dict[Any, float]:
        """Return the probability of class 1 by id, as predicted by the job of a folder."""
        id, chance = self.tables.id, "probability_1"
        table = parquet.read_table(self.folder / name / "predictions.parquet", columns=[id, chance])
        return dict(zip(table[id].to_pylist(), table[chance].to_pylist(), strict=True))


def mean_auroc(chances: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean AUROC of runs; NaN if there is one class only.

    Args:
        chances: Their probabilities of class 1 [r, n].
        labels: Classes [n], 0 or 1.
    """
    positive, count = int(labels.sum()), len(labels)
    if positive in (0, count):
        return float("nan")
    ranks = rankdata(chances, axis=1)[:, labels == 1].sum(axis=1)
    pairs = positive * (count - positive)
    return float(np.mean((ranks - positive * (positive + 1) / 2) / pairs))


def mean_auprc(chances: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean average precision of runs; NaN if there is none of class 1.

    Args:
        chances: Their probabilities of class 1 [r, n].
        labels: Classes [n], 0 or 1.
    """
    if not labels.any():
        return float("nan")
    order = np.argsort(-chances, axis=1)
    found = []
    for ranked, right in zip(np.take_along_axis(chances, order, 1), labels[order], strict=True):
        ends = np.flatnonzero(np.append(np.diff(ranked) != 0, True))  # equal ones come together
        hits = right.cumsum()[ends]
        found.append(np.diff(hits, prepend=0) @ (hits / (ends + 1)) / hits[-1])
    return float(np.mean(found))


#: Scores whose differences have intervals.
COMPARED = {"auroc": mean_auroc, "auprc": mean_auprc}


def compare(first: np.ndarray, second: np.ndarray) -> Row:
    """Return how much larger the first score is, with a 95 % interval of resampled series.

    Args:
        first: A score of `Truth.resample` [1 + rounds].
        second: The same of other runs.
    """
    difference, *drawn = (first - second).tolist()
    low, high = np.nanpercentile(drawn, [2.5, 97.5]).tolist()
    return {"difference": difference, "low": low, "high": high}


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
    "resonator": ("--model=resonator",),
    "network": ("--no-resonators",),
    "transformer": ("--backbone=transformer", "--no-resonators", *WIDE),
    "gru_d": ("--backbone=gru_d", "--no-resonators", *WIDE),
    "boosting": (),
}
#: Models that are compared with all others.
OURS = ("osciformer", "resonator")
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
        arguments: The command line, to be recorded.
    """

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str]) -> None:
        self.options = options
        self.meta = describe("physionet2012.py", arguments, commit=options.commit)
        self.meta["threads"] = options.threads
        tables = DEMO if options.demo else PHYSIONET
        self.place = Workplace(
            options.work.absolute(), tables, options.threads, self.meta["commit"]
        )
        self.rows: list[Row] = []
        self.compared: dict[str, dict[str, Row]] = {}
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
            f"{row['validation_auroc']:.4f}), AUPRC {row['auprc']:.4f}, "
            f"{row['epochs'] or 'no'} epochs, {row['wall_s']} s, {row['cpu_s']} s of processor time"
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
        if model != "resonator":  # which has no settings of training
            flags += shlex.split(self.options.fit_options)
        task = ["--task", "classification", "--progress", "lines"]
        scores = ["--json", "-o", f"{name}/evaluate.json"]
        return [
            ["osciformer", "fit", tables.train, *task, *more, *flags, "-o", run],
            ["osciformer", "evaluate", run, tables.test, *scores],
            ["osciformer", "predict", run, tables.test, "-o", found],
        ]

    def _compare(self, truth: Truth) -> None:
        """Compare each of our models with all others."""
        drawn = {
            model: truth.resample(
                np.stack(
                    [
                        truth.fill(self.place.chances(job_name(model, e["learning_rate"], seed)))
                        for seed in e["seeds"]
                    ]
                )
            )
            for model, e in summarize(self.rows, self.options.seeds[0]).items()
        }
        pairs = [(one, other) for one in OURS for other in drawn if one in drawn and other != one]
        self.compared = {
            name: {f"{a} - {b}": compare(drawn[a][name], drawn[b][name]) for a, b in pairs}
            for name in COMPARED
        }
        self._save()

    def _save(self) -> None:
        summary = summarize(self.rows, self.options.seeds[0])
        content = {"meta": self.meta, "summary": summary}
        content |= {f"{name}_differences": found for name, found in self.compared.items()}
        if self.options.output is not None:
            write_json(self.options.output, {**content, "rows": self.rows}, indent=1)
        if self.options.table is not None:
            text = markdown(self.meta, self.rows, summary, self.compared)
            write_text(self.options.table, text + "\n")


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
            values = [row[key] for row in kept if row[key] is not None]
            entry[key] = {"mean": fmean(values) if values else None}
            entry[key]["sd"] = stdev(values) if len(values) > 1 else None
        found[model] = entry
    return found


def markdown(
    meta: Row, rows: Sequence[Row], summary: dict[str, Row], compared: dict[str, dict[str, Row]]
) -> str:
    """Return what was measured as tables: the models, their differences, then every run."""
    titles = [title for _, title, _ in COLUMNS]
    models = []
    for model, entry in summary.items():
        cells = [model, rate_name(entry["learning_rate"]), str(len(entry["seeds"]))]
        for key, _, form in COLUMNS:
            spread = entry[key]["sd"] if key in SCORES else None
            around = "" if spread is None else f" ± {form.format(spread)}"
            cells.append(cell(form, entry[key]["mean"]) + around)
        models.append(cells)
    runs = [
        [
            *(row["model"], rate_name(row["learning_rate"]), str(row["seed"])),
            f"{row['validation_auroc']:.4f}",
            *(cell(form, row[key]) for key, _, form in COLUMNS),
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
        *(line for score, found in compared.items() for line in difference_lines(score, found)),
        "Every run.",
        "",
        *markdown_table(["model", "learning rate", "seed", "validation AUROC", *titles], runs),
    ]
    return "\n".join(lines)


def difference_lines(score: str, compared: dict[str, Row]) -> list[str]:
    """Return the differences of a score as lines of Markdown."""
    return [
        f"Differences of mean {score.upper()}, with 95 % intervals of resampled stays.",
        "",
        *(
            f"- {name}: {entry['difference']:+.4f} ({entry['low']:+.4f} to {entry['high']:+.4f})"
            for name, entry in compared.items()
        ),
        "",
    ]


def cell(form: str, value: float | None) -> str:
    """Return a number for a table; a dash for none."""
    return "-" if value is None else form.format(value)


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
    bench = Bench(options, arguments)
    bench.run()
    return 1 if bench.num_failed else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""

    def rate(text: str) -> float | None:
        return None if text == "default" else float(text)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder of tables, runs and logs")
    add("--output", type=Path, help="JSON file with every row")
    add("--table", type=Path, help="Markdown file")
    add("--models", type=tuple_of(str), default=list(MODELS), help=f"of {','.join(MODELS)}")
    add("--seeds", type=tuple_of(int), default=list(range(5)), help="0,1,2,3,4 if not given")
    add(
        "--learning-rates",
        type=tuple_of(rate),
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
