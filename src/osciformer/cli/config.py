"""The configuration of a run, from flags and a YAML file, checked and with near matches."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from osciformer._optional import need
from osciformer.cli.errors import MISUSED, CommandError
from osciformer.cli.settings import ESTIMATOR_SETTINGS, SETTINGS, TASKS, Setting

# What may differ between a run and its continuation; of tables it is checked what they hold.
FREE_TO_CHANGE = frozenset(
    {"table", "labels", "validation"}
    | {"accelerator", "devices", "num_nodes", "strategy", "num_workers"}
)
# Their defaults were others once; what a run had that was not given them, its checkpoint tells.
_TOLD_BY_THE_CHECKPOINT = frozenset(
    {"foresight", "keep_latest", "learning_rate", "statistics", "weight_averaging"}
)
_WANTED = {
    "whole": "a whole number",
    "number": "a number",
    "switch": "true or false",
    "text": "a text",
    "texts": "names with commas between them",
    "numbers": "numbers with commas between them",
    "mapping": 'JSON such as {"a": 1}, or a word',
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with near matches, or all that is known.

    Example:
        >>> did_you_mean("drop_out", ["dropout", "dim"])
        "did you mean 'dropout'?"
    """
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known are {', '.join(known)}"


def merge(
    flags: Mapping[str, Any], config: Path | None, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return all settings that were given; flags win over the file, and the file over the base.

    Args:
        flags: Text of each flag, or True and False for switches; None if it was not given.
        config: A YAML file.
        base: Settings of the run that is continued.
    """
    given = dict(base or {})
    if config is not None:
        given |= read_yaml(config)
    for name, text in flags.items():
        if text is not None:
            setting = SETTINGS[name]
            given[name] = text if isinstance(text, bool) else parse(setting, text)
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
    result = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in SETTINGS:
            raise CommandError(
                f"{path}: there is no setting {key!r}; {did_you_mean(name, SETTINGS)}"
            )
        result[name] = check(SETTINGS[name], value, f"{path}: {key}")
    return result


def write_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as the text of a YAML file that `read_yaml` takes."""
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    text: str = need("yaml", extra="cli").safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text


def parse(setting: Setting, text: str) -> Any:
    """Return the value that the text of a flag means.

    Example:
        >>> parse(SETTINGS["patience"], "none"), parse(SETTINGS["pool"], "last,max")
        (None, ('last', 'max'))
    """
    value: Any = text
    try:
        if text.lower() == "none" and setting.is_optional:
            return None
        if setting.kind == "whole":
            value = int(text)
        elif setting.kind == "number":
            value = float(text)
        elif setting.kind in ("texts", "numbers"):
            value = [part.strip() for part in text.split(",") if part.strip()]
            if setting.kind == "numbers":
                value = [float(part) for part in value]
        elif setting.kind == "mapping" and text.lstrip().startswith("{"):
            value = json.loads(text)
    except ValueError:
        value = text
        if setting.kind == "mapping":
            raise CommandError(_complaint(setting, text, setting.flag), MISUSED) from None
    return check(setting, value, setting.flag)


def check(setting: Setting, value: Any, where: str) -> Any:
    """Return a value of the setting's kind, or say what was expected."""
    if value is None and setting.is_optional:
        return None
    if value == "auto" and setting.is_automatic:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if setting.kind in ("texts", "numbers"):
        value = tuple(value) if isinstance(value, list | tuple) else (value,)
    is_good = {
        "whole": is_number and isinstance(value, int),
        "number": is_number,
        "switch": isinstance(value, bool),
        "text": isinstance(value, str) or is_number,
        "texts": isinstance(value, tuple) and all(isinstance(v, str | int) for v in value),
        "numbers": isinstance(value, tuple) and all(isinstance(v, int | float) for v in value),
        "mapping": isinstance(value, dict | str),
    }[setting.kind]
    if not is_good:
        raise CommandError(_complaint(setting, value, where), MISUSED)
    if setting.kind == "text":
        return str(value)
    return tuple(map(str, value)) if setting.kind == "texts" else value


def _complaint(setting: Setting, value: Any, where: str) -> str:
    none = ", or none" if setting.is_optional else ""
    none = f", auto{none}" if setting.is_automatic else none
    return f"{where} must be {_WANTED[setting.kind]}{none}; got {value!r}"


def check_task(given: Mapping[str, Any]) -> str:
    """Return the task, and refuse settings that belong to others."""
    task = given.get("task")
    if task is None:
        raise CommandError(f"--task is needed; it is one of {', '.join(TASKS)}", MISUSED)
    if task not in TASKS:
        raise CommandError(f"there is no task {task!r}; {did_you_mean(task, TASKS)}", MISUSED)
    for name in given:
        setting = SETTINGS[name]
        if task not in setting.tasks:
            raise CommandError(
                f"{setting.flag} is a setting of {' and '.join(setting.tasks)}; the task is {task}",
                MISUSED,
            )
    return str(task)


def check_resumed(given: Mapping[str, Any], before: Mapping[str, Any], estimator: type) -> None:
    """Refuse settings that would make the continuation of a run another one.

    Args:
        given: Settings of the call.
        before: Settings that the run was begun with.
        estimator: Class of the estimator, which has defaults of its own.
    """
    for name, value in given.items():
        if name in _TOLD_BY_THE_CHECKPOINT and name not in before:
            continue
        default = getattr(estimator, SETTINGS[name].python_name, SETTINGS[name].default)
        had = before.get(name, default)
        if name not in FREE_TO_CHANGE and value != had:
            raise CommandError(
                f"{SETTINGS[name].flag} was {had} when the run was begun, and is {value}; go on "
                "with the same settings, or start another run",
                MISUSED,
            )


def estimator_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the estimator that were given, and the seed."""
    chosen = {
        setting.python_name: given[setting.name]
        for setting in ESTIMATOR_SETTINGS
        if setting.name in given
    }
    return {"random_state": SETTINGS["seed"].default, **chosen}
