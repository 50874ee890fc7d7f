"""Time and peak memory of calls that take turns, and failures put into words."""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .rows import middle, repetitions

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

TURNS = 3
_MIB = 2**20
_FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/")
_LONGEST_MESSAGE = 400


@dataclass
class Measured:
    """What one call took.

    Attributes:
        entries: Entries of a row: times, memory, or the error.
        is_good: Whether it ran.
    """

    entries: dict[str, Any]
    is_good: bool


def measure_in_turn(
    makers: Mapping[Key, Callable[[], Call]],
    device: torch.device,
    *,
    seconds: float,
    patience_ms: Mapping[Key, float] | None = None,
) -> dict[Key, Measured]:
    """Return time and peak memory of calls; those that fail do not keep the others from running.

    Each call runs twice first: once to compile, once for its memory. Then the calls take turns, a
    few repetitions each, so that a change of the clocks meets all of them alike. Within a
    turn calls are queued without waiting, as in a model, each between two events of its own.

    Peak memory is the allocator's, above what was allocated before the inputs were made, and None
    on a CPU. That of a call that ran out of memory is what it had when it failed.

    Args:
        makers: Functions that make the inputs and return the call.
        device: Where they run.
        seconds: Time for the repetitions of one call.
        patience_ms: A first call longer than this is not repeated: its time and memory are reported
            as they are. Not for calls that compile.
    """
    found: dict[Key, Measured] = {}
    calls: dict[Key, Call] = {}
    times: dict[Key, list[float]] = {}
    shares: dict[Key, int] = {}
    for key, make in makers.items():
        with _recorded(found, key, device):
            patience = (patience_ms or {}).get(key, float("inf"))
            call, found[key] = _warm_up(make, device, patience)
            once_ms = found[key].entries["ms"]
            if call is not None and once_ms <= 1e3 * seconds:
                calls[key], times[key] = call, []
                shares[key] = -(-repetitions(once_ms, seconds) // TURNS)
            # What is not repeated must not hold its inputs while the next is measured.
            del call
    for _ in range(TURNS):
        for key in list(calls):
            with _recorded(found, key, device):
                times[key] += time_calls(calls[key], shares[key], device)
            if not found[key].is_good:
                del calls[key]
    for key in calls:
        found[key].entries.update(repetitions=len(times[key]), **middle(times[key]))
    return found


def _warm_up(
    make: Callable[[], Call], device: torch.device, patience_ms: float
) -> tuple[Call | None, Measured]:
    """Return a call and what its second run took, or None and the first if that was too long."""
    before = _allocated(device)
    call = make()
    first_ms, peak = _once(call, device, before)
    is_repeated = first_ms <= patience_ms
    once_ms = first_ms
    if is_repeated:
        once_ms, peak = _once(call, device, before)
    entries = {"first_ms": first_ms, "peak_mib": peak, "repetitions": 1, **middle([once_ms])}
    return call if is_repeated else None, Measured(entries, True)


@contextmanager
def _recorded(found: dict[Any, Measured], key: Any, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        peak = None
        if isinstance(error, torch.cuda.OutOfMemoryError):
            peak = torch.cuda.max_memory_allocated(device) / _MIB
        found[key] = Measured({"error": in_words(error), "peak_mib": peak}, False)
        # The frames of a failed call hold its tensors.
        traceback.clear_frames(error.__traceback__)
        del error
        release(device)


def time_calls(call: Call, count: int, device: torch.device) -> list[float]:
    """Return the times of `count` calls in milliseconds, by events where the device has them."""
    if device.type != "cuda":
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize(device)
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in pairs]


def _once(call: Call, device: torch.device, before: int) -> tuple[float, float | None]:
    """Return the time of one call in milliseconds, and its peak memory above `before` in MiB."""
    if device.type != "cuda":
        return time_calls(call, 1, device)[0], None
    torch.cuda.reset_peak_memory_stats(device)
    (ms,) = time_calls(call, 1, device)
    return ms, (torch.cuda.max_memory_allocated(device) - before) / _MIB


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def release(device: torch.device) -> None:
    """Give unused memory back, if the device still answers."""
    if device.type == "cuda" and not is_broken(device):
        gc.collect()
        torch.cuda.empty_cache()


def is_broken(device: torch.device) -> bool:
    """Return whether an earlier error, such as a bad address, has made the device unusable."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def in_words(error: BaseException) -> str:
    """Return type and message of an error, shortened, without the folders of this machine."""
    message = " ".join(_FOLDERS.sub("", str(error)).split())
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE].rstrip() + " ..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def matmul_tflops(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of a square matrix product of random entries in TFLOP/s."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    time_calls(lambda: a @ b, 3, device)
    ms = middle(time_calls(lambda: a @ b, 20, device))["ms"]
    return 2.0 * size**3 / ms / 1e9
