"""Seconds before the first step on a GPU without compiled kernels, and the time of warm ones.

    PYTHONPATH=src python benchmarks/first_call.py --output OUT.json
    PYTHONPATH=src python benchmarks/first_call.py --part warm --before ../other/src

A first call is a layer's first forward and backward pass, in a process and a cache folder of its
own, imports not counted. `--serial` adds rows in which each kernel is compiled as it is launched.
`--before` names the folder `src` of another checkout, whose warm kernels take turns with ours. The
JSON file is written anew after each row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shared import describe

from osciformer._files import write_json
from osciformer.bench.report import Row, names_among, progress, tuple_of

HEADS = 4
DTYPES = ("bfloat16", "float32")
#: Batch size and length of the calls whose warm time is measured.
WARM_SHAPES = ((64, 74), (8, 2048), (1, 16384))
REPETITIONS = 30


# --- In a process of its own. ---------------------------------------------------------------------


def make_step(dtype: str, channels: int, batch: int, length: int, device: str) -> Any:
    """Return functions that run a layer forward, and forward and backward."""
    import torch

    from osciformer.nn import OscillatorAttention

    torch.manual_seed(0)
    layer = OscillatorAttention(channels * HEADS, HEADS).to(device, getattr(torch, dtype))
    if device == "cuda":
        layer.backend = "triton"
    size = (batch, length, channels * HEADS)
    x = torch.randn(size, device=device, dtype=getattr(torch, dtype), requires_grad=True)
    times = torch.rand(batch, length, dtype=torch.float64).sort(1).values.float().to(device)
    leaves, direction = [x, *layer.parameters()], torch.randn_like(x)

    def step() -> None:
        torch.autograd.grad(layer(x, times), leaves, direction)

    return torch.no_grad()(lambda: layer(x, times)), step


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def first_call(case: Row) -> Row:
    """Return seconds of the first step and milliseconds of the second."""
    device = case["device"]
    if case["how"] == "serial":
        from osciformer.ops.attention.triton import operators

        operators.prepare = lambda *_: None  # type: ignore[assignment]
    _, step = make_step(case["dtype"], case["channels"], 2, case["n"], device)
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    step()
    synchronize(device)
    second = time.perf_counter() - start
    kernels = list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"))
    size = sum(path.stat().st_size for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*"))
    return {
        "seconds": round(seconds, 2),
        "second_ms": round(1e3 * second, 2),
        "kernels": len(kernels),
        "cache_mib": round(size / 2**20, 1),
        "processor_seconds": round(sum(os.times()[:4]), 1),
    }


def warm_calls(case: Row) -> list[Row]:
    """Return the median times of forward, and of forward and backward, at all shapes."""
    import torch

    rows = []
    for batch, length in WARM_SHAPES:
        pair = make_step(case["dtype"], case["channels"], batch, length, case["device"])
        for which, call in zip(("fwd", "fwdbwd"), pair, strict=True):
            for _ in range(3):
                call()
            found = []
            for _ in range(REPETITIONS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                found.append(begin.elapsed_time(end))
            ms = round(statistics.median(found), 4)
            rows.append({"batch": batch, "n": length, "pass": which, "ms": ms})
    return rows


# --- The rows. ------------------------------------------------------------------------------------


def in_process(work: str, case: Row, cache: Path, source: Path | None = None) -> Any:
    """Return what `work` finds in a new process, or a row with its error."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    command = [sys.executable, __file__, "--work", work, "--case", json.dumps(case)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"error": f"exit status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def first_rows(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row for each head size and precision, and with `--serial` a second one."""
    for channels in options.head_size:
        for dtype in options.dtype:
            for how in ("together", "serial") if options.serial else ("together",):
                case = {"dtype": dtype, "channels": channels, "how": how, "n": options.n}
                case["device"] = options.device
                cache = folder / f"{dtype}-{channels}-{how}"
                found = in_process("first_call", case, cache)
                yield {"part": "first", **case, **found}


def warm_rows(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the warm times of ours, and of the other checkout, in turns."""
    sources = {"here": None} | ({"before": options.before} if options.before else {})
    for channels in options.head_size:
        for dtype in options.dtype:
            case = {"dtype": dtype, "channels": channels, "device": options.device}
            for turn in range(options.turns):
                for name, source in sources.items():
                    cache = folder / f"{dtype}-{channels}-{'together' if source is None else name}"
                    found = in_process("warm_calls", case, cache, source)
                    for row in [found] if isinstance(found, dict) else found:
                        yield {"part": "warm", **case, "source": name, "turn": turn, **row}


PARTS = {"first": first_rows, "warm": warm_rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if options.work:
        print(json.dumps(globals()[options.work](json.loads(options.case))))
        return 0
    meta = describe("first_call.py", arguments, device=options.device, packages=["triton"])
    meta["cores"] = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    folder = Path(options.caches or tempfile.mkdtemp())
    try:
        for part in options.part:
            for row in PARTS[part](options, folder):
                rows.append(row)
                progress(json.dumps(row))
                if options.output is not None:
                    write_json(options.output, {"meta": meta, "rows": rows})
    finally:
        if options.caches is None:
            shutil.rmtree(folder, ignore_errors=True)
    return int(any("error" in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, help="JSON file: meta and rows")
    add("--part", type=names_among(PARTS), default=list(PARTS), help="of first,warm; default both")
    add("--head-size", type=tuple_of(int), default=(32, 64), metavar="C,C")
    add("--dtype", type=names_among(DTYPES), default=list(DTYPES), help=",".join(DTYPES))
    add("--n", type=int, default=2048, help="length of the first call")
    add("--serial", action="store_true", help="also compile kernels one after another")
    add("--before", type=Path, help="folder src of another checkout")
    add("--turns", type=int, default=2, help="processes for each source of warm kernels")
    add("--caches", type=Path, help="folder in which compiled kernels stay")
    add("--device", default="cuda")
    add("--work", choices=("first_call", "warm_calls"), help=argparse.SUPPRESS)
    add("--case", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
