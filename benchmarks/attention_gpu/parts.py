"""Sizes of a run, and the parts that time: each yields the rows of its measurements in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from osciformer.bench.report import Row, progress

from .cases import Case, flash_only, maker
from .measure import measure_in_turn, release
from .rows import BOTH, FORWARD, PASSES, complete

LATE = "skipped: the time of the run is used up"
# Ways to run ContiFormer, of `cases.CONTIFORMERS`. The first is its default.
CONTIFORMERS_OF_PASS = {
    FORWARD: ("contiformer", "contiformer_autocast"),
    BOTH: ("contiformer", "contiformer_recompute", "contiformer_adjoint"),
}
# Its length is not doubled after a call this long; the other ways to run it have less time.
CONTIFORMER_LIMIT_MS, OTHERS_LIMIT_MS = 20e3, 4e3
# A call whose first run took longer than this is not repeated.
CONTIFORMER_PATIENCE_MS = 2e3
# Both for the PyTorch backend.
BLOCKED_LIMIT_MS = 8e3


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        n: Lengths of the main comparison.
        tokens: Tokens in a batch, so that the batch is `tokens // N`.
        c: Numbers of channels a head.
        heads: H.
        query_n: Lengths of the other query modes.
        modes_n: Lengths at which the number of modes varies.
        num_modes: The numbers J.
        blocked_n: Lengths of the PyTorch backend.
        paths_n: Lengths at which it is timed beside ours for all query modes.
        paths_tokens: Tokens in a batch there.
        conti_n: Lengths of ContiFormer, until one does not fit.
        conti_c: Its channels a head.
        error_n: Lengths at which results are compared.
        profile_n: Lengths whose kernels are listed.
        graph_n: Length of graph capture and compilation.
        long_n: Length of the training step.
        seconds: Time for the repetitions of one call.
        matmul: Size of the square matrix product that sets the peak.
    """

    n: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    tokens: int = 65536
    c: tuple[int, ...] = (32, 64)
    heads: int = 8
    query_n: tuple[int, ...] = (4096, 16384)
    modes_n: tuple[int, ...] = (4096,)
    num_modes: tuple[int, ...] = (4, 8, 16, 32)
    blocked_n: tuple[int, ...] = (1024, 2048, 4096)
    paths_n: tuple[int, ...] = (512, 4096, 16384)
    paths_tokens: int = 16384
    conti_n: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    conti_c: int = 32
    error_n: tuple[int, ...] = (1024, 4096)
    profile_n: tuple[int, ...] = (4096, 1024)
    graph_n: int = 1024
    long_n: int = 65536
    seconds: float = 1.0
    matmul: int = 8192

    def batch(self, n: int) -> int:
        """Return the batch at length `n`, at least 1."""
        return max(1, self.tokens // n)


FULL = Sizes()
QUICK = Sizes(
    n=(1024, 4096),
    tokens=8192,
    query_n=(4096,),
    blocked_n=(1024,),
    paths_n=(512,),
    conti_n=(128, 256, 512),
    error_n=(1024,),
    profile_n=(1024,),
    long_n=16384,
    seconds=0.2,
)
#: For machines without a GPU: the numbers mean nothing, the code runs.
CPU = Sizes(
    n=(64, 128),
    tokens=128,
    c=(4,),
    heads=2,
    query_n=(64,),
    modes_n=(64,),
    num_modes=(2, 4),
    blocked_n=(64,),
    paths_n=(64,),
    paths_tokens=128,
    conti_n=(8,),
    conti_c=4,
    error_n=(64,),
    profile_n=(16,),
    graph_n=16,
    long_n=128,
    seconds=0.02,
    matmul=64,
)


@dataclass
class Run:
    """What the parts share.

    Attributes:
        sizes: What is measured.
        device: Where.
        backend: Backend of the operator that is judged.
        deadline: `time.monotonic()` after which no measurement is begun.
        peak_tflops: Measured rate of a large matrix product.
    """

    sizes: Sizes
    device: torch.device
    backend: str
    deadline: float = float("inf")
    peak_tflops: float | None = None

    @property
    def memory_mib(self) -> float:
        """Memory of the device; infinite on a CPU, which is not filled."""
        if self.device.type != "cuda":
            return float("inf")
        return torch.cuda.get_device_properties(self.device).total_memory / 2**20

    @property
    def is_late(self) -> bool:
        """Whether the time for the whole run is used up."""
        return time.monotonic() > self.deadline


def timed(
    part: str, cases: list[Case], run: Run, *, patience_ms: float = float("inf")
) -> list[Row]:
    """Return the rows of cases that are measured in turn, failures included.

    Args:
        part: Name of the part.
        cases: What to measure.
        run: What the parts share.
        patience_ms: Of `measure_in_turn`, for others than the backend that is judged.
    """
    names = ", ".join(
        f"{case.implementation} {case.query}"
        + (f" J={case.num_modes}" if case.query == "ridge" else "")
        for case in cases
    )
    first = cases[0]
    progress(f"{part}: N={first.n} B={first.batch} C={first.c} {first.pass_}: {names}")
    rows = [case.row(part, run.device) for case in cases]
    if run.is_late:
        for row in rows:
            row["error"] = LATE
        return rows
    with flash_only(run.device):
        found = measure_in_turn(
            {number: maker(case, run.device) for number, case in enumerate(cases)},
            run.device,
            seconds=run.sizes.seconds,
            patience_ms={
                number: patience_ms
                for number, case in enumerate(cases)
                if case.implementation != run.backend
            },
        )
    release(run.device)
    for number, row in enumerate(rows):
        row.update(found[number].entries)
    complete(rows, run.peak_tflops)
    for row in rows:
        progress(f"    {told(row)}")
    return rows


def told(row: Row) -> str:
    """Return a row in a few words, for the terminal."""
    name = f"{row['implementation']} {row['query']}"
    if row["error"]:
        return f"{name}: {row['error']}"
    words = [f"{name}: {row['ms']:.3f} ms"]
    if row["peak_mib"] is not None:
        words.append(f"{row['peak_mib']:.0f} MiB")
    if row["ratio_ms_sdpa"] is not None:
        words.append(f"{row['ratio_ms_sdpa']:.2f} times SDPA")
    if row["tflops_algorithm"] is not None:
        words.append(f"{row['tflops_algorithm']:.1f} TFLOP/s")
    return ", ".join(words)


def cases_of(run: Run, kinds: list[tuple[str, str]], n: int, c: int, pass_: str) -> list[Case]:
    """Return cases of one shape, from pairs of implementation and query."""
    batch, heads = run.sizes.batch(n), run.sizes.heads
    return [Case(name, query, pass_, n, batch, heads, c) for name, query in kinds]


SDPA = ("sdpa", "dot")


def speed(run: Run) -> Iterator[list[Row]]:
    """``hold`` and SDPA at all lengths."""
    for c in run.sizes.c:
        for n in run.sizes.n:
            for pass_ in PASSES:
                cases = cases_of(run, [SDPA, (run.backend, "hold")], n, c, pass_)
                yield timed("speed", cases, run)


def queries(run: Run) -> Iterator[list[Row]]:
    """The other query modes, beside ``hold`` and SDPA."""
    kinds = [SDPA, *((run.backend, query) for query in ("hold", "linear", "ridge", "learned"))]
    for c in run.sizes.c:
        for n in run.sizes.query_n:
            for pass_ in PASSES:
                yield timed("queries", cases_of(run, kinds, n, c, pass_), run)


def modes(run: Run) -> Iterator[list[Row]]:
    """``ridge`` with several numbers of modes; the time should not depend on it."""
    c = run.sizes.c[-1]
    for n in run.sizes.modes_n:
        for pass_ in PASSES:
            batch, heads = run.sizes.batch(n), run.sizes.heads
            cases = [
                Case(run.backend, "ridge", pass_, n, batch, heads, c, num_modes=j)
                for j in run.sizes.num_modes
            ]
            yield timed("modes", [*cases_of(run, [SDPA], n, c, pass_), *cases], run)


def blocked(run: Run) -> Iterator[list[Row]]:
    """The PyTorch backend on the same device, until a call takes long."""
    for c in run.sizes.c:
        for pass_ in PASSES:
            for n in run.sizes.blocked_n:
                cases = cases_of(run, [SDPA, ("blocked", "hold")], n, c, pass_)
                rows = timed("blocked", cases, run, patience_ms=BLOCKED_LIMIT_MS)
                yield rows
                slowest = max((row["ms"] or float("inf") for row in rows), default=0.0)
                if slowest > BLOCKED_LIMIT_MS:
                    break


def paths(run: Run) -> Iterator[list[Row]]:
    """The PyTorch backend beside ours, for query paths that all rows share and for ``hold``."""
    names = dict.fromkeys((run.backend, "blocked"))
    heads = run.sizes.heads
    for query in ("linear", "ridge", "learned", "hold"):
        for c in run.sizes.c:
            for n in run.sizes.paths_n:
                batch = max(1, run.sizes.paths_tokens // n)
                for pass_ in PASSES:
                    cases = [Case(name, query, pass_, n, batch, heads, c) for name in names]
                    yield timed("paths", cases, run, patience_ms=BLOCKED_LIMIT_MS)


def contiformer(run: Run) -> Iterator[list[Row]]:
    """ContiFormer, batch 1, to the length that does not fit, and ours beside it."""
    for pass_, names in CONTIFORMERS_OF_PASS.items():
        for place, name in enumerate(names):
            limit_ms = OTHERS_LIMIT_MS if place else CONTIFORMER_LIMIT_MS
            yield from _growing(run, name, pass_, limit_ms)


def _growing(run: Run, name: str, pass_: str, limit_ms: float) -> Iterator[list[Row]]:
    heads, c = run.sizes.heads, run.sizes.conti_c
    for n in run.sizes.conti_n:
        # Ours first: that it fits is known before the memory is full.
        ours = Case(run.backend, "hold", pass_, n, 1, heads, c)
        cases = [ours, Case(name, "hermite", pass_, n, 1, heads, c)]
        rows = timed("contiformer", cases, run, patience_ms=CONTIFORMER_PATIENCE_MS)
        yield rows
        if not may_grow(rows[-1], limit_ms, run.memory_mib):
            return


def may_grow(row: Row, limit_ms: float, memory_mib: float) -> bool:
    """Return whether a row of ContiFormer may be followed by one of twice the length.

    Not after a failure or a call that took long. Time and memory are quadratic: a call that cannot
    fit fails soon, but one that fits must not take all the time of the run.

    Args:
        row: The last row.
        limit_ms: The longest call that is followed by another; twice this may be begun.
        memory_mib: Memory of the device.
    """
    if row["ms"] is None or row["ms"] > limit_ms:
        return False
    if row["peak_mib"] is not None and 4 * row["peak_mib"] > memory_mib:
        return True
    return 4 * row["ms"] <= 2 * limit_ms
