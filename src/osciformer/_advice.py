"""Errors that mention settings, which Python and the command line spell in different ways."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

E = TypeVar("E", bound=Exception)


class Mention(NamedTuple):
    """A setting in an error message: `empty='drop'` in Python, `--empty drop` as a flag.

    Attributes:
        name: The parameter in Python; or a command, such as `data list`, for other words there.
        value: The value to give it; a mention without one names the setting alone.
        python: What Python says instead, if it is not a parameter there.

    Example:
        >>> str(Mention("empty", "drop")), str(Mention("stream", False, "read_parquet"))
        ("empty='drop'", 'read_parquet')
    """

    name: str
    value: Any = ...
    python: str = ""

    def __str__(self) -> str:
        return self.python or self.name + ("" if self.value is ... else f"={self.value!r}")


def advise(kind: type[E], *parts: str | Mention) -> E:
    """Return an error whose message is spelled for Python, and which keeps its parts.

    Example:
        >>> raise advise(ValueError, "2 series are empty; pass ", Mention("empty", "drop"))
        Traceback (most recent call last):
        ValueError: 2 series are empty; pass empty='drop'
    """
    error = kind("".join(map(str, parts)))
    error.parts = parts  # type: ignore[attr-defined]
    return error
