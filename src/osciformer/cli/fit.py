"""`osciformer fit`: a table becomes a trained model in a run folder."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from typer import Argument, Option

from osciformer import __version__, config
from osciformer._files import write_json, write_text
from osciformer._optional import version_of
from osciformer._processes import is_first_process, lost_peers, name_lost
from osciformer.cli import pictures, runs, tables
from osciformer.cli import settings as flags
from osciformer.cli.card import write_card
from osciformer.cli.errors import CommandError, Misuse, exit_code
from osciformer.cli.fingerprint import fingerprint
from osciformer.cli.runs import CARD, CHECKPOINT, METRICS, MODEL, RUN, RunFolder
from osciformer.cli.settings import CONFIG, SETTINGS, near
from osciformer.cli.undefined import print_reasons, shown, undefined

_PACKAGES = ("torch", "numpy", "pytorch-lightning", "scikit-learn", "pyarrow")
PATHS = ("table", "labels", "validation")
PROGRESS = Option(help="bar, lines, none, or auto: a bar on a terminal.")


@flags.with_settings
def fit(
    table: Annotated[Path | None, Argument(help="CSV, Parquet (or a folder), npz, .ts.")] = None,
    *,
    output: Annotated[Path, Option("--output", "-o", help="Run folder to write.")],
    config: Annotated[Path | None, Option(help="YAML file of settings; flags win over it.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a run in the folder.")] = False,
    progress: Annotated[str, PROGRESS] = "auto",
    **settings: Any,
) -> None:
    """Train a model on a table of irregular observations.

    For example: osciformer fit stays.parquet --task classification --id record_id --time minute
    --target in_hospital_death -o run/

    With --model resonator, classification and regression are a matter of seconds on a CPU; of the
    settings below it has those of the table, --linear-head, --families, --class-weight and --seed.
    """
    verbose = verbosity(progress)
    with runs.hold(output, is_resuming=resume, is_overwriting=overwrite) as run:
        before = flags.read_config(run.work) if resume else {}
        given = flags.merge(settings, config, before)
        if before and (run.work / CHECKPOINT).is_file():
            flags.check_resumed(given, before)
        if table is not None:
            given["table"] = str(table)
        paths = find_paths(given)
        given |= {name: str(path) for name, path in paths.items()}
        task = flags.check_task(given)
        is_network = flags.model_of(given) == "osciformer"
        if resume and not is_network:
            raise Misuse(
                "--resume goes on with the training of a network; a resonator model has none"
            )
        if "table" not in paths:
            if resume:
                raise Misuse(f"there is no run to resume in {output}; give the table to train on")
            raise Misuse("the table to train on is missing: osciformer fit TABLE ...")
        run.refuse_inputs(paths.values())
        tables.refuse_absent(*paths.values())
        check_logger(given, output)
        job = read_events(given) if task == "events" else read_series(given, task)
        of_run: dict[str, Any] = {"run_dir": run.work, "resume": resume} if is_network else {}
        estimator = make_estimator(given, job, verbose=verbose, **of_run)
        metrics = train(estimator, job, given, run)
        if is_first_process():
            if task == "events":
                run.record(*pictures.OF_RUN)
                unseen = job.validation or job.data[estimator.validation_index_]
                pictures.draw_run(estimator, unseen if len(unseen) else job.data, output)
            _print_validation(metrics, output)
            typer.echo(f"look inside: osciformer inspect {output} TABLE -o report.html")


class Job(NamedTuple):
    """What to train on."""

    data: Any  # series, or sequences of events
    layout: Any  # which column of the table means what
    facts: Mapping[str, Any]  # what is known of the data, for the run folder
    labels: Any = None  # if the data have none of their own
    validation: Any = None  # data for early stopping, with labels if they are apart
    settings: Mapping[str, Any] = {}  # those that follow from the data

    def fingerprint(self) -> dict[str, str]:
        """Return a hash of each array, by name."""
        found = fingerprint(self.data, self.labels)
        watched = self.validation if isinstance(self.validation, tuple) else (self.validation,)
        if self.validation is not None:
            of_validation = fingerprint(*watched)
            found |= {f"validation {name}": item for name, item in of_validation.items()}
        return found


def find_paths(given: Mapping[str, Any]) -> dict[str, Path]:
    """Return the tables that the settings name, as absolute paths."""
    return {name: Path(given[name]).absolute() for name in PATHS if given.get(name) is not None}


def read_series(given: dict[str, Any], task: str) -> Job:
    """Read the series to train on; settings that follow from them are put with the given."""
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


def read_events(given: Mapping[str, Any]) -> Job:
    """Read the sequences of events to train on."""
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


def check_logger(given: Mapping[str, Any], folder: Path | None) -> None:
    """Refuse a logger that is not installed, before a table is read."""
    from osciformer.train import run_folder

    run_folder.check_logger(given.get("logger", SETTINGS["logger"].default), folder)


def verbosity(progress: str) -> int:
    """Return what the estimators call the kind of progress report."""
    levels = {"none": 0, "bar": 1, "lines": 2, "auto": 1 if sys.stderr.isatty() else 2}
    if progress not in levels:
        raise Misuse(f"there is no progress {progress!r}; {near(progress, levels)}")
    return levels[progress]


def train(estimator: Any, job: Job, settings: Mapping[str, Any], run: RunFolder) -> dict[str, Any]:
    """Fit the estimator, put the result in the run folder, and return the metrics.

    After Ctrl-C the checkpoint stays, and the best model so far unless another run is in its place.
    """
    from osciformer.train import TrainingInterrupted

    given = {"task": settings["task"], "seed": SETTINGS["seed"].default, **settings}
    facts = {**job.facts, "fingerprint": job.fingerprint()} if is_first_process() else {}
    content = {"seed": given["seed"], "versions": find_versions(), "data": facts}

    def describe(folder: Path) -> None:
        write_text(folder / CONFIG, flags.write_yaml(given))
        write_json(folder / RUN, content)

    def finish(metrics: Mapping[str, Any]) -> None:
        old, before = run.path / CARD, ""
        if old.is_file() and not run.is_replacing:
            before = old.read_text(encoding="utf-8", errors="replace")  # an editor may differ
        card = write_card(estimator, job, given, metrics, before)

        def write(folder: Path) -> None:
            describe(folder)
            estimator.save(folder / MODEL)
            write_json(folder / METRICS, metrics)
            write_text(folder / CARD, card)

        run.finish(write)

    try:
        if is_first_process():
            if (run.work / CHECKPOINT).is_file() and (run.work / CONFIG).is_file():
                _check_same_data(run, facts)
            else:
                run.begin(describe)
        watched = {} if job.validation is None else {"validation_data": job.validation}
        kept = None
        if given.get("calibration_fraction"):
            job, kept = _keep_some(job, given)
        estimator.fit(job.data, job.labels, **watched)
        if kept is not None:
            estimator.calibrate(*kept)
        metrics = _metrics(estimator, is_finished=True)
        if is_first_process():
            finish(metrics)
    except KeyboardInterrupt as interruption:
        code, word = exit_code(interruption)
        if is_first_process():
            if lost := lost_peers(0.0):
                word = f"{name_lost(lost)}; {word}"
            if isinstance(interruption, TrainingInterrupted) and interruption.checkpoint:
                word += _keep(estimator, run, finish)
            elif run.has_result:
                _say(f"{word} when all was done; the run in {run.path} is complete")
                raise typer.Exit(code) from interruption
            _say(f"{word}; {_how_to_go_on(run)}")
        raise typer.Exit(code) from interruption
    except BaseException:
        if is_first_process():
            run.abandon()
        raise
    return metrics


def _keep_some(job: Job, given: Mapping[str, Any]) -> tuple[Job, tuple[Any, Any]]:
    """Return the job without the series that are kept for calibration, and those with labels."""
    from osciformer.data.inputs import take
    from osciformer.estimators.base import split
    from osciformer.estimators.labels import read_labels

    fraction = given["calibration_fraction"]
    stratum = np.zeros(len(job.data), dtype=np.int64)
    if given["task"] == "classification":  # so that training misses no class
        stratum = np.unique(read_labels(job.data, job.labels), return_inverse=True)[1]
    (data, labels), kept = (
        (take(job.data, index), None if job.labels is None else job.labels[index])
        for index in split(stratum, fraction, np.random.default_rng(given["seed"]))
    )
    count = len(kept[0])
    if count == 0:
        raise CommandError(
            f"--calibration-fraction {fraction:g} of {len(job.data)} series is none; give more"
        )
    most = np.floor(1000 * count / (count + 1)) / 1000
    _say(f"{count} series are kept for calibration, enough for --coverage up to {most:g}")
    return job._replace(data=data, labels=labels), kept


def _keep(estimator: Any, run: RunFolder, finish: Callable[[Mapping[str, Any]], None]) -> str:
    """Keep what was reached when training was interrupted, and say what that is."""
    reached = f" after epoch {estimator.n_iter_}"
    if run.is_replacing:
        return f"{reached}; the run in {run.path} stays until the new one is finished"
    finish(_metrics(estimator, is_finished=False))
    alone = ", the network alone," if getattr(estimator, "blend_with", None) else ""
    return f"{reached}; the best model so far{alone} is in {run.path}"


def _how_to_go_on(run: RunFolder) -> str:
    if not (run.work / CHECKPOINT).is_file():
        run.abandon()
        return "no epoch was finished, so that nothing is kept; start again with the same command"
    return f"the checkpoint is kept. Go on with: osciformer fit --resume -o {run.path}"


def _metrics(estimator: Any, *, is_finished: bool) -> dict[str, Any]:
    metrics: dict[str, Any] = {"is_finished": is_finished}
    if hasattr(estimator, "left_out_scores_"):
        scores = estimator.left_out_scores_
        metrics |= {"seconds": estimator.fit_seconds_, "validation": scores}
    else:
        history, best = estimator.history_, estimator.history_[estimator.best_epoch_]
        watched = [name for name in best if name.startswith("val_")]
        metrics |= {"num_epochs": len(history), "best_epoch": estimator.best_epoch_}
        histories = getattr(estimator, "histories_", [history])
        metrics["seconds"] = sum(row["seconds"] for found in histories for row in found)
        metrics["train_loss"] = best["train_loss"]
        metrics["validation"] = {name.removeprefix("val_"): best[name] for name in watched}
    if reasons := undefined(metrics["validation"]):
        metrics["undefined"] = reasons
    if getattr(estimator, "resonator_", None) is not None:
        weight = estimator.network_weight_
        metrics["blend_weights"] = {"network": weight, "resonators": 1.0 - weight}
    if hasattr(estimator, "blend_weights_"):
        metrics["blend_weights"] = estimator.blend_weights_
    return metrics


def _print_validation(metrics: Mapping[str, Any], path: Path) -> None:
    scores = metrics["validation"] or {"train_loss": metrics["train_loss"]}
    title = "Validation, each series by a model of the others"
    if "best_epoch" in metrics:
        title = f"Validation, epoch {metrics['best_epoch'] + 1} of {metrics['num_epochs']}"
    tables.print_table(
        title,
        ("metric", "value"),
        [(name, shown(value)) for name, value in scores.items()],
    )
    print_reasons(metrics.get("undefined", {}))
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
    model = run if run.is_file() else runs.located(run, MODEL)
    if not model.is_file():
        hint = "it is no folder that `osciformer fit` wrote"
        if (run / CONFIG).is_file():
            hint = f"its training was not finished; go on with: osciformer fit --resume -o {run}"
        raise CommandError(f"{run} holds no {MODEL}: {hint}")
    return model


def _check_same_data(run: RunFolder, facts: Mapping[str, Any]) -> None:
    before = run.read_facts() or facts
    for name in ("series", "features", "events", "types"):
        had, has = before.get(name), facts.get(name)
        if had != (list(has) if isinstance(has, tuple) else has):
            raise CommandError(
                f"the run in {run.path} was begun with other {name}: {had}, not {has}; give it the "
                "same table, or start another run"
            )
    known, found = before.get("fingerprint"), facts["fingerprint"]
    if known is None:
        _say(
            f"warning: the run in {run.path} was begun by an older version, which kept nothing to "
            "know its data by; the result is of use only if the table is the same"
        )
    elif known != found:
        names = [n for n in {**known, **found} if known.get(n) != found.get(n)]
        raise CommandError(
            f"the run in {run.path} was begun with another table, with other {', '.join(names)}; "
            "give it the same one, or start another run"
        )
