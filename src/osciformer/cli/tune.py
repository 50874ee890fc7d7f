"""`osciformer tune`: search for settings, with the split and the score of `fit`.

A study is a file of finished trials, from which Optuna's sampler is set up anew before each trial:
a study that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from osciformer._files import write_json, write_text
from osciformer._optional import need
from osciformer._text import printable
from osciformer.cli import fit as fitting
from osciformer.cli import runs, tables
from osciformer.cli import settings as flags
from osciformer.cli.errors import CommandError, Misuse, exit_code, explain
from osciformer.cli.settings import SETTINGS
from osciformer.config import plain

STUDY, TRIALS, BEST = "study.json", "trials.csv", "best.yaml"


class Between(NamedTuple):
    """Numbers of a range, drawn by their logarithm."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


#: What is searched, unless a flag or `--config` fixes it.
SPACE: Mapping[str, tuple[Any, ...]] = {
    "dim": (16, 32, 64, 128),
    "num_layers": (1, 2, 3),
    "num_heads": (1, 2, 4),
    "dropout": (0.0, 0.1, 0.2, 0.3, 0.4),
    "learning_rate": Between(3e-4, 1e-2),
    "batch_size": ("auto", 16, 32, 64),
}


@flags.with_settings
def tune(
    table: Annotated[Path | None, Argument(help="CSV, Parquet (or a folder), npz, .ts.")] = None,
    *,
    output: Annotated[Path, Option("--output", "-o", help="Folder of the study.")],
    config: Annotated[Path | None, Option(help="YAML file of settings; flags win over it.")] = None,
    trials: Annotated[int, Option(min=1, help="Trials of the study in all.")] = 20,
    minutes: Annotated[float | None, Option(help="Begin no trial after so many minutes.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the study in the folder.")] = False,
    progress: Annotated[str, fitting.PROGRESS] = "auto",
    **settings: Any,
) -> None:
    """Search for good settings: each trial trains a network and is scored by validation series.

    For example: osciformer tune stays.parquet --task classification --id record_id --time minute
    --target in_hospital_death --trials 30 -o study/

    Settings that are given stay as they are, and of the others dim, num_layers, num_heads, dropout,
    learning_rate and batch_size are searched. Then: osciformer fit --config study/best.yaml -o run/
    """
    need("optuna", extra="tune")
    verbose = fitting.verbosity(progress)
    if minutes is not None and not 0 < minutes < math.inf:
        raise Misuse(f"--minutes must be positive; got {minutes}")
    with _held(output, is_resuming=resume):
        before = _read_study(output) if resume else {}
        given = flags.merge(settings, config, before.get("settings", {}))
        if before:
            flags.check_resumed(given, before["settings"])
        if table is not None:
            given["table"] = str(table)
        if given.get("table") is None:
            raise Misuse("the table to train on is missing: osciformer tune TABLE ...")
        job = _read(given)
        study = _Study(output, given, job, before.get("trials", []))
        if before.get("fingerprint", study.fingerprint) != study.fingerprint:
            raise CommandError(f"the study in {output} was begun with another table; give that one")
        _search(study, trials, minutes, verbose)


