"""Jobs on several processes of one thread each, until a deadline."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from osciformer.bench.report import Row

Job = dict[str, Any]
# A function at the top of a module, so that another process finds it: job and settings to a row.
Work = Callable[[Job, dict[str, Any]], Row]

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


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

    A job that raises, or whose process dies, has a row with an `error`, and the others go on. Jobs
    that run at the deadline are stopped and yield nothing. Jobs begin in their order, except those
    that are not ready, which is asked again whenever another one is finished. If no job is ready
    and none is running, the first one begins.
    """
    waiting = list(jobs)
    workers: dict[Connection, _Worker] = {}
    idle: list[_Worker] = []

    def next_job() -> Job | None:
        ready = next((place for place, job in enumerate(waiting) if is_ready(job)), None)
        if ready is None and waiting and not workers:
            ready = 0
        return None if ready is None else waiting.pop(ready)

    os.environ.update(_ONE_THREAD)  # a process reads them when it starts
    try:
        while time.monotonic() < deadline and (waiting or workers):
            while len(workers) < num_workers and (job := next_job()) is not None:
                worker = idle.pop() if idle else _Worker.start(work, settings)
                worker.give(job)
                workers[worker.connection] = worker
            # A wait must not be too long for the system's clock.
            remaining = min(max(0.0, deadline - time.monotonic()), 3600.0)
            for connection in wait(list(workers), timeout=remaining):
                worker = workers.pop(connection)  # type: ignore[call-overload]
                job, row = worker.job, worker.take()
                if worker.is_usable and waiting:
                    idle.append(worker)
                else:
                    worker.stop()
                yield job, row
    finally:
        for worker in (*workers.values(), *idle):
            worker.stop()


@dataclass
class _Worker:
    """A process with a job."""

    process: Any
    connection: Connection
    job: Job
    is_usable: bool = True

    @classmethod
    def start(cls, work: Work, settings: dict[str, Any]) -> _Worker:
        # A forked process could use neither CUDA nor the thread pools of its parent.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, work, settings), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, {})

    def give(self, job: Job) -> None:
        self.job = job
        self.connection.send(job)

    def take(self) -> Row:
        try:
            row: Row = self.connection.recv()
        except (EOFError, OSError):
            self.is_usable = False
            self.process.join()
            return {"error": f"its process ended with status {self.process.exitcode}"}
        return row

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()


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
