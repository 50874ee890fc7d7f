"""Which of the processes that train together this one is, and what ends them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LATER = 0.05  # seconds in which an object is surely deleted


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
    before = sys.unraisablehook

    def send_again(lost: Any) -> None:
        """Send a signal once more that Python dropped, since it came as an object was deleted."""
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            before(lost)
            return
        number = signal.SIGINT
        if isinstance(lost.exc_value, Terminated):
            number = signal.SIGTERM
            signal.signal(number, raise_terminated)
        timer = threading.Timer(_LATER, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, raise_terminated)
    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


#: Where the processes that train together run, by rank: host and number; filled by `meet`.
peers: list[tuple[str, int]] = []
_PATIENCE = 2.0  # seconds in which one that closes its connections has ended


def meet(gather: Callable[[list[Any], Any], None], count: int) -> None:
    """Tell all processes where this one runs, by what gathers an object of each."""
    peers[:] = [("", 0)] * count
    gather(peers, (socket.gethostname(), os.getpid()))


def lost_peers(patience: float = _PATIENCE) -> list[int]:
    """Return the ranks of processes of this machine that are no more, waiting for the first."""
    here, end = socket.gethostname(), time.monotonic() + patience
    while True:
        found = [rank for rank, (host, pid) in enumerate(peers) if host == here and _is_gone(pid)]
        if found or time.monotonic() > end or len(peers) < 2:
            return found
        time.sleep(0.05)


def name_lost(ranks: list[int]) -> str:
    """Return words on processes that are gone, known by rank or not."""
    if not ranks:
        return f"one of the other processes, of {len(peers)} in all, is gone"
    named = " and ".join(f"{rank} (pid {peers[rank][1]})" for rank in ranks)
    return f"the process of rank {named} is gone, of {len(peers)} in all"


def _is_gone(pid: int) -> bool:
    if os.name != "posix":  # where there is no harmless signal to try
        return False
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user, or the system tells no more
        return False
    return state == "Z"  # dead, but its parent has not asked yet


def is_first_process() -> bool:
    """Return whether this process writes and prints, of those that train together."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))
