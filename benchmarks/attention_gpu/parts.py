"""The parts that time: each yields the rows of one measurement after another."""

from __future__ import annotations

from collections.abc import Iterator

from osciformer.bench.report import progress

from .cases import Case, flash_only, maker
from .measure import measure_in_turn, release
from .numbers import BOTH, FORWARD, PASSES, Row, complete
from .sizes import Run

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
