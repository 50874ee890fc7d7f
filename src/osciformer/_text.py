"""Wording that error messages of the whole package share."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

NUM_NAMED = 5


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return a question with the nearest known names, or an empty text if none is near.

    Example:
        >>> did_you_mean("Drop_out", ["dropout", "dim"])
        "did you mean 'dropout'?"
        >>> did_you_mean("x", ["dropout"]) or "known are dropout"
        'known are dropout'
    """
    by_folded = {str(item).casefold(): str(item) for item in known}
    near = difflib.get_close_matches(str(name).casefold(), by_folded, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(repr(by_folded[item]) for item in near)}?" if near else ""


def name_some(items: Iterable[Any]) -> str:
    """Return the first few items as text, and how many more there are.

    Example:
        >>> name_some(range(8))
        '0, 1, 2, 3, 4 and 3 more'
    """
    items = [item.item() if hasattr(item, "item") else item for item in items]
    shown = ", ".join(repr(item) for item in items[:NUM_NAMED])
    more = len(items) - NUM_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def printable(text: str) -> str:
    r"""Return text of unknown origin for a terminal, with control characters but line ends escaped.

    Escape sequences could repaint the screen, marks of direction could reorder the line, and halves
    of surrogate pairs cannot be printed at all.

    Example:
        >>> print(printable("Müller \x1b[2J"))
        Müller \x1b[2J
    """
    unsafe = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        repr(c)[1:-1] if c != "\n" and unicodedata.category(c) in unsafe else c for c in text
    )


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse a value that is not among the allowed ones.

    Example:
        >>> check_choice("mode", "fats", ["fast", "exact"])
        Traceback (most recent call last):
        ValueError: mode must be one of 'fast', 'exact'; got 'fats'
    """
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {choices}; got {value!r}")