class _Study:
    """Trials so far, and what they have in common."""

    def __init__(
        self, folder: Path, given: dict[str, Any], job: fitting.Job, trials: list[dict[str, Any]]
    ) -> None:
        self.folder, self.given, self.job, self.trials = folder, given, job, trials
        self.seed: int = given.get("seed", SETTINGS["seed"].default)
        self.space, self.fingerprint = space_of(given), job.fingerprint()
        self.metric: str = trials[0]["metric"] if trials else ""

    @property
    def best(self) -> dict[str, Any] | None:
        """The best trial, if one has a score; the first of equal ones."""
        scored = [trial for trial in self.trials if trial["value"] is not None]
        return min(scored, key=lambda trial: self.sign * trial["value"]) if scored else None

    @property
    def sign(self) -> int:
        """-1 if a higher score is better."""
        from osciformer.train.tasks import HIGHER_IS_BETTER

        return -1 if self.metric in HIGHER_IS_BETTER else 1

    def choose(self) -> dict[str, Any]:
        """Return the settings of the next trial; the first one has the defaults."""
        if not self.trials:
            usual = {name: SETTINGS[name].defaults[self.given["task"]] for name in self.space}
            return {
                name: usual[name] if isinstance(x, Between) or usual[name] in x else x[0]
                for name, x in self.space.items()
            }
        optuna = need("optuna", extra="tune")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # A seed of its own for each trial: a continued study needs no state but its trials.
        sampler = optuna.samplers.TPESampler(seed=self.seed + len(self.trials))
        study = optuna.create_study(sampler=sampler)
        kinds = {
            name: optuna.distributions.FloatDistribution(*allowed, log=True)
            if isinstance(allowed, Between)
            else optuna.distributions.CategoricalDistribution(allowed)
            for name, allowed in self.space.items()
        }
        for trial in self.trials:
            told = {"params": trial["settings"], "distributions": kinds}
            if trial["value"] is None:
                told["state"] = optuna.trial.TrialState.FAIL
            else:
                told["value"] = self.sign * trial["value"]
            study.add_trial(optuna.trial.create_trial(**told))
        found: dict[str, Any] = study.ask(kinds).params
        return found

    def run(self) -> dict[str, Any]:
        """Train with the next settings, and return the trial."""
        chosen, started = self.choose(), time.perf_counter()
        trial: dict[str, Any] = {"number": len(self.trials), "settings": chosen, "metric": ""}
        trial |= {"value": None, "epochs": None, "problem": ""}
        # What is searched for is one network, the same with others or resonators beside it.
        has_them = self.given["task"] in SETTINGS["resonators"].tasks
        alone = {"resonators": False, "ensemble_size": 1} if has_them else {}
        estimator = fitting.make_estimator({**self.given, **chosen, **alone}, self.job)
        watched = {} if self.job.validation is None else {"validation_data": self.job.validation}
        try:
            estimator.fit(self.job.data, self.job.labels, **watched)
            self.metric = estimator.monitor_
            value = estimator.history_[estimator.best_epoch_][f"val_{self.metric}"]
            trial |= {"epochs": estimator.best_epoch_ + 1}
            trial |= {"value": value} if math.isfinite(value) else {"problem": "undefined score"}
        except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
            if not self.trials:  # with the defaults: something else is wrong
                raise
            trial["problem"] = printable(explain(error))
        return trial | {"metric": self.metric, "seconds": time.perf_counter() - started}

    def add(self, trial: dict[str, Any]) -> None:
        """Write all files anew, with one trial more."""
        self.trials.append(trial)
        shared = {"settings": self.given, "fingerprint": self.fingerprint}
        write_json(self.folder / STUDY, {**plain(shared), "trials": self.trials})
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        head = ["number", "metric", "value", "epochs", "seconds", "problem"]
        writer.writerow([*head, *self.space])
        for one in self.trials:
            writer.writerow([*(one[name] for name in head), *map(one["settings"].get, self.space)])
        write_text(self.folder / TRIALS, text.getvalue())
        if (best := self.best) is not None:
            settings = {"seed": self.seed, **self.given, **best["settings"]}
            write_text(self.folder / BEST, flags.write_yaml(settings))


def _search(study: _Study, num_trials: int, minutes: float | None, verbose: int) -> None:
    limit = "" if minutes is None else f", none begun after {minutes:g} minutes"
    typer.echo(f"budget: {num_trials} trials, {len(study.trials)} done{limit}", err=True)
    for name, allowed in study.space.items():
        words = allowed if isinstance(allowed, Between) else ", ".join(map(str, allowed))
        typer.echo(f"  {name}: {words}", err=True)
    started = time.monotonic()
    try:
        with _reporting(study, num_trials, verbose) as report:
            while len(study.trials) < num_trials:
                if minutes is not None and time.monotonic() - started > 60 * minutes:
                    typer.echo(f"{minutes:g} minutes are over", err=True)
                    break
                study.add(study.run())
                report()
    except KeyboardInterrupt as interruption:
        code, word = exit_code(interruption)
        kept = f"{len(study.trials)} trials are kept. Go on with: osciformer tune --resume -o "
        again = "no trial was finished; start again with the same command"
        typer.echo(f"{word}; {kept + str(study.folder) if study.trials else again}", err=True)
        raise typer.Exit(code) from interruption
    _print_best(study)


@contextlib.contextmanager
def _reporting(study: _Study, num_trials: int, verbose: int) -> Iterator[Callable[[], None]]:
    """Give a function that tells of the trial that was added: on a bar, or by a line."""
    tqdm = need("tqdm", extra="train").tqdm
    told = dict(total=num_trials, initial=len(study.trials), unit="trial", desc="trials")
    with tqdm(**told, dynamic_ncols=True, disable=verbose != 1) as bar:

        def report() -> None:
            trial, best = study.trials[-1], study.best
            value = trial["problem"] or f"{trial['metric']} {trial['value']:.4f}"
            top = "" if best is None else f"; best {best['value']:.4f}, trial {best['number'] + 1}"
            bar.set_description(f"{value}{top}")
            bar.update()
            if verbose > 1:
                mean = sum(one["seconds"] for one in study.trials) / len(study.trials)
                left = mean * (num_trials - len(study.trials))
                line = f"trial {len(study.trials)}/{num_trials} {value}{top}"
                typer.echo(f"{line}; {trial['seconds']:.0f} s, about {left:.0f} s left", err=True)

        yield report


