"""Time of `blocked`, of the paper's closed form and of dot-product attention, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from osciformer._types import Tensor
from osciformer.bench.inputs import SINUSOIDAL, TOKENS, attention, timing_inputs
from osciformer.bench.memory import peak_mib
from osciformer.bench.report import Row, make_row
from osciformer.math.banks import frequency_bank

MIN_REPETITIONS, MAX_REPETITIONS = 5, 51
DEFAULT_NUM_MODES = 8


@dataclass(frozen=True)
class Setting:
    """What all rows of a run share.

    Attributes:
        batch: B.
        heads: H.
        channels: C.
        dtype: Dtype of the tokens.
        device: Where to compute.
        seconds: Time to spend on the repetitions of one group, beyond the least number of them.
    """

    batch: int
    heads: int
    channels: int
    dtype: torch.dtype
    device: torch.device
    seconds: float = 3.0


@dataclass(frozen=True)
class Candidate:
    """One thing to time.

    Attributes:
        backend: A backend of the operator, or "sdpa".
        query: A query mode, or "dot" for "sdpa".
        num_modes: J, None where there are no sinusoids.
    """

    backend: str
    query: str
    num_modes: int | None = None


SDPA = Candidate("sdpa", "dot")


def candidate(backend: str, query: str, num_modes: int = DEFAULT_NUM_MODES) -> Candidate:
    """Return a candidate, with the number of modes if the query has any."""
    return Candidate(backend, query, num_modes if query in SINUSOIDAL else None)


def make_call(
    what: Candidate, length: int, *, with_backward: bool, setting: Setting
) -> Callable[[], object]:
    """Return a function without arguments that runs the candidate once.

    Args:
        what: The candidate.
        length: N.
        with_backward: Also compute the gradients of tokens and spectra. Otherwise none is recorded.
        setting: Shapes, dtype and device.
    """
    x = timing_inputs(
        length,
        batch=setting.batch,
        heads=setting.heads,
        channels=setting.channels,
        dtype=setting.dtype,
        device=setting.device,
    )
    forward: Callable[[], Tensor]
    if what.backend == "sdpa":
        # In its own layout, [B, H, N, C].
        leaves = [x[n].detach().transpose(1, 2).contiguous().requires_grad_() for n in TOKENS]

        def forward() -> Tensor:
            return scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    else:
        leaves = [leaf for leaf in x.values() if leaf.requires_grad]
        if what.num_modes is not None:
            bank = frequency_bank("log_spaced", what.num_modes)
            x["mode_omega"] = bank.to(x["key_omega"])

        def forward() -> Tensor:
            return attention(x, query=what.query, backend=what.backend)

    if not with_backward:

        def without_backward() -> Tensor:
            with torch.no_grad():
                return forward()

        return without_backward
    # Of the shape, layout and dtype of the output, which are those of the query tokens.
    direction = leaves[0].detach().flip(-1)
    return lambda: torch.autograd.grad(forward(), leaves, direction)


def time_in_turn(
    calls: dict[Candidate, Callable[[], object]], *, setting: Setting
) -> tuple[dict[Candidate, float], dict[Candidate, float | None]]:
    """Return the median time in milliseconds and the peak memory in MiB of every call.

    The calls take turns, so that a change of the machine's pace meets all of them alike.
    """
    # The call whose memory is measured is the warm-up.
    peaks = {what: peak_mib(call, setting.device) for what, call in calls.items()}
    times: dict[Candidate, list[float]] = {what: [] for what in calls}
    repetitions = 1
    done = 0
    while done < repetitions:
        for what, call in calls.items():
            times[what].append(_milliseconds(call, setting.device))
        if done == 0:
            wanted = round(1e3 * setting.seconds / sum(t[0] for t in times.values()))
            repetitions = min(MAX_REPETITIONS, max(MIN_REPETITIONS, wanted))
        done += 1
    return {what: statistics.median(t) for what, t in times.items()}, peaks


def speed_rows(
    queries: tuple[str, ...], length: int, *, passes: tuple[str, ...], setting: Setting
) -> list[Row]:
    """Return the rows of `blocked` for every query mode and of SDPA, at one length.

    Args:
        queries: Query modes.
        length: N.
        passes: "fwd", "fwdbwd".
        setting: What all rows share.
    """
    rows = []
    group = [*(candidate("blocked", query) for query in queries), SDPA]
    for which in passes:
        rows += _timed_rows("speed", group, length, which, setting)
    return rows


def modes_rows(
    num_modes: tuple[int, ...], length: int, *, setting: Setting, sdpa_ms: float | None
) -> list[Row]:
    """Return the rows of `ridge`, forward, for several numbers of modes J, which take turns.

    Args:
        num_modes: The numbers J.
        length: N.
        setting: What all rows share.
        sdpa_ms: Time of SDPA at this length in the same run, None if it was not measured.
    """
    group = [candidate("blocked", "ridge", j) for j in num_modes]
    rows = _timed_rows("modes", group, length, "fwd", setting)
    for row in rows:
        row["ratio_sdpa"] = None if sdpa_ms is None else row["ms"] / sdpa_ms
    return rows


def add_reference(
    rows: list[Row], queries: tuple[str, ...], length: int, *, setting: Setting
) -> list[Row]:
    """Time the paper's closed form, forward, and set `ratio_reference` of the rows it belongs to.

    It is slow enough to be its own warm-up: it runs once, after a call that is much smaller.

    Args:
        rows: Rows of the speed case; those of `blocked` at this length, forward, get the ratio.
        queries: Query modes to time.
        length: N.
        setting: What all rows share.

    Returns:
        The rows of the reference, one for each of the query modes that has rows.
    """
    found = []
    for row in rows:
        is_wanted = row["query"] in queries and row["n"] == length
        if not is_wanted or (row["backend"], row["pass"]) != ("blocked", "fwd"):
            continue
        what = Candidate("reference", row["query"], row["j"])
        make_call(what, min(length, 8), with_backward=False, setting=setting)()
        call = make_call(what, length, with_backward=False, setting=setting)
        took, peak = _time_and_peak(call, setting.device)
        row["ratio_reference"] = row["ms"] / took
        entry = _row("speed", what, length, "fwd", setting)
        entry.update(ms=took, peak_mib=peak, ratio_reference=1.0)
        found.append(entry)
    return found


def memory_row(query: str, length: int, *, setting: Setting) -> Row:
    """Return the peak memory of `blocked`, forward and backward, measured in this process.

    A tiny call comes first, so that code pages and thread stacks do not count.
    """
    what = candidate("blocked", query)
    make_call(what, 32, with_backward=True, setting=setting)()
    call = make_call(what, length, with_backward=True, setting=setting)
    took, peak = _time_and_peak(call, setting.device)
    row = _row("memory", what, length, "fwdbwd", setting)
    row.update(ms=took, peak_mib=peak)
    return row


def _timed_rows(
    case: str, group: list[Candidate], length: int, which: str, setting: Setting
) -> list[Row]:
    with_backward = which == "fwdbwd"
    calls = {
        what: make_call(what, length, with_backward=with_backward, setting=setting)
        for what in group
    }
    times, peaks = time_in_turn(calls, setting=setting)
    rows = []
    for what in group:
        row = _row(case, what, length, which, setting)
        row.update(ms=times[what], peak_mib=peaks[what])
        if SDPA in times:
            row["ratio_sdpa"] = times[what] / times[SDPA]
        rows.append(row)
    return rows


def _row(case: str, what: Candidate, length: int, which: str, setting: Setting) -> Row:
    return make_row(
        case=case,
        backend=what.backend,
        query=what.query,
        pass_=which,
        n=length,
        batch=setting.batch,
        heads=setting.heads,
        c=setting.channels,
        j=what.num_modes,
        dtype=str(setting.dtype).removeprefix("torch."),
        device=setting.device.type,
    )


def _time_and_peak(call: Callable[[], object], device: torch.device) -> tuple[float, float | None]:
    """Return the time in milliseconds and the peak memory in MiB of one call."""
    took: list[float] = []
    peak = peak_mib(lambda: took.append(_milliseconds(call, device)), device)
    return took[0], peak


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - start
    del result  # freeing the result is not part of the call
    return 1e3 * took
