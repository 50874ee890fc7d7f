"""What went wrong, in words that say how to put it right, and exit codes."""

from __future__ import annotations

import errno
import functools
import re
from collections.abc import Callable
from typing import Any

import typer

from osciformer.cli.settings import flag_names

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What torch says when it cannot write a checkpoint to the end.
_TORCH_WRITER = ("PytorchStreamWriter", "unexpected pos", "iostream error")
_ASSIGNMENT = re.compile(r"""\b(\w+)=('[^']*'|"[^"]*"|\[[^\]]*\]|[\w.+-]+)""")
_IN_WORDS = {
    "Use OsciFormerRegressor": "Use --task regression",
    "Use OsciFormerClassifier": "Use --task classification",
    "use OsciFormerImputer": "use --task imputation",
    "or use read_parquet if": "or pass --no-stream if",
    "Pass relative=True to count from the end": "Use --horizon and --every to count from the end",
    "list_datasets() has them all": "`osciformer data list` shows them all",
}


class CommandError(Exception):
    """Something that the user can put right.

    Args:
        message: What is wrong, and what to do.
        exit_code: Of the program.
    """

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Debugging:
    """Whether errors show where in the program they arose."""

    is_on = False


def set_debug(is_on: bool) -> None:
    """Let errors through as they are, with a traceback, or not."""
    _Debugging.is_on = is_on


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with messages in place of tracebacks, and exit codes."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt as error:
            typer.echo("interrupted; nothing half-written was left", err=True)
            raise typer.Exit(INTERRUPTED) from error
        except Exception as error:
            if _Debugging.is_on:
                raise
            typer.echo(f"error: {explain(error)}", err=True)
            code = error.exit_code if isinstance(error, CommandError) else FAILED
            raise typer.Exit(code) from error

    return run


def explain(error: Exception) -> str:
    """Return what to tell the user about an error.

    Example:
        >>> explain(ValueError("2 series have no value; pass empty='drop' to leave them out"))
        '2 series have no value; pass --empty drop to leave them out'
    """
    text = str(error)
    if isinstance(error, CommandError):
        return text
    if is_disk_full(error):
        name = getattr(error, "filename", None)
        where = f" for {name}" if name else ""
        return f"there is no room left on the disk{where}; free some, or write to another place"
    if isinstance(error, PermissionError):
        return f"no permission for {error.filename}; check its owner and mode, or use another place"
    if isinstance(error, FileNotFoundError) and error.errno is not None:
        return f"there is no file {error.filename}; check the path"
    if isinstance(error, MemoryError) or "out of memory" in text:
        return "memory is exhausted; try a smaller --batch-size, or --stream for a Parquet table"
    if isinstance(error, OSError | ValueError | TypeError | ArithmeticError | LookupError):
        return in_flags(text) or type(error).__name__
    if isinstance(error, ImportError | RuntimeError) and text:
        return in_flags(text)
    return f"{type(error).__name__}: {text}; run again with --debug to see where it arose"


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that something could not be written for want of room."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _TORCH_WRITER)


def in_flags(text: str) -> str:
    """Return advice for Python, such as `clip=None`, as advice for the command line.

    Example:
        >>> in_flags("pass time_format='iso', or values=['a', 'b']; other='x' stays")
        "pass --time-format iso, or --features a,b; other='x' stays"
    """
    for said, meant in _IN_WORDS.items():
        text = text.replace(said, meant)
    flags = flag_names()

    def spell(match: re.Match[str]) -> str:
        flag = flags.get(match[1])
        if flag is None:
            return match[0]
        given = match[2].strip("[]")
        parts = [part.strip().strip("'\"") for part in given.split(",")]
        return f"{flag} {','.join(parts)}"

    return _ASSIGNMENT.sub(spell, text)
