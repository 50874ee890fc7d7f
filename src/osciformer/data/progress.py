"""A progress bar for downloads, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

#: Called with the name of the file, the bytes so far, and the bytes in all where they are known.
#: The last call for a file has both numbers equal.
ProgressCallback = Callable[[str, int, int | None], None]

_BAR_CELLS = 24
_SECONDS_BETWEEN = 0.1
_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_bytes(count: float) -> str:
    """Return a number of bytes for people to read.

    Example:
        >>> format_bytes(512), format_bytes(6_632_372)
        ('512 B', '6.6 MB')
    """
    power = 0
    while count >= 1000 and power < len(_UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {_UNITS[power]}"


class TerminalBar:
    """A callback that draws one line for each file, rewritten in place.

    Args:
        stream: Where to draw; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._drawn_at = 0.0

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Draw the state of one file."""
        is_last = done == total
        if not is_last and time.monotonic() - self._drawn_at < _SECONDS_BETWEEN:
            return
        self._drawn_at = time.monotonic()
        if total:
            cells = round(_BAR_CELLS * min(1.0, done / total))
            bar = "#" * cells + "-" * (_BAR_CELLS - cells)
            state = f"[{bar}] {format_bytes(done)} of {format_bytes(total)}"
        else:
            state = format_bytes(done)
        # The escape clears what a longer line left behind.
        self._stream.write(f"\r{name} {state}\x1b[K" + ("\n" if is_last else ""))
        self._stream.flush()


def choose_progress(progress: bool | ProgressCallback | None) -> ProgressCallback | None:
    """Return the callback that `progress` asks for.

    Args:
        progress: A callback, True for a bar, False for nothing, None for a bar if standard error
            is a terminal.

    Example:
        >>> choose_progress(False) is None
        True
    """
    if progress is None:
        progress = bool(getattr(sys.stderr, "isatty", lambda: False)())
    if progress is True:
        return TerminalBar()
    return None if progress is False else progress
