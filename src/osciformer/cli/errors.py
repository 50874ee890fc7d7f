"""What went wrong, in words that say how to put it right, and exit codes."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable
from typing import Any

import typer

from osciformer._advice import Mention
from osciformer.config import settings

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

# Holds an item while errors are to be let through as they are, with a traceback.
debugging: list[str] = []
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What torch says when it cannot write a checkpoint to the end.
_TORCH_WRITER = ("PytorchStreamWriter", "unexpected pos", "iostream error")


class CommandError(Exception):
    """Something that the user can put right: what is wrong, and what to do."""

    exit_code = FAILED


class Misuse(CommandError):
    """A call that is wrong in itself."""

    exit_code = MISUSED


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
            if debugging:
                raise
            typer.echo(f"error: {explain(error)}", err=True)
            code = error.exit_code if isinstance(error, CommandError) else FAILED
            raise typer.Exit(code) from error

    return run


def explain(error: Exception) -> str:
    """Return what to tell the user about an error; settings that it mentions appear as flags.

    Example:
        >>> from osciformer._advice import advise
        >>> explain(advise(ValueError, "2 series are empty; pass ", Mention("empty", "drop")))
        '2 series are empty; pass --empty drop'
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
    if hasattr(error, "parts"):
        return _in_flags(error.parts)
    if isinstance(error, OSError | ValueError | TypeError | ArithmeticError | LookupError):
        return text or type(error).__name__
    if isinstance(error, ImportError | RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}; run again with --debug to see where it arose"


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that something could not be written for want of room."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _TORCH_WRITER)


def _in_flags(parts: Iterable[str | Mention]) -> str:
    """Return a message for the command line, with flags for the settings that it mentions."""
    flags = {item.python_name: item.flag for item in settings()}

    def spell(mention: Mention) -> str:
        flag = flags.get(mention.name)
        if flag is None:  # a command, if Python says it in another way
            return f"`osciformer {mention.name}`" if mention.python else str(mention)
        if isinstance(mention.value, bool):
            return flag if mention.value else f"--no-{flag.removeprefix('--')}"
        if isinstance(mention.value, list | tuple):
            return f"{flag} {','.join(map(str, mention.value))}"
        value = "none" if mention.value is None else mention.value
        return flag if value is ... else f"{flag} {value}"

    return "".join(spell(part) if isinstance(part, Mention) else part for part in parts)
