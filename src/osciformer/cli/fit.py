"""`osciformer fit`: a table becomes a trained model in a run folder."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from osciformer import __version__, config
from osciformer._files import write_json, write_text
from osciformer.cli import pictures, tables
from osciformer.cli import settings as flags
from osciformer.cli.errors import INTERRUPTED, CommandError, Misuse
from osciformer.cli.settings import CONFIG, SETTINGS, near

RUN, METRICS, MODEL, CHECKPOINT = "run.json", "metrics.json", "model.safetensors", "last.ckpt"
_PACKAGES = ("torch", "numpy", "pytorch-lightning", "scikit-learn", "pyarrow")
PATHS = ("table", "labels", "validation")


@flags.with_settings
def fit(
    table: Annotated[Path | None, Argument(help="CSV, Parquet (or a folder), npz, .ts.")] = None,
    *,
    output: Annotated[Path, Option("--output", "-o", help="Run folder to write.")],
    config: Annotated[Path | None, Option(help="YAML file of settings; flags win over it.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a run in the folder.")] = False,
    progress: Annotated[
        str, Option(help="bar, lines, none, or auto: a bar on a terminal.")
    ] = "auto",
    **settings: Any,
) -> None:
    """Train a model on a table of irregular observations.

    For example: osciformer fit stays.parquet --task classification --id record_id --time minute
    --target in_hospital_death -o run/
    """
    verbose = verbosity(progress)
    before = flags.read_config(output) if resume else {}
    given = flags.merge(settings, config, before)
    if before and (output / CHECKPOINT).is_file():
        flags.check_resumed(given, before)
    if table is not None:
        given["table"] = str(table)
    paths = {name: Path(given[name]).absolute() for name in PATHS if given.get(name) is not None}
    given |= {name: str(path) for name, path in paths.items()}
    task = flags.check_task(given)
    if "table" not in paths:
        raise Misuse(
            f"there is no run to resume in {output}; give the table to train on"
            if resume
            else "the table to train on is missing: osciformer fit TABLE ..."
        )
    if not resume:
        refuse_occupied(output, is_overwriting=overwrite)
    tables.refuse_absent(*paths.values())
    job = _read_events(given) if task == "events" else _read_series(given, task)
    estimator = make_estimator(given, job, run_dir=output, resume=resume, verbose=verbose)
    metrics = train(estimator, job, given, output, is_resuming=resume)
    if is_first_process():
        if task == "events":
            kept = job.data[estimator.validation_index_]
            unseen = job.validation or kept
            pictures.draw_run(estimator, unseen if len(unseen) else job.data, output)
        _print_validation(metrics, output)


class Job(NamedTuple):
    """What to train on."""

    data: Any  # series, or sequences of events
    layout: Any  # which column of the table means what
    facts: Mapping[str, Any]  # what is known of the data, for the run folder
    labels: Any = None  # if the data have none of their own
    validation: Any = None  # data for early stopping, with labels if they are apart
    settings: Mapping[str, Any] = {}  # those that follow from the data


def _read_series(given: dict[str, Any], task: str) -> Job:
    """Return the series of the tables that the settings name; `stream` becomes a fact."""
    path = Path(given["table"])
    layout = tables.make_layout(given, task, path)
    check_device(given)
    elsewhere = tables.static_elsewhere(given, path)
    if layout is not None:
        layout = layout.replace(static=tuple(n for n in layout.static if n not in elsewhere))

    def read(path: Path, stream: bool | None) -> Any:
        data = tables.open_table(path, layout, stream=stream)
        labels_id = given.get("labels_id") or given.get("id")
        return tables.join_static(data, elsewhere, labels=given.get("labels"), labels_id=labels_id)

    data = read(path, given.get("stream"))
    given["stream"] = tables.is_streamed(data)
    _say(f"{path}: {tables.describe(data)}")
    labels = tables.labels_for(data, given, task)
    validation = None
    if given.get("validation"):
        path = Path(given["validation"])
        # From disk like the table, or else if it is large.
        watched = read(path, True if given["stream"] and tables.is_parquet(path) else None)
        validation = watched, tables.labels_for(watched, given, task)
    facts = {"table": given["table"], "series": len(data), "features": data.feature_names}
    covariates = _covariates(given, task, data.feature_names)
    return Job(data, layout, facts, labels, validation, covariates)


def _covariates(given: Mapping[str, Any], task: str, features: tuple[str, ...]) -> dict[str, Any]:
    """Return the features that are not predicted, if `--target` names those that are."""
    target = given.get("target")
    if task not in config.QUERY_TASKS or not target:
        return {}
    if given.get("covariates"):
        raise Misuse("give --target or --covariates, not both")
    for name in target:
        if name not in features:
            raise CommandError(f"there is no feature {name!r}; {near(name, features)}")
    known = given.get("known_covariates") or ()
    return {"covariates": tuple(n for n in features if n not in target and n not in known)}


def _read_events(given: Mapping[str, Any]) -> Job:
    """Return the sequences of events of the tables that the settings name."""
    path = Path(given["table"])
    layout = tables.make_event_layout(given, path)
    check_device(given)
    events = tables.read_events(path, layout)
    _say(f"{path}: {events!r}")
    watched = None
    if given.get("validation"):
        watched = tables.read_events(Path(given["validation"]), layout, events.type_names)
    facts = {
        "table": given["table"],
        "series": len(events),
        "events": len(events.times),
        "types": events.type_names,
    }
    return Job(events, layout, facts, validation=watched)


def _say(text: str) -> None:
    if is_first_process():
        typer.echo(text, err=True)


def make_estimator(given: Mapping[str, Any], job: Job, **others: Any) -> Any:
    """Return the estimator of the task with the settings that were given; the seed is fixed."""
    from osciformer.estimators.base import ESTIMATORS

    chosen = {"seed": SETTINGS["seed"].default, **given, **job.settings}
    arguments = config.estimator_arguments(given["task"], chosen)
    kind: Any = next(kind for kind in ESTIMATORS.values() if kind.task == given["task"])
    return kind(**arguments, layout=job.layout, **others)


def check_device(given: Mapping[str, Any]) -> None:
    """Refuse devices that are not there, before a table is read."""
    from osciformer.train.fitting import check_hardware

    names = ("accelerator", "strategy", "devices")
    check_hardware(*(given.get(name, SETTINGS[name].default) for name in names))


def verbosity(progress: str) -> int:
    """Return what the estimators call the kind of progress report."""
    levels = {"none": 0, "bar": 1, "lines": 2, "auto": 1 if sys.stderr.isatty() else 2}
    if progress not in levels:
        raise Misuse(f"there is no progress {progress!r}; {near(progress, levels)}")
    return levels[progress]


def train(
    estimator: Any, job: Job, settings: Mapping[str, Any], run: Path, *, is_resuming: bool = False
) -> dict[str, Any]:
    """Fit the estimator, write the run folder, and return the metrics.

    Ctrl-C writes what was reached, says how to go on, and ends the program.
    """
    from osciformer.train import TrainingInterrupted

    is_finished = True
    given = {"task": settings["task"], "seed": SETTINGS["seed"].default, **settings}
    try:
        with open_run(run, given, job.facts, is_resuming=is_resuming):
            try:
                estimator.fit(job.data, job.labels, validation_data=job.validation)
            except TrainingInterrupted as interruption:
                if interruption.checkpoint is None or not is_first_process():
                    raise
                is_finished = False
            metrics = _write_result(estimator, run, is_finished=is_finished)
    except TrainingInterrupted as interruption:
        _say(
            "interrupted before the first epoch was finished, so that nothing is kept; start again "
            "with the same command"
        )
        raise typer.Exit(INTERRUPTED) from interruption
    if not is_finished:
        alone = ", the network alone," if getattr(estimator, "blend_with", None) else ""
        _say(
            f"interrupted after epoch {estimator.n_iter_}; the checkpoint and the best model so "
            f"far{alone} are in {run}. Go on with: osciformer fit --resume -o {run}"
        )
        raise typer.Exit(INTERRUPTED)
    return metrics


def _write_result(estimator: Any, path: Path, *, is_finished: bool) -> dict[str, Any]:
    history = estimator.history_
    best = dict(history[estimator.best_epoch_])
    metrics = {
        "is_finished": is_finished,
        "num_epochs": len(history),
        "best_epoch": estimator.best_epoch_,
        "seconds": sum(row["seconds"] for row in history),
        "train_loss": best["train_loss"],
        "validation": {
            name.removeprefix("val_"): value
            for name, value in best.items()
            if name.startswith("val_")
        },
    }
    if hasattr(estimator, "blend_weights_"):
        metrics["blend_weights"] = estimator.blend_weights_
    if is_first_process():
        estimator.save(path / MODEL)
        write_json(path / METRICS, metrics)
    return metrics


def _print_validation(metrics: Mapping[str, Any], path: Path) -> None:
    """Print the validation scores of the epoch that was kept, and where the run is."""
    scores = metrics["validation"] or {"train_loss": metrics["train_loss"]}
    tables.print_table(
        f"Validation, epoch {metrics['best_epoch'] + 1} of {metrics['num_epochs']}",
        ("metric", "value"),
        [(name, f"{value:.4f}") for name, value in scores.items()],
    )
    weights = metrics.get("blend_weights", {})
    if len(weights) > 1:
        listed = ", ".join(f"{name} {weight:.3f}" for name, weight in weights.items())
        typer.echo(f"blended since, by the weights {listed}; the scores are those of the network")
    typer.echo(f"run folder: {path} ({metrics['seconds']:.0f} s of training)")


def is_first_process() -> bool:
    """Return whether this process writes and prints, of those that train together."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))


