"""`osciformer fit`: a table becomes a trained model in a run folder."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from osciformer import __version__, config
from osciformer._files import write_json, write_text
from osciformer._optional import version_of
from osciformer._processes import is_first_process
from osciformer.cli import pictures, tables
from osciformer.cli import settings as flags
from osciformer.cli.errors import INTERRUPTED, CommandError, Misuse
from osciformer.cli.settings import CONFIG, SETTINGS, near

RUN, METRICS, MODEL, CHECKPOINT = "run.json", "metrics.json", "model.safetensors", "last.ckpt"
_PACKAGES = ("torch", "numpy", "pytorch-lightning", "scikit-learn", "pyarrow")
_PATHS = ("table", "labels", "validation")
_PROGRESS = Option(help="bar, lines, none, or auto: a bar on a terminal.")


@flags.with_settings
def fit(
    table: Annotated[Path | None, Argument(help="CSV, Parquet (or a folder), npz, .ts.")] = None,
    *,
    output: Annotated[Path, Option("--output", "-o", help="Run folder to write.")],
    config: Annotated[Path | None, Option(help="YAML file of settings; flags win over it.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a run in the folder.")] = False,
    progress: Annotated[str, _PROGRESS] = "auto",
    **settings: Any,
) -> None:
    """Train a model on a table of irregular observations.

    For example: osciformer fit stays.parquet --task classification --id record_id --time minute
    --target in_hospital_death -o run/

    With --model resonator, classification and regression are a matter of seconds on a CPU; of the
    settings below it has those of the table, --linear-head, --families, --class-weight and --seed.
    """
    verbose = verbosity(progress)
    before = flags.read_config(output) if resume else {}
    given = flags.merge(settings, config, before)
    if before and (output / CHECKPOINT).is_file():
        flags.check_resumed(given, before)
    if table is not None:
        given["table"] = str(table)
    paths = {name: Path(given[name]).absolute() for name in _PATHS if given.get(name) is not None}
    given |= {name: str(path) for name, path in paths.items()}
    task = flags.check_task(given)
    is_network = flags.model_of(given) == "osciformer"
    if resume and not is_network:
        raise Misuse("--resume goes on with the training of a network; a resonator model has none")
    if "table" not in paths:
        if resume:
            raise Misuse(f"there is no run to resume in {output}; give the table to train on")
        raise Misuse("the table to train on is missing: osciformer fit TABLE ...")
    if not resume:
        refuse_occupied(output, is_overwriting=overwrite)
    tables.refuse_absent(*paths.values())
    job = _read_events(given) if task == "events" else _read_series(given, task)
    of_run: dict[str, Any] = {"run_dir": output, "resume": resume} if is_network else {}
    estimator = make_estimator(given, job, verbose=verbose, **of_run)
    metrics = train(estimator, job, given, output, is_resuming=resume)
    if is_first_process():
        if task == "events":
            unseen = job.validation or job.data[estimator.validation_index_]
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
    path = Path(given["table"])
    layout = tables.make_layout(given, task, path)
    check_device(given)
    elsewhere = tables.static_elsewhere(given, path)
    if layout is not None:
        layout = layout.replace(static=tuple(n for n in layout.static if n not in elsewhere))

    def read(path: Path, stream: bool | None) -> Any:
        data = tables.open_table(path, layout, stream=stream)
        if not elsewhere:
            return data
        labels_id = given.get("labels_id") or given.get("id")
        return tables.join_static(
            data,
            elsewhere,
            labels=given.get("labels"),
            labels_id=labels_id,
            guess_types=bool(given.get("guess_types")),
        )

    data = read(path, given.get("stream"))
    given["stream"] = tables.is_streamed(data)
    _say(f"{path}: {tables.describe(data)}")
    labels = tables.labels_for(data, given, task)
    validation = None
    if given.get("validation"):
        path = Path(given["validation"])
        # From disk like the table, or else if it is large.
        is_parquet = tables.format_of(path) == "parquet"
        watched = read(path, True if given["stream"] and is_parquet else None)
        validation = watched, tables.labels_for(watched, given, task)
    facts = {"table": given["table"], "series": len(data), "features": data.feature_names}
    derived = {}
    if task in config.QUERY_TASKS and given.get("target"):
        if given.get("covariates"):
            raise Misuse("give --target or --covariates, not both")
        for name in given["target"]:
            if name not in (known := data.feature_names):
                raise CommandError(f"there is no feature {name!r}; {near(name, known)}")
        others = {*given["target"], *(given.get("known_covariates") or ())}
        derived["covariates"] = tuple(n for n in data.feature_names if n not in others)
    return Job(data, layout, facts, labels, validation, derived)


def _read_events(given: Mapping[str, Any]) -> Job:
    path, other = Path(given["table"]), given.get("validation")
    layout = tables.make_event_layout(given, path)
    check_device(given)
    events = tables.read_events(path, layout)
    _say(f"{path}: {events!r}")
    watched = tables.read_events(Path(other), layout, events.type_names) if other else None
    facts = {"table": given["table"], "series": len(events), "events": len(events.times)}
    return Job(events, layout, facts | {"types": events.type_names}, validation=watched)


def _say(text: str) -> None:
    if is_first_process():
        typer.echo(text, err=True)


def make_estimator(given: Mapping[str, Any], job: Job, **others: Any) -> Any:
    """Return the estimator of the task with the settings that were given; the seed is fixed."""
    from osciformer.estimators.base import ESTIMATORS

    chosen = {"seed": SETTINGS["seed"].default, **given, **job.settings}
    task, model = given["task"], flags.model_of(given)
    arguments = config.estimator_arguments(task, chosen, model)
    kinds = ESTIMATORS.values()
    kind: Any = next(kind for kind in kinds if (kind.task, kind.model) == (task, model))
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
    """Fit the estimator, write the run folder, and return the metrics; Ctrl-C keeps the best."""
    from osciformer.train import TrainingInterrupted

    is_finished = True
    given = {"task": settings["task"], "seed": SETTINGS["seed"].default, **settings}
    with open_run(run, given, job.facts, is_resuming=is_resuming):
        try:
            watched = {} if job.validation is None else {"validation_data": job.validation}
            estimator.fit(job.data, job.labels, **watched)
        except TrainingInterrupted as interruption:
            if interruption.checkpoint is None or not is_first_process():
                _say(
                    "interrupted before the first epoch was finished, so that nothing is kept; "
                    "start again with the same command"
                )
                raise typer.Exit(INTERRUPTED) from interruption
            is_finished = False
        metrics = _write_result(estimator, run, is_finished=is_finished)
    if not is_finished:
        alone = ", the network alone," if getattr(estimator, "blend_with", None) else ""
        _say(
            f"interrupted after epoch {estimator.n_iter_}; the checkpoint and the best model so "
            f"far{alone} are in {run}. Go on with: osciformer fit --resume -o {run}"
        )
        raise typer.Exit(INTERRUPTED)
    return metrics


def _write_result(estimator: Any, path: Path, *, is_finished: bool) -> dict[str, Any]:
    metrics: dict[str, Any] = {"is_finished": is_finished}
    if hasattr(estimator, "left_out_scores_"):
        scores = estimator.left_out_scores_
        metrics |= {"seconds": estimator.fit_seconds_, "validation": scores}
    else:
        history, best = estimator.history_, estimator.history_[estimator.best_epoch_]
        watched = [name for name in best if name.startswith("val_")]
        metrics |= {"num_epochs": len(history), "best_epoch": estimator.best_epoch_}
        metrics |= {"seconds": sum(r["seconds"] for r in history), "train_loss": best["train_loss"]}
        metrics["validation"] = {name.removeprefix("val_"): best[name] for name in watched}
    if getattr(estimator, "resonator_", None) is not None:
        weight = estimator.network_weight_
        metrics["blend_weights"] = {"network": weight, "resonators": 1.0 - weight}
    if hasattr(estimator, "blend_weights_"):
        metrics["blend_weights"] = estimator.blend_weights_
    if is_first_process():
        estimator.save(path / MODEL)
        write_json(path / METRICS, metrics)
    return metrics


def _print_validation(metrics: Mapping[str, Any], path: Path) -> None:
    scores = metrics["validation"] or {"train_loss": metrics["train_loss"]}
    title = "Validation, each series by a model of the others"
    if "best_epoch" in metrics:
        title = f"Validation, epoch {metrics['best_epoch'] + 1} of {metrics['num_epochs']}"
    tables.print_table(
        title,
        ("metric", "value"),
        [(name, f"{value:.4f}") for name, value in scores.items()],
    )
    weights = metrics.get("blend_weights", {})
    if len(weights) > 1:
        listed = ", ".join(f"{name} {weight:.3f}" for name, weight in weights.items())
        typer.echo(f"blended since, by the weights {listed}; the scores are those of the network")
    typer.echo(f"run folder: {path} ({metrics['seconds']:.0f} s of training)")


def find_versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that matter."""
    own = {"osciformer": __version__, "python": platform.python_version()}
    packages = {name: version_of(name) or "not installed" for name in _PACKAGES}
    return own | {"system": platform.platform()} | packages


def find_model(run: Path) -> Path:
    """Return the model file that a run folder, or a path, names."""
    if not run.exists():
        raise CommandError(f"there is no run folder or model file {run}; check the path")
    model = run if run.is_file() else run / MODEL
    if not model.is_file():
        hint = "it is no folder that `osciformer fit` wrote"
        if (run / CONFIG).is_file():
            hint = f"its training was not finished; go on with: osciformer fit --resume -o {run}"
        raise CommandError(f"{run} holds no {MODEL}: {hint}")
    return model


def refuse_occupied(path: Path, *, is_overwriting: bool) -> None:
    """Refuse a path that a run would have to replace, unless it is a run to overwrite."""
    if not is_first_process() or not path.exists():
        return
    if not path.is_dir():
        raise CommandError(f"{path} is a file; choose a folder with -o")
    if not any(path.iterdir()):
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
    """Open a run folder; after a failure, what can be resumed stays, else what was there before."""
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
            make = partial(TemporaryDirectory, prefix=f".{path.name}.", ignore_cleanup_errors=True)
            aside = path.rename(Path(stack.enter_context(make(dir=path.parent))) / path.name)
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
