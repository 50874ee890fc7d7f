"""Error, time and memory of the backends of `oscillator_attention`, beside SDPA."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from osciformer._types import Tensor
from osciformer.bench.report import Row, make_row
from osciformer.math.banks import frequency_bank
from osciformer.math.spectrum import init_omega, init_zeta
from osciformer.ops import oscillator_attention
from osciformer.testing import relative_error

#: Query modes with sinusoids, so with a number of modes J.
SINUSOIDAL = ("ridge", "ridge_causal", "anchored", "learned")
TOKENS = ("q", "k", "v")
TIMES = ("query_times", "key_times")
SPECTRA = ("key_omega", "key_zeta", "value_omega", "value_zeta")
# Parameters of the sinusoidal modes, by their names in `query_params`.
_PARAMS = {"mode_omega": "omega", "mode_cos": "cos", "mode_sin": "sin", "mode_constant": "constant"}

# The range in which the error is promised: gaps from 1e-9 to a window of 1.
OMEGA_RANGE = (1e-3, 200.0)
LARGEST_ZETA = 20.0
SMALLEST_GAP = 1e-9
WIDE_HEADS, WIDE_CHANNELS, WIDE_MODES = 2, 6, 4
#: Largest error of outputs and gradients that is allowed, relative to the largest entry of each.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
# JSON has no infinity: stands for the error of a result that is not a number.
_HUGE = 1e300

MIN_REPETITIONS, MAX_REPETITIONS = 5, 51
DEFAULT_NUM_MODES = 8

_MIB = 2**20


class Setting(NamedTuple):
    """What all rows of a run share; `seconds` are for the repetitions of one group of calls."""

    batch: int
    heads: int
    c: int
    dtype: torch.dtype
    device: torch.device
    seconds: float = 3.0


class Candidate(NamedTuple):
    """A backend (or "sdpa"), a query mode ("dot" for "sdpa"), and J if it has sinusoids."""

    backend: str
    query: str
    j: int | None = None

    @classmethod
    def of(cls, backend: str, query: str, num_modes: int = DEFAULT_NUM_MODES) -> Candidate:
        """Return a candidate, with the number of modes if the query has any."""
        return cls(backend, query, num_modes if query in SINUSOIDAL else None)

    def row(self, case: str, length: int, which: str, setting: Setting, **entries: Any) -> Row:
        """Return a row of this candidate with the given results."""
        shape = {"batch": setting.batch, "heads": setting.heads, "c": setting.c}
        where = {"device": setting.device.type, "dtype": str(setting.dtype).removeprefix("torch.")}
        entries |= {"pass": which, "n": length, **self._asdict(), **shape, **where}
        return make_row(case=case, **entries)


SDPA = Candidate("sdpa", "dot")


# Inputs.


def timing_inputs(length: int, setting: Setting) -> dict[str, Tensor]:
    """Return normal tokens at uniform times in [0, 1], with the paper's initial spectra.

    Tokens and spectra require gradients, times do not. Times and spectra stay in float32 if the
    dtype is shorter. Everything is drawn on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    exact = torch.promote_types(setting.dtype, torch.float32)
    heads, channels, device = setting.heads, setting.c, setting.device
    shape = (setting.batch, length, heads, channels)
    x = {name: torch.randn(shape, generator=generator).to(device, setting.dtype) for name in TOKENS}
    for role in ("key", "value"):
        omega = init_omega((heads, channels), 1e-2, 10.0, generator)
        zeta = init_zeta((heads, channels), 0.05, 0.4, generator)
        x[f"{role}_omega"], x[f"{role}_zeta"] = omega.to(device, exact), zeta.to(device, exact)
    for leaf in x.values():
        leaf.requires_grad_()
    times = torch.rand(shape[:2], generator=generator, dtype=torch.float64).sort(dim=1).values
    x["query_times"] = x["key_times"] = times.to(device, exact)
    return x


