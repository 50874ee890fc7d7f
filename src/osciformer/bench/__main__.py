"""`python -m osciformer.bench speed`: error first, then time and memory; `events`: a table."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from osciformer.bench.error import error_rows, failures
from osciformer.bench.memory import peak_in_fresh_process
from osciformer.bench.report import KEYS, Report, describe_run, progress
from osciformer.bench.speed import Setting, add_reference, memory_row, modes_rows, speed_rows
from osciformer.ops._checks import QUERIES

NUM_MODES = (4, 8, 16, 32)
#: Lengths by option: of a full run, and of a quick one.
LENGTHS = {
    "n": ((512, 2048, 4096), (512, 2048)),
    "reference_n": ((512,), (64,)),
    "modes_n": ((2048,), ()),
    "memory_n": ((4096, 8192, 17984), ()),
    "error_n": ((8, 17), (8,)),
}
TIMED_QUERIES = (("hold", "linear", "ridge"), ("hold", "ridge"))
REFERENCE_QUERIES = ("hold", "ridge")
# The oracle is slow: a quick run compares fewer series, and only the value mode that it times.
COMPARED_BATCH = (8, 4)
COMPARED_VALUES = (("average", "point"), ("average",))
SECONDS = (3.0, 0.7)  # for the repetitions of one group

EPILOG = f"""\
One row has the keys {", ".join(KEYS)}.
ms is a median; peak_mib is memory above that before the call; error is the largest one relative
to the largest entry of each output and gradient; ratio_sdpa and ratio_reference are the row's ms
divided by that of scaled_dot_product_attention, and of backend "reference" with the same query, at
the same pass and n in the same run. What was not measured is null.

No time is reported when an error exceeds 1e-10 in float64 or 1e-5 in float32: the exit status is 1.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["events"]:
        # Here, since it needs the packages of training and data.
        from osciformer.bench.events.command import main as events

        return events(arguments[1:])
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    setting = Setting(
        batch=options.batch,
        heads=options.heads,
        channels=options.channels,
        dtype=getattr(torch, options.dtype),
        device=torch.device(options.device),
        seconds=SECONDS[getattr(options, "quick", False)],
    )
    report = Report(is_json=options.json)
    if options.command == "memory":
        report.add([memory_row(options.query, options.n, setting=setting)])
        return 0
    command = shlex.join(["python", "-m", "osciformer.bench", *arguments])
    meta = describe_run(command, setting.device)
    progress(", ".join(f"{key}: {entry}" for key, entry in meta.items()))
    status = run_speed(options, setting, report)
    if options.output is not None:
        report.save(options.output, meta)
    return status


def run_speed(options: argparse.Namespace, setting: Setting, report: Report) -> int:
    """Measure errors, then, if they are small, times and memory; return the exit status."""
    lengths = {
        name: defaults[options.quick] if getattr(options, name) is None else getattr(options, name)
        for name, defaults in LENGTHS.items()
    }
    for query in QUERIES:
        progress(f"error: {query}")
        report.add(
            error_rows(
                query,
                backend="blocked",
                batch=COMPARED_BATCH[options.quick],
                lengths=lengths["error_n"],
                device=setting.device,
                values=COMPARED_VALUES[options.quick],
            )
        )
    wrong = failures(report.rows)
    if wrong:
        progress("no speed is reported, because blocked differs from the oracle:")
        for line in wrong:
            progress(f"  {line}")
        return 1

    queries = TIMED_QUERIES[options.quick]
    sdpa_ms = {}
    for length in sorted({*lengths["n"], *lengths["reference_n"]}):
        passes = ("fwd", "fwdbwd") if length in lengths["n"] else ("fwd",)
        progress(f"speed: n = {length}")
        rows = speed_rows(queries, length, passes=passes, setting=setting)
        if length in lengths["reference_n"]:
            progress(f"speed: n = {length}, reference (slow)")
            rows += add_reference(rows, REFERENCE_QUERIES, length, setting=setting)
        report.add(rows)
        for row in rows:
            if row["backend"] == "sdpa":
                sdpa_ms[row["n"], row["pass"]] = row["ms"]
    for length in lengths["modes_n"]:
        progress(f"modes: n = {length}, J = {', '.join(map(str, NUM_MODES))}")
        report.add(
            modes_rows(NUM_MODES, length, setting=setting, sdpa_ms=sdpa_ms.get((length, "fwd")))
        )
    for length in lengths["memory_n"]:
        progress(f"memory: n = {length}, in a process of its own")
        report.add([peak_in_fresh_process(_memory_arguments(length, options))])
    return 0


def _memory_arguments(length: int, options: argparse.Namespace) -> list[str]:
    names = ["batch", "heads", "channels", "dtype", "device"]
    if options.threads is not None:
        names.append("threads")
    shared = [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    return ["--n", str(length), *shared]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m osciformer.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser(
        "speed",
        help="error, time and memory of the backends",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    memory = commands.add_parser("memory", help="peak memory of one call, in this process")
    commands.add_parser("events", help="the table of event prediction; events --help says more")
    for command in (speed, memory):
        command.add_argument("--json", action="store_true", help="one JSON object a line")
        command.add_argument("--batch", type=_positive, default=1)
        command.add_argument("--heads", type=_positive, default=8)
        command.add_argument("--channels", type=_positive, default=32, help="channels a head")
        command.add_argument(
            "--dtype", choices=("float32", "float64", "bfloat16"), default="float32"
        )
        command.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
        command.add_argument("--threads", type=_positive, help="threads of torch on the CPU")
    speed.add_argument("--quick", action="store_true", help="less than a minute on two cores")
    speed.add_argument("--output", type=Path, help="also write a JSON file with versions and rows")
    for name, what in (
        ("n", "timed"),
        ("reference-n", "at which the reference is timed too, forward"),
        ("modes-n", "at which several numbers of modes are timed"),
        ("memory-n", "whose memory is measured in a process of its own"),
        ("error-n", "of the comparison with the oracle"),
    ):
        full, quick = LENGTHS[name.replace("-", "_")]
        speed.add_argument(
            f"--{name}",
            type=_lengths,
            metavar="N,N",
            help=f"lengths {what}, 0 for none; {_spell(full)}, or {_spell(quick)} with --quick",
        )
    memory.add_argument("--n", type=_positive, required=True)
    memory.add_argument("--query", choices=QUERIES[:4], default="hold")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _lengths(text: str) -> tuple[int, ...]:
    if text == "0":
        return ()
    return tuple(_positive(part) for part in text.split(","))


def _spell(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, lengths)) or "none"


if __name__ == "__main__":
    sys.exit(main())
