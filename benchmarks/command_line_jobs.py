"""Jobs that train a classifier by the command line and score it, each kept in a folder."""

from __future__ import annotations

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
from typing import Any

import numpy as np
from attention_gpu.document import finite, write_text
from pyarrow import parquet
from scipy.stats import rankdata

from osciformer.cli.scoring import class_scores
from osciformer.data import IrregularSeries, Layout, get_dataset, read_parquet

Row = dict[str, Any]

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

    def compare(self, first: np.ndarray, second: np.ndarray, rounds: int = ROUNDS) -> Row:
        """Return how much larger the mean AUROC of the first runs is, with a 95 % interval.

        The interval is that of resampled series, the same for both; the runs stay as they are.

        Args:
            first: Probabilities of some runs [r, n].
            second: Of others [s, n].
            rounds: How often to resample.
        """
        generator = np.random.default_rng(0)

        def difference(index: np.ndarray) -> float:
            labels = self.labels[index]
            one, other = (mean_auroc(chances[:, index], labels) for chances in (first, second))
            return one - other

        count = len(self.labels)
        drawn = [difference(generator.integers(0, count, count)) for _ in range(rounds)]
        low, high = np.nanpercentile(drawn, [2.5, 97.5]).tolist()
        return {"difference": difference(np.arange(count)), "low": low, "high": high}


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
            "epochs": trained["num_epochs"],
            "best_epoch": trained["best_epoch"] + 1 if "best_epoch" in trained else None,
            "settings": trained.get("settings"),
            "wall_s": round(wall, 1),
            "cpu_s": round(cpu, 1),
            "threads": self.threads,
            "load_15_min": round(load, 2),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
            "commands": shown,
            "evaluate": json.loads(evaluated.read_text()) if evaluated.exists() else None,
        }
        write_text(kept, json.dumps(finite(row), indent=1))
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