def _print_best(study: _Study) -> None:
    best = study.best
    if best is None:
        raise CommandError(f"no trial has a score; see {study.folder / TRIALS}")
    first, chosen = study.trials[0], best["settings"]
    rows = [(n, str(first["settings"][n]), str(chosen[n])) for n in study.space]
    values = [("" if one["value"] is None else f"{one['value']:.4f}") for one in (first, best)]
    tables.print_table(
        f"Best of {len(study.trials)} trials, number {best['number'] + 1}",
        ("setting", "default", "best"),
        [*rows, (f"validation {study.metric}", *values)],
    )
    typer.echo(
        "the score chose the settings, so expect a worse one on new series; evaluate on others"
    )
    target = study.folder
    typer.echo(f"train with them: osciformer fit --config {target / BEST} -o {target}-run")


def space_of(given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what is searched: what is not given, by values that go together with what is.

    Example:
        >>> space_of({"task": "events", "dim": 6, "dropout": 0.1, "learning_rate": 1e-3})
        {'num_layers': (1, 2, 3), 'num_heads': (1, 2), 'batch_size': ('auto', 16, 32, 64)}
    """
    fixed = {*given, *(["num_layers"] if given.get("blocks") else [])}
    space = {name: allowed for name, allowed in SPACE.items() if name not in fixed}
    dim, heads = given.get("dim"), given.get("num_heads")
    if dim is not None and "num_heads" in space:
        space["num_heads"] = tuple(n for n in space["num_heads"] if dim % n == 0)
    if heads is not None and "dim" in space:
        space["dim"] = tuple(n for n in space["dim"] if n % heads == 0) or (8 * heads, 16 * heads)
    if not space:
        raise Misuse(f"all of {', '.join(SPACE)} are given, so that nothing is left to search")
    return space


def _read(given: dict[str, Any]) -> fitting.Job:
    """Return the data to train on, and refuse what no trial could do."""
    given |= {name: str(path) for name, path in fitting.find_paths(given).items()}
    task = flags.check_task(given)
    if flags.model_of(given) != "osciformer":
        raise Misuse("tune searches settings of the network; --model resonator has none of them")
    if given.get("validation") is None and given.get("validation_fraction", 1) == 0:
        raise Misuse(
            "trials are scored by validation series; give --validation, or leave out "
            "--validation-fraction 0"
        )
    for name in ("devices", "num_nodes"):
        if given.get(name, 1) > 1:
            raise Misuse(f"tune trains in one process; leave out {SETTINGS[name].flag}")
    if given.get("logger") == "tensorboard":
        raise Misuse("trials have no run folder for --logger tensorboard; leave it to `fit`")
    tables.refuse_absent(*map(Path, (given[n] for n in fitting.PATHS if given.get(n))))
    fitting.check_logger(given, None)
    return fitting.read_events(given) if task == "events" else fitting.read_series(given, task)


def _read_study(folder: Path) -> dict[str, Any]:
    """Return what `_Study.add` wrote."""
    path = folder / STUDY
    if not path.is_file():
        raise Misuse(f"there is no study to resume in {folder}; leave out --resume")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = {n: flags.check(SETTINGS[n], x, n) for n, x in content["settings"].items()}
        for trial in content["trials"]:
            _ = [trial[name] for name in ("number", "metric", "value", "settings", "seconds")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CommandError(f"{path} is no study that `osciformer tune` wrote: {error}") from error
    return {**content, "settings": found}


@contextlib.contextmanager
def _held(folder: Path, *, is_resuming: bool) -> Iterator[None]:
    """Lock the folder of a study; it must be new or empty, or hold the study to go on with."""
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is a file; choose a folder with -o")
    if folder.is_dir() and not is_resuming and any(folder.iterdir()):
        hint = "pass --resume to go on with it, or " if (folder / STUDY).is_file() else ""
        raise CommandError(f"{folder} is not empty; {hint}choose another folder with -o")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with runs.locked(folder):
            yield
    finally:
        with contextlib.suppress(OSError):  # not empty: the study is there
            for path in made:
                path.rmdir()
