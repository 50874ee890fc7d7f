"""Which of the processes that train together this one is."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Return whether this process writes and prints, of those that train together."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))