def wide_inputs(query: str, *, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Return float64 inputs that span every range in which the error is promised.

    omega is log-uniform in [1e-3, 200] with both ends present; zeta is uniform in [0, 2] or [0, 20]
    with 0, 1 and 20 present; gaps are log-uniform from 1e-9 to the window. Gaps grow along
    the series, so that float32 can hold all of them. Velocities matter as much as positions. Take a
    batch of several series: spectra share their gradient over it, and in a single short series it
    may by chance cancel to far less than its terms.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, channels = WIDE_HEADS, WIDE_CHANNELS
    count = heads * channels

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = {name: normal(batch, length, heads, channels) for name in TOKENS}
    for role in ("key", "value"):
        low, high = (math.log(edge) for edge in OMEGA_RANGE)
        position = uniform(count)
        position[:2] = torch.tensor([0.0, 1.0])
        zeta = uniform(count) * torch.tensor([2.0, LARGEST_ZETA]).repeat(count // 2)
        zeta[:3] = torch.tensor([0.0, 1.0, LARGEST_ZETA])
        # Which extreme frequency meets which damping differs between keys and values.
        order = torch.randperm(count, generator=generator)
        omega = torch.exp(low + (high - low) * position).reshape(heads, channels)
        x[f"{role}_omega"], x[f"{role}_zeta"] = omega, zeta[order].reshape(heads, channels)
        x[f"{role}_velocity"] = normal(batch, length, heads, channels) * omega
    exponents = uniform(batch, length - 1).sort(dim=1).values
    exponents[:, 0], exponents[:, -1] = 0.0, 1.0
    gaps = SMALLEST_GAP ** (1.0 - exponents)
    x["key_times"] = pad(gaps.cumsum(1), (1, 0))
    x["query_times"] = x["key_times"].clone()
    if query in SINUSOIDAL:
        x["mode_omega"] = frequency_bank("log_spaced", WIDE_MODES).double()
    if query in ("anchored", "learned"):
        x["mode_cos"] = normal(heads, WIDE_MODES, channels)
        x["mode_sin"] = normal(heads, WIDE_MODES, channels)
        x["mode_constant"] = normal(heads, channels)
    if query == "learned":
        del x["q"]
    return x


def attention(x: dict[str, Tensor], *, query: str, backend: str, value: str = "average") -> Tensor:
    """Return `oscillator_attention` of inputs that are named as above."""
    x = dict(x)
    params = {name: x.pop(key) for key, name in _PARAMS.items() if key in x}
    shared: dict[str, Any] = {"query": query, "query_params": params or None, "value": value}
    out = oscillator_attention(**{"q": None, **x, **shared, "backend": backend})
    assert isinstance(out, torch.Tensor)
    return out


# Errors.


def error_rows(
    query: str,
    backend: str,
    batch: int,
    lengths: Sequence[int],
    device: torch.device,
    values: Sequence[str] = ("average", "point"),
) -> list[Row]:
    """Return the largest errors by dtype, of outputs ("fwd") and of gradients too ("fwdbwd").

    One random case is drawn per length; the place in the tuple is the seed. Times are learned and
    fixed, which takes different paths through the code. Inputs are rounded to float32 first, so
    that one evaluation of the oracle judges both dtypes.
    """
    worst = {(dtype, what): 0.0 for dtype in TOLERANCES for what in ("fwd", "fwdbwd")}
    for seed, length in enumerate(lengths):
        drawn = wide_inputs(query, batch=batch, length=length, seed=seed)
        x = {name: t.float().double().to(device) for name, t in drawn.items()}
        for value in values:
            want = _results(x, query=query, backend="oracle", value=value, of_times=True)
            for dtype in TOLERANCES:
                rounded = {name: t.to(dtype) for name, t in x.items()}
                for of_times in (True, False):
                    got = _results(
                        rounded, query=query, backend=backend, value=value, of_times=of_times
                    )
                    errors = {name: relative_error(t, want[name]) for name, t in got.items()}
                    for what, found in (("fwd", errors["out"]), ("fwdbwd", max(errors.values()))):
                        worst[dtype, what] = max(worst[dtype, what], found)
    judged = Candidate.of(backend, query, WIDE_MODES)
    rows = []
    for (dtype, what), error in worst.items():
        setting = Setting(batch, WIDE_HEADS, WIDE_CHANNELS, dtype, device)
        rows.append(judged.row("error", max(lengths), what, setting, error=min(error, _HUGE)))
    return rows


def failures(rows: list[Row]) -> list[str]:
    """Return a line for every error above its tolerance."""
    lines = []
    for row in rows:
        tolerance = TOLERANCES[getattr(torch, row["dtype"])]
        of = "outputs" if row["pass"] == "fwd" else "outputs and gradients"
        told = f"{row['backend']}, query {row['query']}, {row['dtype']}: the error of {of} is"
        if not row["error"] <= tolerance:
            lines.append(f"{told} {row['error']:.1e}, more than {tolerance:.0e}")
    return lines


def _results(
    x: dict[str, Tensor], *, query: str, backend: str, value: str, of_times: bool
) -> dict[str, Tensor]:
    """Return the output and the gradients of all inputs along one random direction."""
    leaves = {
        name: t.detach().clone().requires_grad_(of_times or name not in TIMES)
        for name, t in x.items()
    }
    out = attention(leaves, query=query, backend=backend, value=value)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)
    free = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(
        (out.double() * direction).sum(), list(free.values()), allow_unused=True
    )
    results = {"out": out.detach()}
    for (name, leaf), gradient in zip(free.items(), gradients, strict=True):
        results[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


# Times.


def make_call(
    what: Candidate, length: int, *, with_backward: bool, setting: Setting
) -> Callable[[], object]:
    """Return a function without arguments that runs the candidate once.

    With the backward pass it computes the gradients of tokens and spectra; without, it records no
    graph.
    """
    x = timing_inputs(length, setting)
    forward: Callable[[], Tensor]
    if what.backend == "sdpa":
        # In its own layout, [B, H, N, C].
        leaves = [x[n].detach().transpose(1, 2).contiguous().requires_grad_() for n in TOKENS]

        def forward() -> Tensor:
            return scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    else:
        leaves = [leaf for leaf in x.values() if leaf.requires_grad]
        if what.j is not None:
            x["mode_omega"] = frequency_bank("log_spaced", what.j).to(x["key_omega"])

        def forward() -> Tensor:
            return attention(x, query=what.query, backend=what.backend)

    if not with_backward:
        return torch.no_grad()(forward)
    # Of the shape, layout and dtype of the output, which are those of the query tokens.
    direction = leaves[0].detach().flip(-1)
    return lambda: torch.autograd.grad(forward(), leaves, direction)


def timed_rows(
    case: str, group: Sequence[Candidate], length: int, which: str, setting: Setting
) -> list[Row]:
    """Return rows with the median time and the peak memory of each candidate.

    The calls take turns, so that a change of the machine's pace affects all of them alike.
    """
    calls = [
        make_call(what, length, with_backward=which == "fwdbwd", setting=setting) for what in group
    ]
    # The call whose memory is measured is the warm-up.
    peaks = [peak_mib(call, setting.device) for call in calls]
    turns = [[milliseconds(call, setting.device) for call in calls]]
    wanted = round(1e3 * setting.seconds / sum(turns[0]))
    for _ in range(1, min(MAX_REPETITIONS, max(MIN_REPETITIONS, wanted))):
        turns.append([milliseconds(call, setting.device) for call in calls])
    times = dict(zip(group, map(statistics.median, zip(*turns, strict=True)), strict=True))
    rows = []
    for (what, ms), peak in zip(times.items(), peaks, strict=True):
        ratio = ms / times[SDPA] if SDPA in times else None
        rows.append(what.row(case, length, which, setting, ms=ms, peak_mib=peak, ratio_sdpa=ratio))
    return rows


def add_reference(rows: list[Row], queries: Sequence[str], setting: Setting) -> list[Row]:
    """Time the paper's closed form beside forward rows of `blocked`, and set `ratio_reference`.

    The closed form is slow enough to be its own warm-up: it runs once, after a much smaller call.
    """
    found = []
    for row in rows:
        if row["query"] in queries and (row["backend"], row["pass"]) == ("blocked", "fwd"):
            what = Candidate("reference", row["query"], row["j"])
            entry = _single("speed", what, row["n"], "fwd", setting, warm_up=min(row["n"], 8))
            row["ratio_reference"], entry["ratio_reference"] = row["ms"] / entry["ms"], 1.0
            found.append(entry)
    return found


def memory_row(query: str, length: int, *, setting: Setting) -> Row:
    """Return the peak memory of `blocked`, forward and backward, measured in this process.

    A tiny call comes first, so that code pages and thread stacks do not count.
    """
    what = Candidate.of("blocked", query)
    return _single("memory", what, length, "fwdbwd", setting, warm_up=32)


def _single(
    case: str, what: Candidate, length: int, which: str, setting: Setting, *, warm_up: int
) -> Row:
    """Return the row of a single call, after a warm-up call of another length."""

    def call_of(n: int) -> Callable[[], object]:
        return make_call(what, n, with_backward=which == "fwdbwd", setting=setting)

    call_of(warm_up)()
    call = call_of(length)
    took: list[float] = []
    peak = peak_mib(lambda: took.append(milliseconds(call, setting.device)), setting.device)
    return what.row(case, length, which, setting, ms=took[0], peak_mib=peak)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - start
    del result  # freeing the result is not part of the call
    return 1e3 * took


# Memory.


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Return how far one `call` raises memory above its start, in MiB; None if that is unknown.

    On a GPU this is the allocator's count, on a CPU the resident set. Memory that the process holds
    but does not use is given back first, if the C library can do that: what a call takes from such
    a stock cannot be seen.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / _MIB
    with suppress(AttributeError, OSError, TypeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
    is_reset = False
    with suppress(OSError):
        # This sets the peak of the resident set to its current size.
        Path("/proc/self/clear_refs").write_text("5")
        is_reset = _resident("VmHWM") is not None
    earlier = _process_peak()
    start = _resident("VmRSS") or earlier
    call()
    peak = _resident("VmHWM") if is_reset else _process_peak()
    # Without a reset, a peak that did not move may be older than the call.
    if peak is None or start is None or (not is_reset and peak == earlier):
        return None
    return max(0, peak - start) / _MIB


def _resident(key: str) -> int | None:
    """Return an entry of the process status in bytes, None on systems without it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return None


def _process_peak() -> int | None:
    """Return the largest resident set of the process so far in bytes, None if unknown."""
    try:
        import resource
    except ImportError:
        return None  # Windows
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