def find_versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that matter."""
    found = {"osciformer": __version__, "python": platform.python_version()}
    found["system"] = platform.platform()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def find_model(run: Path) -> Path:
    """Return the model file that a run folder, or a path, names."""
    if not run.exists():
        raise CommandError(f"there is no run folder or model file {run}; check the path")
    if run.is_file():
        return run
    model = run / MODEL
    if not model.is_file():
        hint = (
            f"its training was not finished; go on with: osciformer fit --resume -o {run}"
            if (run / CONFIG).is_file()
            else "it is no folder that `osciformer fit` wrote"
        )
        raise CommandError(f"{run} holds no {MODEL}: {hint}")
    return model


def refuse_occupied(path: Path, *, is_overwriting: bool) -> None:
    """Refuse a path that a run would have to replace, unless it is a run to overwrite."""
    if not is_first_process():
        return
    if path.exists() and not path.is_dir():
        raise CommandError(f"{path} is a file; choose a folder with -o")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not is_overwriting:
        raise CommandError(
            f"{path} exists and is not empty; choose another folder, pass --overwrite to "
            "replace the run in it, or --resume to go on with it"
        )
    if not (path / CONFIG).is_file():
        raise CommandError(
            f"{path} was not written by osciformer, so --overwrite leaves it alone; choose "
            "another folder"
        )


@contextmanager
def open_run(
    path: Path, settings: Mapping[str, Any], facts: Mapping[str, Any], *, is_resuming: bool
) -> Iterator[None]:
    """Write configuration, seed, versions and facts of the data, and let a run write the rest.

    If it fails, what can be resumed stays, and otherwise what was there before.
    """
    if not is_first_process():
        yield
        return
    before = {}
    if is_resuming:
        _check_same_data(path, facts)
        kept = (path / name for name in (CONFIG, RUN))
        before = {file: file.read_text(encoding="utf-8") for file in kept if file.is_file()}
    with ExitStack() as stack:
        aside = None
        if not is_resuming and path.is_dir() and any(path.iterdir()):
            folder = TemporaryDirectory(
                dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True
            )
            aside = path.rename(Path(stack.enter_context(folder)) / path.name)
        is_made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        try:
            write_text(path / CONFIG, flags.write_yaml(settings))
            content = {"seed": settings.get("seed", 0), "versions": find_versions(), "data": facts}
            write_json(path / RUN, content)
            yield
        except BaseException:
            for part in (*path.glob("*.part"), *path.glob(".*")):
                if part.is_file():
                    part.unlink()
            # A run that is not continued after all, with other settings, keeps its own.
            for file, text in before.items():
                write_text(file, text)
            if not is_resuming and not (path / CHECKPOINT).is_file():
                shutil.rmtree(path, ignore_errors=True)
                if aside is not None:
                    aside.rename(path)
                elif not is_made:
                    path.mkdir(exist_ok=True)
            raise


def _check_same_data(path: Path, facts: Mapping[str, Any]) -> None:
    """Refuse to go on with a run on other data than it began with."""
    if not (path / CHECKPOINT).is_file() or not (path / RUN).is_file():
        return
    before = json.loads((path / RUN).read_text(encoding="utf-8")).get("data", {})
    for name in ("series", "features", "events", "types"):
        had, has = before.get(name), facts.get(name)
        if had != (list(has) if isinstance(has, tuple) else has):
            raise CommandError(
                f"the run in {path} was begun with other {name}: {had}, not {has}; give it the "
                "same table, or start another run"
            )
