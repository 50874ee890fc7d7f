"""Jobs on several processes of one thread each, until a deadline."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

from osciformer.bench.report import Row

Job = dict[str, Any]
# A function at the top of a module, so that another process finds it: job and settings to a row.
Work = Callable[[Job, dict[str, Any]], Row]

_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ONE_THREAD = {**dict.fromkeys(_LIMITS, "1"), "OMP_WAIT_POLICY": "PASSIVE"}


def run_jobs(
    jobs: Sequence[Job],
    work: Work,
    settings: dict[str, Any],
    *,
    num_workers: int,
    deadline: float,
    is_ready: Callable[[Job], bool] = lambda job: True,
) -> Iterator[tuple[Job, Row]]:
    """Yield each job with its row as it is finished, until the deadline of `time.monotonic`.

    A job that raises, or whose process dies, has a row with an `error`. Jobs begin in their order;
    one that is not ready waits for another to finish, and begins if nothing is left to wait for.
    """
    waiting = list(jobs)
    running: dict[Connection, tuple[Any, Job]] = {}  # the process and its job
    idle: list[tuple[Connection, Any]] = []

    def next_job() -> Job | None:
        otherwise = 0 if waiting and not running else None
        place = next((n for n, job in enumerate(waiting) if is_ready(job)), otherwise)
        return None if place is None else waiting.pop(place)

    os.environ.update(_ONE_THREAD)  # a process reads them when it starts
    try:
        while time.monotonic() < deadline and (waiting or running):
            while len(running) < num_workers and (job := next_job()) is not None:
                connection, process = idle.pop() if idle else _start(work, settings)
                connection.send(job)
                running[connection] = process, job
            # A wait must not be too long for the system's clock.
            remaining = min(max(0.0, deadline - time.monotonic()), 3600.0)
            for connection in cast(list[Connection], wait(list(running), timeout=remaining)):
                process, job = running.pop(connection)
                try:
                    row: Row = connection.recv()
                    idle.append((connection, process))
                except (EOFError, OSError):
                    process.join()
                    row = {"error": f"its process ended with status {process.exitcode}"}
                    _stop(connection, process)
                while idle and not waiting:
                    _stop(*idle.pop())
                yield job, row
    finally:
        busy = [(connection, process) for connection, (process, _) in running.items()]
        for pair in (*busy, *idle):
            _stop(*pair)


def _start(work: Work, settings: dict[str, Any]) -> tuple[Connection, Any]:
    # A forked process could use neither CUDA nor the thread pools of its parent.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, settings), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _stop(connection: Connection, process: Any) -> None:
    connection.close()
    process.terminate()
    process.join()


def _serve(connection: Connection, work: Work, settings: dict[str, Any]) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    # Ctrl-C reaches all processes of a terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            row = work(job, settings)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        connection.send(row)


def _follow_parent() -> None:
    """End with the parent, even if that was killed and could stop nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
