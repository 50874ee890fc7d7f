"""What the response of driven oscillators costs, and how accurate it is.

    python benchmarks/response.py --output file.json [--longest 100000] [--device cuda] [--quick]

Three tables, for 6 variables and 64 oscillators each: nanoseconds per row, variable and oscillator
for many series at once (irregular and regular times, with and without gradients); seconds and
nanoseconds of one series as its length grows; and the largest error of each bank over its largest
response, against exponentials of the augmented system matrix in float64, row by row. On a CPU the
time is the processor's, which neighbours on a busy machine disturb less; one thread computes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from shared import describe
from torch import Tensor

from osciformer._files import write_json
from osciformer.bench.report import Row, markdown_table, progress
from osciformer.ops import Response, oscillator_response

VARIABLES, OSCILLATORS = 6, 64
DOUBLE = torch.float64


def make_bank(low: float, high: float, device: str) -> tuple[Tensor, Tensor]:
    """Return frequencies and damping ratios, quality factors from 1/4 to 8, in no order."""
    g = torch.Generator().manual_seed(0)
    omega = torch.logspace(0, 1, OSCILLATORS, base=high / low, dtype=DOUBLE) * low
    quality = 0.25 * 32 ** torch.rand(OSCILLATORS, generator=g, dtype=DOUBLE)
    return omega[torch.randperm(OSCILLATORS, generator=g)].to(device), (0.5 / quality).to(device)


def make_series(batch: int, rows: int, device: str, *, is_regular: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    gaps = -torch.rand(batch, rows, generator=g, dtype=DOUBLE).log()
    times = (torch.ones_like(gaps) if is_regular else gaps).cumsum(1)
    return torch.randn(batch, rows, VARIABLES, generator=g).to(device), times.to(device)


def seconds_of(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the least time of some calls, after one that does not count."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    best = float("inf")
    for turn in range(repeats + 1):
        start = clock()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn > 0:
            best = min(best, clock() - start)
    return best


def measure(batch: int, rows: int, device: str, repeats: int, **kind: bool) -> Row:
    """Return seconds and nanoseconds per row, variable and oscillator."""
    with_gradients = kind["with_gradients"]
    values, times = make_series(batch, rows, device, is_regular=kind["is_regular"])
    given = [values, times, *make_bank(6.3 / 500, 3.1, device)]
    for x in given:
        x.requires_grad_(with_gradients)

    def call() -> None:
        x, v = oscillator_response(*given)
        if with_gradients:
            torch.autograd.grad(x.sum() + v.sum(), given)

    seconds = seconds_of(call, device, repeats)
    size = batch * rows * VARIABLES * OSCILLATORS
    return {"batch": batch, "rows": rows, **kind, "seconds": seconds, "ns": 1e9 * seconds / size}


def oracle(values: Tensor, times: Tensor, omega: Tensor, zeta: Tensor) -> Response:
    """Return the response of one series and variable to its linear path, ``[N, K]`` float64."""
    # Of position, velocity over omega, drive and its change: of size 1 in units of each gap.
    matrix = omega.new_zeros(len(omega), 4, 4)
    state = torch.stack([values[0].expand_as(omega), torch.zeros_like(omega)], dim=-1)
    found = [state]
    for gap, value, change in zip(times.diff(), values, values.diff(), strict=False):
        angle = omega * gap
        matrix[:, 0, 1], matrix[:, 1, 0], matrix[:, 1, 1] = angle, -angle, -2 * zeta * angle
        matrix[:, 1, 2], matrix[:, 2, 3] = angle, 1.0
        drive = torch.stack([value, change]).expand(len(omega), 2)
        whole = torch.cat([state, drive], dim=-1).unsqueeze(-1)
        state = (torch.linalg.matrix_exp(matrix) @ whole)[:, :2, 0]
        found.append(state)
    x, y = torch.stack(found).unbind(-1)
    return Response(x, y * omega)


def measure_error(name: str, rows: int, dtype: torch.dtype, device: str) -> Row:
    """Return the worst error of any oscillator relative to its largest response."""
    g = torch.Generator().manual_seed(2)
    spread = torch.rand(rows, generator=g, dtype=DOUBLE)
    gaps = {
        "gaps from 1e-9 to the window": 10 ** (-9 + 9 * spread),
        "equal gaps": torch.full((rows,), 0.05, dtype=DOUBLE),
    }[name]
    times = gaps.cumsum(0)
    values = torch.randn(rows, generator=g).to(dtype)
    omega = 10 ** torch.linspace(-3, 2.3, OSCILLATORS, dtype=DOUBLE)
    zeta = torch.tensor([0.0, 0.05, 0.5, 1.0, 1.0 + 1e-9, 1.2, 5.0, 20.0], dtype=DOUBLE)
    zeta = zeta.repeat(OSCILLATORS // 8)
    wanted = oracle(values.double(), times, omega, zeta)
    given = (x.to(device) for x in (values[None, :, None], times[None], omega, zeta))
    found = oscillator_response(*given)
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        error = (a[0, :, 0].cpu().double() - b).abs().amax(0) / b.abs().amax(0)
        worst = max(worst, float(error.max()))
    return {"case": name, "rows": rows, "dtype": str(dtype).removeprefix("torch."), "error": worst}


def tables(result: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    body = [
        [
            *(str(row[key]) for key in ("batch", "rows")),
            "regular" if row["is_regular"] else "irregular",
            "forward + backward" if row["with_gradients"] else "forward",
            f"{row['seconds']:.3f}",
            f"{row['ns']:.2f}",
        ]
        for row in [*result["cost"], *result["length"]]
    ]
    columns = ("series", "rows", "times", "pass", "seconds", "ns a row, variable, oscillator")
    errors = [
        [row["case"], str(row["rows"]), row["dtype"], f"{row['error']:.1e}"]
        for row in result["error"]
    ]
    found = [*markdown_table(columns, body), ""]
    return found + markdown_table(("case", "rows", "dtype", "largest error"), errors)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--longest", type=int, default=100_000, help="rows of the longest series")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--commit", help="to record, where git cannot tell")
    parser.add_argument("--quick", action="store_true", help="toy size, only to see it run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device, repeats = options.device, 1 if options.quick else 3
    batch, rows, error_rows = (4, 50, 20) if options.quick else (40, 200, 2000)
    if device == "cuda" and not options.quick:
        batch, rows = 256, 1000
    kinds = [
        {"is_regular": is_regular, "with_gradients": with_gradients}
        for with_gradients in (False, True)
        for is_regular in (False, True)
    ]
    result: dict[str, Any] = {
        "meta": describe("response.py", arguments, device=device, commit=options.commit),
        "cost": [measure(batch, rows, device, repeats, **kind) for kind in kinds],
        "length": [],
        "error": [],
    }
    length = 100 if options.quick else 1000
    while length <= (300 if options.quick else options.longest):
        progress(f"{length} rows")
        result["length"].append(measure(1, length, device, repeats, **kinds[0]))
        length = length * 10 // 3 if str(length).startswith("3") else length * 3
    for name in ("gaps from 1e-9 to the window", "equal gaps"):
        for dtype in (DOUBLE, torch.float32):
            result["error"].append(measure_error(name, error_rows, dtype, device))
    write_json(options.output, result, indent=1)
    print("\n".join(tables(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
