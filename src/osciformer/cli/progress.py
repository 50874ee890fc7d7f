"""A bar over parts of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def progress(parts: Iterator[Any], total: int) -> Iterator[Any]:
    """Yield the parts, with a bar of the series done on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("predicting", total=total)
        for part in parts:
            yield part
            bar.advance(task, len(part))
