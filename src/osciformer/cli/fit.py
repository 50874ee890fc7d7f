"""`osciformer fit`: a table becomes a trained model in a run folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from osciformer.cli import events, run_folder, tables, training
from osciformer.cli.config import (
    check_resumed,
    check_task,
    did_you_mean,
    estimator_arguments,
    merge,
)
from osciformer.cli.errors import MISUSED, CommandError
from osciformer.cli.settings import EVENTS, QUERY_TASKS, SETTINGS, Setting
from osciformer.cli.static import join_static, static_elsewhere

PATHS = ("table", "labels", "validation")


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a flag for every setting in place of its `**settings`."""
    signature = inspect.signature(command, eval_str=True)
    fixed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [_flag(setting) for name, setting in SETTINGS.items() if name != "table"]
    command.__signature__ = signature.replace(parameters=[*fixed, *flags])  # type: ignore[attr-defined]
    return command


def _flag(setting: Setting) -> inspect.Parameter:
    names = [setting.flag]
    if setting.kind == "switch":
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
    elif setting.short:
        names.append(setting.short)
    default = setting.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    shown = "" if default in (None, "") else f" \\[default: {default}]"
    option = typer.Option(
        *names,
        help=setting.help + shown,
        metavar=None if setting.kind == "switch" else setting.kind.upper(),
        rich_help_panel=setting.panel,
        show_default=False,
    )
    kind: Any = bool if setting.kind == "switch" else str
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


@with_settings
def fit(
    table: Annotated[
        Path | None, typer.Argument(help="CSV, Parquet (file or folder), npz or .ts file.")
    ] = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder to write.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings by name; flags win over it.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder, if there is one.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run in the folder.")
    ] = False,
    progress: Annotated[
        str, typer.Option(help="bar, lines, none, or auto: a bar on a terminal.")
    ] = "auto",
    **settings: Any,
) -> None:
    """Train a model on a table of irregular observations.

    For example: osciformer fit stays.parquet --task classification --id record_id --time minute
    --target in_hospital_death -o run/
    """
    verbose = training.verbosity(progress)
    before = run_folder.read_config(output) if resume else {}
    given = merge(settings, config, before)
    if (output / run_folder.CHECKPOINT).is_file() and before:
        check_resumed(given, before, training.estimator_class(check_task(before)))
    if table is not None:
        given["table"] = str(table)
    for name in PATHS:
        if given.get(name) is not None:
            given[name] = str(Path(given[name]).absolute())
    task = check_task(given)
    if given.get("table") is None:
        raise CommandError(
            f"there is no run to resume in {output}; give the table to train on"
            if resume
            else "the table to train on is missing: osciformer fit TABLE ...",
            MISUSED,
        )
    folder = run_folder.RunFolder(output, is_overwriting=overwrite, is_resuming=resume)
    for name in PATHS:
        if given.get(name) is not None:
            tables.refuse_absent(Path(given[name]))
    if task in EVENTS:
        events.fit_events(given, folder, resume=resume, verbose=verbose)
        return
    path = Path(given["table"])
    layout = tables.make_layout(given, task, path)
    training.check_device(given)
    elsewhere = static_elsewhere(given, path)
    if layout is not None:
        layout = layout.replace(static=tuple(n for n in layout.static if n not in elsewhere))
    data = _open(path, given, layout, elsewhere, stream=given.get("stream"))
    given["stream"] = tables.is_streamed(data)
    if run_folder.is_first_process():
        typer.echo(f"{path}: {tables.describe(data)}", err=True)
    labels = tables.labels_for(data, given, task)
    validation = None
    if given.get("validation"):
        path = Path(given["validation"])
        # From disk like the table, or else if it is large.
        stream = True if given["stream"] and tables.is_parquet(path) else None
        watched = _open(path, given, layout, elsewhere, stream=stream)
        validation = watched, tables.labels_for(watched, given, task)
    estimator = training.estimator_class(task)(
        **(estimator_arguments(given) | _covariates(given, task, data.feature_names)),
        layout=layout,
        run_dir=output,
        resume=resume,
        verbose=verbose,
    )
    metrics = training.train(
        estimator,
        folder,
        data,
        labels,
        settings={"task": task, "seed": SETTINGS["seed"].default, **given},
        facts={"table": given["table"], "series": len(data), "features": data.feature_names},
        validation_data=validation,
    )
    if run_folder.is_first_process():
        training.print_validation(metrics, output)


def _open(
    path: Path,
    given: Mapping[str, Any],
    layout: Any,
    elsewhere: tuple[str, ...],
    *,
    stream: bool | None,
) -> Any:
    """Return the series of a table, with the static features that another one holds."""
    return join_static(
        tables.open_table(path, layout, stream=stream),
        elsewhere,
        labels=given.get("labels"),
        labels_id=given.get("labels_id") or given.get("id"),
    )


def _covariates(given: Mapping[str, Any], task: str, features: Any) -> dict[str, Any]:
    """Return the features that are not predicted, if `--target` names those that are."""
    target = given.get("target")
    if task not in QUERY_TASKS or not target:
        return {}
    if given.get("covariates"):
        raise CommandError("give --target or --covariates, not both", MISUSED)
    for name in target:
        if name not in features:
            raise CommandError(f"there is no feature {name!r}; {did_you_mean(name, features)}")
    known = given.get("known_covariates") or ()
    return {"covariates": tuple(n for n in features if n not in target and n not in known)}
