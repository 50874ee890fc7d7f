"""What went wrong, in words that say how to put it right, and exit codes."""

from __future__ import annotations

import errno
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import typer

from osciformer._advice import Mention
from osciformer._processes import Terminated, terminable
from osciformer._text import printable
from osciformer.config import settings

FAILED, MISUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143

debugging: list[str] = []  # holds an item while errors are let through, with a traceback
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What torch says when it cannot write a checkpoint to the end.
_TORCH_WRITER = ("PytorchStreamWriter", "unexpected pos", "iostream error")


class CommandError(Exception):
    """Something that the user can put right: what is wrong, and what to do."""


class Misuse(CommandError):
    """A call that is wrong in itself."""


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with messages in place of tracebacks, and exit codes."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with terminable(), warnings.catch_warnings():
                warnings.showwarning = functools.partial(_tell, set())
                command(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt as error:
            code, word = exit_code(error)
            typer.echo(f"{word}; nothing half-written was left", err=True)
            raise typer.Exit(code) from error
        except Exception as error:
            if debugging:
                raise
            typer.echo(f"error: {printable(explain(error))}", err=True)
            raise typer.Exit(MISUSED if isinstance(error, Misuse) else FAILED) from error

    return run


def exit_code(error: KeyboardInterrupt) -> tuple[int, str]:
    """Return the exit code after Ctrl-C or SIGTERM, and what to call it."""
    is_terminated = isinstance(error, Terminated) or isinstance(error.__cause__, Terminated)
    return (TERMINATED, "terminated") if is_terminated else (INTERRUPTED, "interrupted")


def _tell(told: set[str], message: Warning | str, *_: Any) -> None:
    """Print a warning as a line, unless one that differs in numbers only was printed before.

    Each part of a table that is read part by part has numbers of its own.
    """
    text = printable(str(message))
    alike = re.sub(r"\d+", "0", text)
    if alike not in told:
        typer.echo(f"warning: {text}", err=True)
    told.add(alike)


def explain(error: Exception) -> str:
    """Return what to tell the user about an error; settings that it mentions appear as flags."""
    text, name = str(error), getattr(error, "filename", None)
    if isinstance(error, CommandError):
        return text
    is_cut_off = isinstance(error, RuntimeError) and any(part in text for part in _TORCH_WRITER)
    if is_cut_off or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        where = f" for {name}" if name else ""
        return f"there is no room left on the disk{where}; free some, or write to another place"
    if isinstance(error, PermissionError):
        return f"no permission for {name}; check its owner and mode, or use another place"
    if isinstance(error, FileNotFoundError) and error.errno is not None:
        return f"there is no file {name}; check the path"
    if isinstance(error, MemoryError) or "out of memory" in text:
        return "memory is exhausted; try a smaller --batch-size, or --stream for a Parquet table"
    if hasattr(error, "parts"):
        flags = {item.python_name: item.flag for item in settings()}
        return "".join(
            _in_flags(part, flags.get(part.name)) if isinstance(part, Mention) else part
            for part in error.parts
        )
    if isinstance(error, OSError | ValueError | TypeError | ArithmeticError | LookupError):
        return text or type(error).__name__
    if isinstance(error, ImportError | RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}; run again with --debug to see where it arose"


def _in_flags(mention: Mention, flag: str | None) -> str:
    value = mention.value
    if flag is None:  # a command, if Python says it in another way
        return f"`osciformer {mention.name}`" if mention.python else str(mention)
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    if isinstance(value, list | tuple):
        return f"{flag} {','.join(map(str, value))}"
    return flag if value is ... else f"{flag} {'none' if value is None else value}"
