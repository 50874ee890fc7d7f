"""Time, memory and error of the attention operator on a GPU, beside SDPA and ContiFormer.

    PYTHONPATH=src python benchmarks/gpu_attention.py --output OUT.json --table OUT.md
    PYTHONPATH=src python benchmarks/gpu_attention.py --quick --part speed,kernels
    PYTHONPATH=src python benchmarks/gpu_attention.py --quick --device cpu   # only to see it run

Every call is timed whole: checks and set-up included, bfloat16 tokens, float64 times without and
tokens and spectra with gradients. The JSON file is written anew after each measurement. A
measurement that fails is a row with an `error`, and the run goes on; where the failure has made the
GPU unusable, the remaining parts run in a new process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from attention_gpu import checks, parts
from attention_gpu.measure import in_words, is_broken, matmul_tflops
from attention_gpu.parts import CPU, FULL, QUICK, Run
from attention_gpu.rows import Document, make_row
from shared import describe

from osciformer.bench.report import Row, names_among, progress, tuple_of

#: Parts in the order in which they run: the most important first.
PARTS: dict[str, Callable[[Run], Iterator[list[Row]]]] = {
    "speed": parts.speed,
    "error": checks.errors,
    "queries": parts.queries,
    "modes": parts.modes,
    "contiformer": parts.contiformer,
    "long": checks.long_step,
    "kernels": checks.kernels,
    "graphs": checks.graphs,
    "blocked": parts.blocked,
    "paths": parts.paths,
}
# Rows carry these names where a part has several kinds of row.
_ROW_PARTS = {"graphs": ("cuda_graph", "compile")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 if the files could be written."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cpu" and not options.quick:
        raise SystemExit("--device cpu needs --quick: the full sizes would take days")
    sizes = CPU if device.type == "cpu" else QUICK if options.quick else FULL
    changes = {name: getattr(options, name) for name in ("n", "c") if getattr(options, name)}
    if options.seconds is not None:
        changes["seconds"] = options.seconds
    torch.manual_seed(0)
    began = time.monotonic()
    run = Run(
        sizes=replace(sizes, **changes),
        device=device,
        backend=options.backend or ("blocked" if device.type == "cpu" else "triton"),
        deadline=began + 60.0 * options.minutes,
    )
    document = _document(options, arguments, device)
    progress(", ".join(f"{key}: {entry}" for key, entry in document.meta.items()))
    run.peak_tflops = _peak(run)
    document.meta["matmul_tflops"] = run.peak_tflops
    took = document.meta.setdefault("seconds", {})
    for place, part in enumerate(options.part):
        start = time.monotonic()
        _run_part(part, run, document, options)
        took[part] = round(time.monotonic() - start, 1)
        document.save(options.output, options.table)
        progress(f"{part}: took {took[part]} s")
        rest = options.part[place + 1 :]
        if rest and options.output is not None and is_broken(device):
            progress("the device is unusable after an error; the rest runs in a new process")
            _start_again(arguments, rest, options.minutes - (time.monotonic() - began) / 60.0)
    if options.table is None:
        print(document.markdown(), flush=True)
    return 0


def _run_part(part: str, run: Run, document: Document, options: argparse.Namespace) -> None:
    """Run one part; what it does not catch itself becomes a row, too."""
    try:
        for rows in PARTS[part](run):
            document.rows += rows
            document.save(options.output, options.table)
            if is_broken(run.device):
                break
    except Exception as error:
        document.rows.append(make_row(part=part, error=in_words(error)))
        progress(f"{part}: {in_words(error)}")


def _document(options: argparse.Namespace, arguments: list[str], device: torch.device) -> Document:
    meta = describe(
        "gpu_attention.py", arguments, device=device, commit=options.commit, packages=["triton"]
    )
    if not (options.append and options.output is not None and options.output.exists()):
        return Document(meta)
    earlier = json.loads(options.output.read_text(encoding="utf-8"))
    replaced = {name for part in options.part for name in _ROW_PARTS.get(part, (part,))}
    meta["earlier_commands"] = [
        *earlier["meta"].get("earlier_commands", []),
        earlier["meta"]["command"],
    ]
    meta["seconds"] = earlier["meta"].get("seconds", {})
    return Document(meta, [row for row in earlier["rows"] if row["part"] not in replaced])


def _peak(run: Run) -> float | None:
    try:
        peak = matmul_tflops(run.sizes.matmul, run.device, torch.bfloat16)
    except Exception as error:
        progress(f"matrix product: {in_words(error)}")
        return None
    progress(f"matrix product of size {run.sizes.matmul}: {peak:.3g} TFLOP/s")
    return peak


def _start_again(arguments: list[str], rest: list[str], minutes: float) -> None:
    """Replace this process by one that runs the remaining parts; later options win."""
    left = f"{max(0.0, minutes):.4f}"
    again = [*arguments, "--append", "--part", ",".join(rest), "--minutes", left]
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, __file__, *again])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file: meta, summary and rows")
    parser.add_argument("--table", type=Path, help="Markdown file; without it, standard output")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    parser.add_argument(
        "--part",
        type=names_among(PARTS),
        default=list(PARTS),
        help=f"of {','.join(PARTS)}; default all",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="of the operator: triton, on a CPU blocked")
    parser.add_argument("--n", type=tuple_of(int), metavar="N,N", help="lengths of the part speed")
    parser.add_argument("--c", type=tuple_of(int), metavar="C,C", help="channels a head")
    parser.add_argument("--seconds", type=float, help="for the repetitions of one call")
    parser.add_argument(
        "--minutes", type=float, default=5.5, help="after which nothing new is begun"
    )
    parser.add_argument(
        "--append", action="store_true", help="keep the rows of other parts in the output file"
    )
    parser.add_argument("--commit", help="to record, where git cannot tell")
    return parser


if __name__ == "__main__":
    gc.freeze()  # collections between measurements need not visit the libraries
    sys.exit(main())
