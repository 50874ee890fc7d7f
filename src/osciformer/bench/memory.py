"""Peak memory of a call: of the process on a CPU, of the allocator on a GPU."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from osciformer.bench.report import Row

_MIB = 2**20
_STATUS = Path("/proc/self/status")
# Writing 5 here sets the peak of the resident set back to its size of the moment.
_RESET_PEAK = Path("/proc/self/clear_refs")


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Return how far `call` raises memory above where it was, in MiB; None where nothing can say.

    On a CPU this is the resident set. Memory that the process holds but does not use is given back
    first, where the C library can do that: what a call takes from such a stock cannot be seen.

    Args:
        call: What to run, once.
        device: Where it runs.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / _MIB
    _give_back_unused_memory()
    has_reset = _reset_peak()
    earlier_peak = _process_peak()
    start = _resident()
    call()
    peak = _resident("VmHWM") if has_reset else _process_peak()
    if start is None:
        start = earlier_peak
    if peak is None or start is None:
        return None
    # Without a reset the peak may be one of before the call, which says nothing about it.
    if not has_reset and peak == earlier_peak:
        return None
    return max(0, peak - start) / _MIB


def peak_in_fresh_process(arguments: list[str]) -> Row:
    """Return the row of `python -m osciformer.bench memory`, run in a process of its own.

    Args:
        arguments: Options of that command.
    """
    command = [sys.executable, "-m", "osciformer.bench", "memory", *arguments, "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(
            f"the measurement of memory ended with status {result.returncode}; run it alone to see"
            f" why: python -m osciformer.bench memory {' '.join(arguments)}"
        )
    row: Row = json.loads(result.stdout)
    return row


def _resident(key: str = "VmRSS") -> int | None:
    """Return an entry of the process status in bytes, None on systems without it."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _reset_peak() -> bool:
    try:
        _RESET_PEAK.write_text("5")
    except OSError:
        return False
    return _resident("VmHWM") is not None


def _process_peak() -> int | None:
    """Return the largest resident set of the process so far in bytes, None where unknown."""
    try:
        import resource
    except ImportError:
        return None  # Windows
    # In KiB, but in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _give_back_unused_memory() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return  # not the GNU C library
