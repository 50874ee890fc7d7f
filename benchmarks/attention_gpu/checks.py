"""The parts that look: errors, a long training step, graphs, compilation, and kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from osciformer._types import Tensor
from osciformer.bench.report import progress
from osciformer.bench.speed import SPECTRA, attention
from osciformer.math.spectrum import raw_from_omega, raw_from_zeta, zeta_from_raw
from osciformer.testing import relative_error

from .cases import Case, leaf_names, make_inputs, maker
from .measure import in_words, measure_in_turn, release, time_calls
from .parts import LATE, Run
from .rows import BOTH, FORWARD, PASSES, Row, complete, middle

PROFILED_CALLS = 3
TOP_KERNELS = 8
TRAINING_STEPS = 3


def guarded(part: str, case: Case, run: Run, fill: Callable[[Row, Case, Run], None]) -> list[Row]:
    """Return the row of a case after `fill` has set its results, or with the error it raised."""
    row = case.row(part, run.device)
    progress(f"{part}: {case.query} N={case.n} B={case.batch} C={case.c} {case.pass_}")
    if run.is_late:
        row["error"] = LATE
        return [row]
    try:
        fill(row, case, run)
        complete([row], run.peak_tflops)
    except Exception as error:
        row.update(error=in_words(error), works=False)
        progress(f"    {row['error']}")
    release(run.device)
    return [row]


def errors(run: Run) -> Iterator[list[Row]]:
    """Output and gradients in bfloat16 against ``blocked`` in float64 on the same inputs."""
    sizes = run.sizes
    for c in sizes.c:
        for n in sizes.error_n:
            usual = Case(run.backend, "hold", BOTH, n, 1, sizes.heads, c)
            for horizon in dict.fromkeys((usual.longest, 1.0)):
                case = replace(usual, horizon=horizon)
                yield guarded("error", case, run, _compare)
    n = sizes.error_n[0]
    for query in ("linear", "ridge", "learned"):
        case = Case(run.backend, query, BOTH, n, 1, sizes.heads, sizes.c[-1])
        yield guarded("error", case, run, _compare)


def _compare(row: Row, case: Case, run: Run) -> None:
    """Set the largest errors over output and gradients, and those of each under ``details``."""
    x = make_inputs(case, run.device)
    got = _results(x, case.query, run.backend)
    exact = {name: t.detach().double() for name, t in x.items()}
    exact["query_times"] = exact["key_times"]
    for name in leaf_names(exact):
        exact[name].requires_grad_()
    want = _results(exact, case.query, "blocked")
    details = {
        name: {"max": relative_error(got[name], t), "frobenius": frobenius_error(got[name], t)}
        for name, t in want.items()
    }
    # JSON has no infinity.
    for pair in details.values():
        for which, found in pair.items():
            pair[which] = min(found, 1e300)
    row["details"] = details
    row["max_error"] = max(pair["max"] for pair in details.values())
    row["frobenius_error"] = max(pair["frobenius"] for pair in details.values())
    shown = ", ".join(f"{name} {pair['frobenius']:.1e}" for name, pair in details.items())
    progress(f"    relative Frobenius errors: {shown}")


def _results(x: dict[str, Tensor], query: str, backend: str) -> dict[str, Tensor]:
    """Return the output and the gradients along one random direction, the same for all dtypes."""
    out = attention(x, query=query, backend=backend)
    generator = torch.Generator(out.device).manual_seed(1)
    # Rounded to bfloat16, so that every dtype holds it exactly.
    direction = torch.randn(
        out.shape, generator=generator, device=out.device, dtype=torch.bfloat16
    ).to(out.dtype)
    names = leaf_names(x)
    gradients = torch.autograd.grad(out, [x[name] for name in names], direction)
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def frobenius_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm expected; inf for a NaN."""
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.norm().clamp(min=torch.finfo(torch.float64).tiny)
    found = float((actual - expected).norm() / scale)
    return found if found == found else float("inf")


def long_step(run: Run) -> Iterator[list[Row]]:
    """A few training steps on one long series: finite losses and gradients, time and memory."""
    for c in run.sizes.c:
        case = Case(run.backend, "hold", BOTH, run.sizes.long_n, 1, run.sizes.heads, c)
        yield guarded("long", case, run, _train)


def _train(row: Row, case: Case, run: Run) -> None:
    measured = measure_in_turn({0: maker(case, run.device)}, run.device, seconds=run.sizes.seconds)
    row.update(measured[0].entries)
    if not measured[0].is_good:
        row["works"] = False
        progress(f"    {row['error']}")
        return
    x = {name: t.detach() for name, t in make_inputs(case, run.device).items()}
    x["query_times"] = x["key_times"]
    target = torch.randn_like(x["v"])
    # Frequencies and damping ratios stay positive: their raw values are learned.
    leaves = {name: x[name].clone() for name in leaf_names(x)}
    for name in SPECTRA:
        leaves[name] = (raw_from_omega if name.endswith("omega") else raw_from_zeta)(x[name])
    optimizer = torch.optim.Adam([leaf.requires_grad_() for leaf in leaves.values()], lr=1e-2)
    losses, is_finite = [], True
    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        spectra = {
            name: leaves[name].exp() if name.endswith("omega") else zeta_from_raw(leaves[name])
            for name in SPECTRA
        }
        out = attention({**x, **leaves, **spectra}, query=case.query, backend=run.backend)
        loss = (out.float() - target.float()).square().mean()
        loss.backward()
        gradients = [leaf.grad for leaf in leaves.values()]
        is_finite &= all(g is not None and bool(g.isfinite().all()) for g in gradients)
        losses.append(loss.item())
        optimizer.step()
    is_finite &= all(abs(loss) < float("inf") for loss in losses)
    row["works"] = is_finite
    row["details"] = {
        "losses": losses if is_finite else [str(loss) for loss in losses],
        "gradients_finite": is_finite,
        "loss_falls": losses[-1] < losses[0],
    }
    progress(f"    {row['ms']:.1f} ms, finite: {is_finite}, losses {losses}")


