"""`python -m osciformer.bench layer`: the layer beside plain causal attention and a GRU."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from osciformer._files import write_json
from osciformer._types import Tensor
from osciformer.bench import report
from osciformer.bench.report import Row, make_row, positive, progress
from osciformer.bench.speed import MAX_REPETITIONS, MIN_REPETITIONS
from osciformer.nn import OscillatorAttention
from osciformer.ops._checks import BACKENDS
from osciformer.testing import relative_error

SHAPES = ((32, 24, 32), (64, 74, 32), (64, 128, 64), (32, 512, 64), (16, 1024, 256), (8, 2048, 256))
KEYS = (
    *("layer", "pass", "batch", "n", "dim", "heads", "dtype", "device", "ms", "wall_ms"),
    *("ratio_plain", "ratio_gru", "error"),
)
#: Largest error of a backend, relative to the largest output of `blocked` in float64.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05}

EPILOG = """\
ms is the median time of a call: processor time on a CPU, which other programs disturb little, and
time of events on a GPU; wall_ms is the median by the clock. The layers take turns, and a ratio is
the median over the turns. Times are uniform on [0, 1], weights those of a new layer. No time is
reported of a backend that differs from "blocked" in float64: the exit status is 1.
"""


class PlainAttention(nn.Module):
    """Causal dot-product attention with the projections of `OscillatorAttention`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Return the attended tokens; times are not used."""
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A GRU of the same width."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Return the states; times are not used."""
        return self.gru(x)[0]  # type: ignore[no-any-return]


class Case(NamedTuple):
    """One shape: batch size, length, width."""

    batch: int
    length: int
    dim: int


class Timing(NamedTuple):
    """Milliseconds of one call."""

    ms: float
    wall_ms: float


def make_layers(case: Case, heads: int, backends: Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers to compare; those of all backends have the same weights."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"plain": PlainAttention(case.dim, heads)}
    layers["gru"] = Recurrent(case.dim)
    ours = OscillatorAttention(case.dim, heads)
    for backend in backends:
        layers[backend] = copy.deepcopy(ours)
        layers[backend].backend = backend  # type: ignore[assignment]
    return layers


def make_call(layer: nn.Module, x: Tensor, times: Tensor, which: str) -> Callable[[], object]:
    """Return a function that runs the layer once, perhaps with gradients of tokens and weights."""
    if which == "fwd":
        return torch.no_grad()(lambda: layer(x, times))
    leaves = [x, *layer.parameters()]
    direction = x.detach().flip(-1)
    return lambda: torch.autograd.grad(layer(x, times), leaves, direction)


def timed(call: Callable[[], object], device: torch.device) -> Timing:
    """Return the time of one call."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize(device)
        return Timing(events[0].elapsed_time(events[1]), 1e3 * (time.perf_counter() - start))
    start, processor = time.perf_counter(), time.process_time()
    call()
    return Timing(1e3 * (time.process_time() - processor), 1e3 * (time.perf_counter() - start))


def error_of(layer: nn.Module, x: Tensor, times: Tensor) -> float:
    """Return the error of a layer relative to `blocked` in float64, on two of the series."""
    exact = copy.deepcopy(layer).double()
    exact.backend = "blocked"  # type: ignore[assignment]
    with torch.no_grad():
        return relative_error(layer(x[:2], times[:2]), exact(x[:2].double(), times[:2].double()))


def rows_of(case: Case, options: argparse.Namespace) -> list[Row]:
    """Return a row for every layer and pass at this shape."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    x = torch.randn(*case, device=device, dtype=dtype, requires_grad=True)
    times = torch.rand(case.batch, case.length, dtype=torch.float64).sort(1).values
    times = times.float().to(device)
    layers = make_layers(case, options.heads, options.backends)
    layers = {name: layer.to(device, dtype) for name, layer in layers.items()}
    errors = {name: error_of(layers[name], x, times) for name in options.backends}
    shape = {"batch": case.batch, "n": case.length, "dim": case.dim, "heads": options.heads}
    shape |= {"dtype": options.dtype, "device": device.type}
    rows = []
    for which in ("fwd", "fwdbwd"):
        calls = {name: make_call(layer, x, times, which) for name, layer in layers.items()}
        for call in calls.values():  # the warm-up
            call()
        turns: list[dict[str, Timing]] = []
        wanted = 1
        while len(turns) < wanted:
            turns.append({name: timed(call, device) for name, call in calls.items()})
            affordable = round(1e3 * options.seconds / sum(t.wall_ms for t in turns[0].values()))
            wanted = min(MAX_REPETITIONS, max(MIN_REPETITIONS, affordable))
        for name in layers:
            entries: dict[str, Any] = {
                field: statistics.median(getattr(turn[name], field) for turn in turns)
                for field in Timing._fields
            }
            for other in ("plain", "gru"):
                ratios = (turn[name].ms / turn[other].ms for turn in turns)
                entries[f"ratio_{other}"] = statistics.median(ratios)
            entries |= {"pass_": which, "error": errors.get(name)}
            rows.append(make_row(KEYS, layer=name, **shape, **entries))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    command = report.shown_command("python", "-m", "osciformer.bench", "layer", arguments=arguments)
    meta = report.describe_run(command, device)
    progress(", ".join(f"{key}: {entry}" for key, entry in meta.items()))
    found, status = report.Report(is_json=options.json, keys=KEYS), 0
    for shape in options.shapes:
        progress(f"batch {shape[0]}, length {shape[1]}, width {shape[2]}")
        rows = rows_of(Case(*shape), options)
        for row in rows:
            error = row["error"]
            if error is not None and not error <= TOLERANCES[options.dtype]:
                told = f"{row['layer']} differs from blocked in float64 by {error:.1e}"
                progress(f"{told}; its times are not reported")
                row["ms"] = row["wall_ms"] = row["ratio_plain"] = row["ratio_gru"] = None
                status = 1
        found.add(rows)
    if options.output is not None:
        write_json(options.output, {"meta": meta, "rows": found.rows}, indent=1)
    return status


def _shape(text: str) -> tuple[int, int, int]:
    batch, length, dim = map(positive, text.split("x"))
    return batch, length, dim


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m osciformer.bench layer", description=__doc__)
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add, shapes = parser.add_argument, ",".join("x".join(map(str, s)) for s in SHAPES)
    told = f"batch x length x width, with commas between; {shapes}"
    add("--shapes", type=report.tuple_of(_shape), default=SHAPES, metavar="BxNxD", help=told)
    backends = report.names_among(BACKENDS)
    add("--backends", type=backends, default=["auto", "blocked"], help="of ours; auto,blocked")
    add("--heads", type=positive, default=8)
    add("--dtype", choices=tuple(TOLERANCES), default="float32")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--threads", type=positive, default=1, help="threads of torch on the CPU; 1")
    add("--seconds", type=float, default=3.0, help="for the repetitions of one pass; 3")
    add("--json", action="store_true", help="one JSON object a line")
    add("--output", type=Path, help="also write a JSON file with versions and rows")
    return parser
