"""The command `osciformer`: fit, predict, evaluate, data, bench, info, demo."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from osciformer._optional import need

__all__ = ["main"]

DEBUG_FLAG = "--debug"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the name of the program; those of this process if not given.
            `--debug` may stand anywhere.

    Returns:
        0 if all went well, 1 after an error, 2 for a wrong call, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        for name in ("typer", "rich", "yaml"):
            need(name, extra="cli")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from osciformer.cli.app import app

    if DEBUG_FLAG in arguments:
        arguments = [DEBUG_FLAG, *(item for item in arguments if item != DEBUG_FLAG)]
    try:
        app(arguments, prog_name="osciformer")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
