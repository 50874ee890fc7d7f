"""Which of the processes that train together this one is, and what ends them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM, as schedulers send it; it ends things in the order in which Ctrl-C does."""


def raise_terminated(*_: Any) -> None:
    """Raise `Terminated`, and let what is in order end undisturbed; a handler of signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, unless that has a handler already."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_first_process() -> bool:
    """Return whether this process writes and prints, of those that train together."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))
