"""The settings of a run: flags and YAML files, generated from the fields of `osciformer.config`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from osciformer import config
from osciformer._optional import need
from osciformer._text import did_you_mean
from osciformer.cli.errors import CommandError, Misuse
from osciformer.config import MODELS, TASKS, Setting

CONFIG = "config.yaml"
SETTINGS: Mapping[str, Setting] = {
    # An unknown task or model is refused by `check_task`, which knows near names.
    item.name: replace(item, choices=()) if item.name in ("task", "model") else item
    for item in config.settings()
}
# Their defaults were others once; what a run had that was not given them, its checkpoint tells.
_TOLD_BY_THE_CHECKPOINT = frozenset(
    {"learning_rate", "statistics", "variables", "weight_averaging"}
)
_REMOVED = {"foresight": False, "keep_latest": True}  # flags, and whether they were switches


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a flag for every setting in place of its `**settings`."""
    signature = inspect.signature(command, eval_str=True)
    fixed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [_parameter(name, is_switch, hidden=True) for name, is_switch in _REMOVED.items()]
    for name, setting in SETTINGS.items():
        if name == "table":
            continue
        is_switch, shown = setting.kind == "switch", setting.default_text
        told = {"metavar": None if is_switch else setting.kind.upper()}
        told["help"] = setting.help + (f" \\[default: {shown}]" if shown else "")
        short = [setting.short] if setting.short else []
        flags.append(_parameter(name, is_switch, *short, rich_help_panel=setting.panel, **told))
    command.__signature__ = signature.replace(parameters=[*fixed, *flags])  # type: ignore[attr-defined]
    return command


def _parameter(name: str, is_switch: bool, *more: str, **options: Any) -> inspect.Parameter:
    flag = name.replace("_", "-")
    flags = f"--{flag}/--no-{flag}" if is_switch else f"--{flag}"
    option = typer.Option(flags, *more, show_default=False, **options)
    kind: Any = bool if is_switch else str
    shared: dict[str, Any] = {"default": None, "annotation": Annotated[kind | None, option]}
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **shared)


def merge(flags: Mapping[str, Any], file: Path | None, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings that were given; flags win over the file, and the file over the base."""
    given = {**base, **({} if file is None else read_yaml(file))}
    for name, text in flags.items():
        if text is None:
            continue
        if name in _REMOVED:
            raise Misuse(f"--{name.replace('_', '-')} was removed; leave it out")
        given[name] = text if isinstance(text, bool) else parse(SETTINGS[name], text)
    return given


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file; an unknown key is an error."""
    yaml = need("yaml", extra="cli")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise CommandError(f"{path} must hold lines such as 'task: classification'")
    try:
        found = config.without_removed({str(k).replace("-", "_"): v for k, v in content.items()})
        config.refuse_unknown("setting", found, SETTINGS)
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from error
    return {name: check(SETTINGS[name], item, f"{path}: {name}") for name, item in found.items()}


def read_config(run: Path) -> dict[str, Any]:
    """Return the settings that a run folder keeps; none if it has no configuration."""
    return read_yaml(run / CONFIG) if (run / CONFIG).is_file() else {}


def write_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as the text of a YAML file that `read_yaml` takes."""
    dump: Callable[..., str] = need("yaml", extra="cli").safe_dump
    return dump(config.plain(settings), sort_keys=False, allow_unicode=True)


def parse(setting: Setting, text: str) -> Any:
    """Return the value that the text of a flag means."""
    if text.lower() == "none" and setting.is_optional:
        return None
    value: Any = text
    try:
        if setting.kind in ("whole", "number"):
            value = int(text) if setting.kind == "whole" else float(text)
        elif setting.kind in ("texts", "numbers"):
            parts = [part.strip() for part in text.split(",") if part.strip()]
            value = parts if setting.kind == "texts" else [float(part) for part in parts]
        elif setting.kind == "mapping" and text.lstrip().startswith("{"):
            value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Misuse(f"{setting.flag} is not JSON: {error}; got {text!r}") from error
    except ValueError:
        value = text  # `check` says what is wanted
    return check(setting, value, setting.flag)


def check(setting: Setting, value: Any, where: str) -> Any:
    """Return a value that the setting allows, or say what `where` must be."""
    # A name that is a number, such as that of a column.
    if setting.kind in ("text", "texts"):
        value = [*map(_as_text, value)] if isinstance(value, list | tuple) else _as_text(value)
    try:
        replace(setting, choices=(), within=None).check(value)
    except ValueError as error:
        raise Misuse(f"{where} must be {setting.wanted}; got {value!r}") from error
    try:
        return replace(setting, name=where).check(value)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def check_task(given: Mapping[str, Any]) -> str:
    """Return the task, and refuse settings that belong to others."""
    task = given.get("task")
    if task is None:
        raise Misuse(f"--task is needed; it is one of {', '.join(TASKS)}")
    if task not in TASKS:
        raise Misuse(f"there is no task {task!r}; {near(task, TASKS)}")
    for setting in (SETTINGS[name] for name in given):
        if task not in setting.tasks:
            tasks = " and ".join(setting.tasks)
            raise Misuse(f"{setting.flag} is a setting of {tasks}; the task is {task}")
    model = model_of(given)
    if model not in MODELS:
        raise Misuse(f"there is no model {model!r}; {near(model, MODELS)}")
    for setting in (SETTINGS[name] for name in given):
        if model not in setting.models:
            models = " and ".join(setting.models)
            raise Misuse(f"{setting.flag} is a setting of --model {models}; the model is {model}")
    return str(task)


def model_of(given: Mapping[str, Any]) -> str:
    """Return the name of the model."""
    return str(given.get("model", SETTINGS["model"].default))


def near(name: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    """Return a question with near names, or all that are known."""
    return did_you_mean(name, known) or f"known are {', '.join(known)}"


def check_resumed(given: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Refuse settings with which the continuation of a run would be another run."""
    task = check_task(before)
    for name, value in given.items():
        setting = SETTINGS[name]
        is_untold = name in _TOLD_BY_THE_CHECKPOINT and name not in before
        had = before.get(name, setting.defaults.get(task))
        if value != had and not setting.is_free and not is_untold:
            raise Misuse(
                f"{setting.flag} was {had} when the run was begun, and is {value}; go on "
                "with the same settings, or start another run"
            )
