"""Error, time and memory of the backends of `oscillator_attention`, beside SDPA."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
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

SINUSOIDAL = ("ridge", "ridge_causal", "anchored", "learned")  # queries with a number of modes J
TOKENS, TIMES = ("q", "k", "v"), ("query_times", "key_times")
SPECTRA = ("key_omega", "key_zeta", "value_omega", "value_zeta")

# The range in which the error is promised: gaps from 1e-9 to a window of 1.
OMEGA_RANGE, LARGEST_ZETA, SMALLEST_GAP = (1e-3, 200.0), 20.0, 1e-9
WIDE_HEADS, WIDE_CHANNELS, WIDE_MODES = 2, 6, 4
#: Largest error of outputs and gradients that is allowed, relative to the largest entry of each.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_HUGE = 1e300  # the error of a result that is not a number: JSON has no infinity
MIN_REPETITIONS, MAX_REPETITIONS = 5, 51
_MIB = 2**20


class Setting(NamedTuple):
    """What all rows of a run share."""

    batch: int
    heads: int
    c: int
    dtype: torch.dtype
    device: torch.device
    seconds: float = 3.0  # for the repetitions of one group of calls


class Candidate(NamedTuple):
    """A backend (or "sdpa"), a query mode ("dot" for "sdpa"), and J for queries with sinusoids."""

    backend: str
    query: str
    j: int | None = 8

    def row(self, case: str, length: int, which: str, setting: Setting, **entries: Any) -> Row:
        """Return a row of this candidate with the given results."""
        shared: dict[str, Any] = {"batch": setting.batch, "heads": setting.heads, "c": setting.c}
        shared |= {"device": setting.device.type, "dtype": str(setting.dtype).split(".")[1]}
        shared["j"] = self.j if self.query in SINUSOIDAL else None
        shared |= {"pass": which, "n": length, "backend": self.backend, "query": self.query}
        return make_row(case=case, **shared, **entries)


SDPA = Candidate("sdpa", "dot")


def timing_inputs(length: int, setting: Setting) -> dict[str, Tensor]:
    """Return tokens and initial spectra, which require gradients, at uniform times in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.promote_types(setting.dtype, torch.float32)  # of times and spectra
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
    """Return float64 inputs that span every range in which the error is promised, with its ends.

    Gaps grow along the series, so that float32 can hold all of them. Take several series: in a
    single short one the gradient of a spectrum may cancel by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    random: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    heads, channels = WIDE_HEADS, WIDE_CHANNELS
    tokens, count = (batch, length, heads, channels), heads * channels
    x = {name: torch.randn(tokens, **random) for name in TOKENS}
    low, high = (math.log(edge) for edge in OMEGA_RANGE)
    for role in ("key", "value"):
        position = torch.rand(count, **random)
        position[:2] = torch.tensor([0.0, 1.0])
        zeta = torch.rand(count, **random) * torch.tensor([2.0, LARGEST_ZETA]).repeat(count // 2)
        zeta[:3] = torch.tensor([0.0, 1.0, LARGEST_ZETA])
        # Which extreme frequency meets which damping differs between keys and values.
        order = torch.randperm(count, generator=generator)
        omega = torch.exp(low + (high - low) * position).reshape(heads, channels)
        x[f"{role}_omega"], x[f"{role}_zeta"] = omega, zeta[order].reshape(heads, channels)
        x[f"{role}_velocity"] = torch.randn(tokens, **random) * omega
    exponents = torch.rand(batch, length - 1, **random).sort(dim=1).values
    exponents[:, 0], exponents[:, -1] = 0.0, 1.0
    x["key_times"] = pad((SMALLEST_GAP ** (1.0 - exponents)).cumsum(1), (1, 0))
    x["query_times"] = x["key_times"].clone()
    if query in SINUSOIDAL:
        x["mode_omega"] = frequency_bank("log_spaced", WIDE_MODES).double()
    if query in ("anchored", "learned"):
        for name in ("mode_cos", "mode_sin"):
            x[name] = torch.randn(heads, WIDE_MODES, channels, **random)
        x["mode_constant"] = torch.randn(heads, channels, **random)
    if query == "learned":
        del x["q"]
    return x


def attention(x: dict[str, Tensor], *, query: str, backend: str, value: str = "average") -> Tensor:
    """Return `oscillator_attention` of inputs that are named as above."""
    params = {key.removeprefix("mode_"): x[key] for key in x if key.startswith("mode_")}
    inputs: dict[str, Any] = {key: t for key, t in x.items() if not key.startswith("mode_")}
    inputs = {"q": None, **inputs, "query_params": params or None, "query": query}
    out = oscillator_attention(**inputs | {"value": value, "backend": backend})
    assert isinstance(out, torch.Tensor)
    return out


def error_rows(
    query: str,
    backend: str,
    batch: int,
    lengths: Sequence[int],
    device: torch.device,
    values: Sequence[str] = ("average", "point"),
) -> list[Row]:
    """Return the largest errors by dtype, of outputs ("fwd") and of gradients too ("fwdbwd")."""
    worst = {(dtype, what): 0.0 for dtype in TOLERANCES for what in ("fwd", "fwdbwd")}
    for (seed, length), value in itertools.product(enumerate(lengths), values):
        drawn = wide_inputs(query, batch=batch, length=length, seed=seed)
        # Rounded to float32 first, so that one evaluation of the oracle judges both dtypes.
        x = {name: t.float().double().to(device) for name, t in drawn.items()}
        want = _results(x, query, "oracle", value, of_times=True)
        for dtype, of_times in itertools.product(TOLERANCES, (True, False)):
            rounded = {name: t.to(dtype) for name, t in x.items()}
            got = _results(rounded, query, backend, value, of_times=of_times)
            errors = {name: relative_error(t, want[name]) for name, t in got.items()}
            for what, found in (("fwd", errors["out"]), ("fwdbwd", max(errors.values()))):
                worst[dtype, what] = min(max(worst[dtype, what], found), _HUGE)
    judged, shape = Candidate(backend, query, WIDE_MODES), (batch, WIDE_HEADS, WIDE_CHANNELS)
    return [
        judged.row("error", max(lengths), what, Setting(*shape, dtype, device), error=error)
        for (dtype, what), error in worst.items()
    ]


def failures(rows: list[Row]) -> list[str]:
    """Return a line for every error above its tolerance."""
    lines = []
    for row in rows:
        tolerance = TOLERANCES[getattr(torch, row["dtype"])]
        of = "outputs" if row["pass"] == "fwd" else "outputs and gradients"
        told = "{backend}, query {query}, {dtype}: the error of ".format_map(row)
        if not row["error"] <= tolerance:
            lines.append(f"{told}{of} is {row['error']:.1e}, more than {tolerance:.0e}")
    return lines


def _results(
    x: dict[str, Tensor], query: str, backend: str, value: str, *, of_times: bool
) -> dict[str, Tensor]:
    """Return the output and the gradients of all inputs along one random direction."""
    leaves = {name: t.detach().clone() for name, t in x.items()}
    free = {name: t.requires_grad_() for name, t in leaves.items() if of_times or name not in TIMES}
    out = attention(leaves, query=query, backend=backend, value=value)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)
    loss = (out.double() * direction).sum()
    # Of inputs without effect, zeros.
    gradients = torch.autograd.grad(loss, list(free.values()), materialize_grads=True)
    return {"out": out.detach(), **dict(zip(free, gradients, strict=True))}


def make_call(what: Candidate, length: int, which: str, setting: Setting) -> Callable[[], object]:
    """Return a function that runs the candidate once, perhaps with gradients of all leaves."""
    x = timing_inputs(length, setting)
    if what.backend == "sdpa":
        # In its own layout, [B, H, N, C].
        leaves = [x[n].detach().transpose(1, 2).contiguous().requires_grad_() for n in TOKENS]
        q, k, v = leaves
        forward = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
    else:
        leaves = [leaf for leaf in x.values() if leaf.requires_grad]
        if what.query in SINUSOIDAL:
            assert what.j is not None
            x["mode_omega"] = frequency_bank("log_spaced", what.j).to(x["key_omega"])
        forward = partial(attention, x, query=what.query, backend=what.backend)
    if which == "fwd":
        return torch.no_grad()(forward)
    # Of the shape, layout and dtype of the output, which are those of the query tokens.
    direction = leaves[0].detach().flip(-1)
    return lambda: torch.autograd.grad(forward(), leaves, direction)


def timed_rows(
    case: str, group: Sequence[Candidate], length: int, which: str, setting: Setting
) -> list[Row]:
    """Return rows with the median time and the peak memory of each candidate, which take turns."""
    calls = [make_call(what, length, which, setting) for what in group]
    peaks = [peak_mib(call, setting.device) for call in calls]  # which is the warm-up
    turns: list[list[float]] = []
    wanted = 1
    while len(turns) < wanted:
        turns.append([milliseconds(call, setting.device) for call in calls])
        affordable = round(1e3 * setting.seconds / sum(turns[0]))
        wanted = min(MAX_REPETITIONS, max(MIN_REPETITIONS, affordable))
    medians = [statistics.median(of_call) for of_call in zip(*turns, strict=True)]
    rows = []
    for what, ms, peak in zip(group, medians, peaks, strict=True):
        ratio = ms / medians[group.index(SDPA)] if SDPA in group else None
        rows.append(what.row(case, length, which, setting, ms=ms, peak_mib=peak, ratio_sdpa=ratio))
    return rows


def add_reference(rows: list[Row], queries: Sequence[str], setting: Setting) -> list[Row]:
    """Time the closed form once beside forward rows of `blocked`, and set `ratio_reference`."""
    found = []
    for row in rows:
        if row["query"] in queries and (row["backend"], row["pass"]) == ("blocked", "fwd"):
            what = Candidate("reference", row["query"], row["j"])
            entry = _single("speed", what, row["n"], "fwd", setting, warm_up=min(row["n"], 8))
            row["ratio_reference"], entry["ratio_reference"] = row["ms"] / entry["ms"], 1.0
            found.append(entry)
    return found


def memory_row(query: str, length: int, *, setting: Setting) -> Row:
    """Return the peak memory of `blocked`, forward and backward, measured in this process."""
    return _single("memory", Candidate("blocked", query), length, "fwdbwd", setting, warm_up=32)


def _single(
    case: str, what: Candidate, length: int, which: str, setting: Setting, *, warm_up: int
) -> Row:
    """Return the row of one call, after a shorter one: code and thread stacks do not count."""
    make_call(what, warm_up, which, setting)()
    call = make_call(what, length, which, setting)
    took: list[float] = []
    peak = peak_mib(lambda: took.append(milliseconds(call, setting.device)), setting.device)
    return what.row(case, length, which, setting, ms=took[0], peak_mib=peak)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call, without that of freeing its result."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    _result = call()
    wait()
    return 1e3 * (time.perf_counter() - start)


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Return how far a call raises the allocator's count or, on a CPU, the resident set, in MiB."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / _MIB
    # What a call takes from memory that the process holds without use cannot be seen: give it back.
    with suppress(AttributeError, OSError, TypeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
    is_reset = False
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the current size
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
    """Return the largest resident set of the process so far in bytes, None on Windows."""
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None
