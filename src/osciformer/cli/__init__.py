"""The command `osciformer`: fit, predict, evaluate, tune, data, bench, warm-up, info, demo."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from osciformer._optional import need

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with some arguments, or those of this process.

    Returns 0 if all went well, 1 after an error, 2 for a wrong call, 130 after Ctrl-C, 143
    after SIGTERM.
    """
    try:
        for name in ("typer", "rich", "yaml"):
            need(name, extra="cli")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from osciformer.cli.app import app

    given = sys.argv[1:] if argv is None else argv
    arguments = sorted(given, key=lambda one: one != "--debug")  # it may stand anywhere
    try:
        app(arguments, prog_name="osciformer")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
