"""Kernels of a call are compiled together, in parallel, before the first of them runs.

Triton compiles a kernel when it is launched, one after another: minutes before a first step. But
which kernels a call takes follows from its shapes alone. So a call that is the first of its kind
is *rehearsed*: its launches are recorded, on tensors of the device "meta", which have no memory.
Then all of them are compiled at once, and Triton keeps them on disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import triton


class Launch(NamedTuple):
    """A kernel and what it is called with, but for its grid."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


_RECORD: ContextVar[list[Launch] | None] = ContextVar("_RECORD", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` over `grid`; while launches are recorded, only note it."""
    record = _RECORD.get()
    if record is None:
        kernel[grid](*args, **options)
    else:
        record.append(Launch(kernel, args, options))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches instead of running them, in this thread."""
    found: list[Launch] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


# --- Compilation. ---------------------------------------------------------------------------------


class CompilationWarning(UserWarning):
    """Says that kernels are compiled, which takes a while, once for a machine."""


#: Seconds after which a user is told what takes so long; kernels that lie on disk take less.
_PATIENCE = 1.0
# Seconds that the slowest kernel and that an average one takes on one core.
_SLOWEST, _AVERAGE = 20, 5
_PREPARED: set[Hashable] = set()
_LOCK = threading.RLock()
_WATCHER: ContextVar[Callable[[int, int], None] | None] = ContextVar("_WATCHER", default=None)


def cache_folder() -> Path:
    """Return the folder in which Triton keeps compiled kernels."""
    return Path(triton.knobs.cache.dir)


def count_threads() -> int:
    """Return how many kernels are compiled at a time: processes of one machine share its cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


@contextlib.contextmanager
def watched(watcher: Callable[[int, int], None]) -> Iterator[None]:
    """Call `watcher` with the number of compiled kernels and of all, in place of a warning."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def prepare(kind: Hashable, rehearse: Callable[[], object], name: str) -> None:
    """Compile together the kernels of a call that is the first of its kind.

    Args:
        kind: What decides which kernels a call takes. Nothing happens for one that was seen before.
        rehearse: Does what the call does, on tensors of the device "meta", through `launch`.
        name: What the kernels are for, in words.

    If anything goes wrong, kernels are compiled one after another as they are launched.
    """
    if kind in _PREPARED or triton.knobs.runtime.interpret:
        return
    with _LOCK:
        if kind in _PREPARED:
            return
        _PREPARED.add(kind)
        launches: list[Launch] = []
        try:
            with recorded() as launches:
                rehearse()
            compile_together(launches, name)
        except BaseException as error:
            # What an ordinary launch would find of a compilation that failed is its error.
            for kernel in {id(one.kernel): one.kernel for one in launches}.values():
                kernel.device_caches.clear()
            if not isinstance(error, Exception):  # such as Ctrl-C
                _PREPARED.discard(kind)
                raise
            warnings.warn(
                f"GPU kernels for {name} were not compiled together, and are compiled one after"
                f" another, which takes minutes ({type(error).__name__}: {error})",
                CompilationWarning,
                stacklevel=3,
            )


def compile_together(launches: Sequence[Launch], name: str) -> None:
    """Compile the kernels of `launches` in threads: most of the compiler runs without the GIL."""
    threads = count_threads()
    with ThreadPoolExecutor(threads, "compile") as pool:
        mode = triton.AsyncCompileMode(pool)
        try:
            with mode:
                for kernel, args, options in launches:
                    kernel.warmup(*args, grid=(1,), **options)
                _wait(list(mode.raw_futures), name, threads)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _wait(futures: list[Future[Any]], name: str, threads: int) -> None:
    """Wait for kernels, and say so once it takes a while."""
    watcher = _WATCHER.get()
    if watcher is not None:
        for done, _ in enumerate(as_completed(futures), 1):
            watcher(done, len(futures))
        return
    pending = wait(futures, timeout=_PATIENCE).not_done
    if pending:
        warnings.warn(
            f"compiling {len(pending)} GPU kernels for {name} on {threads} cores; this happens"
            f" once, may take some {_estimate(len(pending), threads)} seconds, and the kernels stay"
            f" in {cache_folder()} (`osciformer warm-up` prepares them beforehand)",
            CompilationWarning,
            stacklevel=3,
        )


def _estimate(count: int, threads: int) -> int:
    """Return seconds for `count` kernels, roughly: the slowest takes as long as several others."""
    return max(_SLOWEST, 10 * round(count * _AVERAGE / threads / 10))
