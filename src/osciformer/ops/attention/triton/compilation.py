"""Kernels of a call are compiled together, in parallel, before the first of them runs.

Triton compiles a kernel when it is launched, one after another: minutes before a first step. But
which kernels a call takes follows from its shapes alone. So a call that is the first of its kind
is *rehearsed*: its launches are recorded, on tensors of the device "meta", which have no memory.
Then all of them are compiled at once, and Triton keeps them on disk.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor


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