def graphs(run: Run) -> Iterator[list[Row]]:
    """Capture in a CUDA graph, and `torch.compile(fullgraph=True)`, beside plain calls."""
    n, c = run.sizes.graph_n, run.sizes.c[-1]
    case = Case(run.backend, "hold", FORWARD, n, run.sizes.batch(n), run.sizes.heads, c)
    small = replace(case, batch=1)
    for shape in (case, small):
        if run.device.type == "cuda":
            yield guarded("cuda_graph", shape, run, _capture)
    # Tracing takes seconds: a CPU, where this only shows that it runs, does it once.
    for pass_ in PASSES if run.device.type == "cuda" else (BOTH,):
        shape = replace(small, pass_=pass_)
        yield guarded("compile", shape, run, _compile)


def _capture(row: Row, case: Case, run: Run) -> None:
    x = make_inputs(case, run.device)

    def call() -> Tensor:
        with torch.no_grad():
            return attention(x, query=case.query, backend=run.backend)

    stream = torch.cuda.Stream(run.device)
    stream.wait_stream(torch.cuda.current_stream(run.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream(run.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    # New tokens in the old place: the graph must compute, not remember.
    with torch.no_grad():
        x["v"].copy_(torch.randn_like(x["v"]))
    graph.replay()
    _against_plain(row, captured, call, graph.replay, run)


def _compile(row: Row, case: Case, run: Run) -> None:
    x = make_inputs(case, run.device)
    names = leaf_names(x)

    def scaled(x: dict[str, Tensor]) -> Tensor:
        return 2 * attention(x, query=case.query, backend=run.backend) + x["v"]

    # Inductor needs a compiler on a CPU, and minutes; there only the graph is judged.
    how = "inductor" if run.device.type == "cuda" else "eager"
    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend=how)

    def of(function: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            if case.pass_ == FORWARD:
                with torch.no_grad():
                    return function(x)
            out = function(x)
            gradients = torch.autograd.grad(out.float().square().mean(), [x[n] for n in names])
            return torch.cat([g.float().flatten() for g in gradients])

        return call

    call = of(compiled)
    (row["first_ms"],) = time_calls(call, 1, run.device)
    _against_plain(row, call(), of(scaled), call, run)


def _against_plain(
    row: Row, got: Tensor, plain: Callable[[], Tensor], call: Callable[[], Any], run: Run
) -> None:
    """Set the times of both calls and how far their results are apart."""
    row["max_error"] = min(1e300, relative_error(got, plain()))
    row["works"] = row["max_error"] < 0.05
    row["repetitions"] = 20
    plain_ms = statistics.median(time_calls(plain, 20, run.device))
    row.update(middle(time_calls(call, 20, run.device)))
    row["details"] = {"plain_ms": plain_ms}
    progress(f"    {row['ms']:.3f} ms, plain {plain_ms:.3f} ms, apart {row['max_error']:.1e}")


def kernels(run: Run) -> Iterator[list[Row]]:
    """Where the time of ``hold`` goes: its kernels by total time, and the share between them."""
    for n in run.sizes.profile_n:
        for c in reversed(run.sizes.c):
            for pass_ in PASSES:
                case = Case(run.backend, "hold", pass_, n, run.sizes.batch(n), run.sizes.heads, c)
                yield guarded("kernels", case, run, _profile)


def _profile(row: Row, case: Case, run: Run) -> None:
    call = maker(case, run.device)()
    time_calls(call, 2, run.device)
    row.update(middle(time_calls(call, 5, run.device)), repetitions=5)
    is_cuda = run.device.type == "cuda"
    num_calls = PROFILED_CALLS if is_cuda else 1
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(num_calls):
            call()
        if is_cuda:
            torch.cuda.synchronize(run.device)
    spent: dict[str, tuple[float, int]] = {}
    for event in profiler.events():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if is_kernel != is_cuda or getattr(event, "is_user_annotation", False):
            continue
        took = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
        total, count = spent.get(event.name, (0.0, 0))
        spent[event.name] = (total + took, count + 1)
    row["works"] = bool(spent)
    row["details"] = breakdown(spent, num_calls, row["ms"])
    for entry in row["details"]["top"]:
        progress(f"    {entry['ms']:.3f} ms {entry['calls']:.0f}x {entry['name'][:80]}")


def breakdown(spent: dict[str, tuple[float, int]], calls: int, ms: float) -> dict[str, Any]:
    """Return the kernels that take most of a call.

    Args:
        spent: Total microseconds and number of launches by kernel name.
        calls: Number of calls they belong to.
        ms: Time of one call, without a profiler.
    """
    order = sorted(spent.items(), key=lambda item: -item[1][0])
    total = sum(took for took, _ in spent.values()) / calls / 1e3
    return {
        "kernels_ms": total,
        "launches": sum(count for _, count in spent.values()) / calls,
        # Negative where kernels overlap or the profiler slows them.
        "outside_kernels_ms": ms - total,
        "top": [
            {
                "name": name[:160],
                "ms": took / calls / 1e3,
                "share": took / calls / 1e3 / total if total else None,
                "calls": count / calls,
            }
            for name, (took, count) in order[:TOP_KERNELS]
        ],
    }
