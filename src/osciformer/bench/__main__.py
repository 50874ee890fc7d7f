"""`python -m osciformer.bench speed`: error first, then time and memory; and the other suites."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from osciformer._files import write_json
from osciformer.bench import report, speed
from osciformer.bench.report import positive, progress
from osciformer.bench.speed import Candidate
from osciformer.ops._checks import QUERIES

#: Suites with a command line of their own: their modules, some of which need training, and data;
#: and what they are.
SUITES = {
    "layer": ("layer", "the layer beside plain attention and a GRU"),
    "events": ("events.harness", "the table of event prediction"),
    "resonance": ("paper.resonance", "the paper's 41 frequencies, beside a matched filter"),
    "regression": (
        "paper.regression",
        "the paper's eight oscillator keys, beside ridge regression",
    ),
    "chaos": ("paper.chaos", "free runs of the logistic map, beside trivial forecasts"),
    "ablations": ("paper.ablations", "one setting of the layer at a time, on four tasks"),
    "length": ("length", "time and memory of a training step against the length of series"),
    "xor": ("tables.xor", "a table of models: parity of a stream of bits"),
    "sine": ("tables.sine", "a table of models: the frequency of waves at random times"),
    "spirals": ("tables.spirals", "a table of models: spirals, inside and beyond"),
    "dynamics": ("tables.dynamics", "a table of models: forecasts of a dozen systems"),
    "hr": ("tables.heart_rate", "a table of models: heart rates of known and new patients"),
    "uea": ("tables.uea", "a table of models: the UEA archive, also with dropped rows"),
    "frequencies": ("tables.frequencies", "a table of models: close frequencies in noise"),
    "imdb": ("tables.imdb", "a table of models: reviews of films"),
    "report": ("tables.leaderboard", "a page of all tables that files have, and who leads"),
}
NUM_MODES = (4, 8, 16, 32)
#: Lengths by option: what they are for, those of a full run, and of a quick one.
LENGTHS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "n": ("timed", (512, 2048, 4096), (512, 2048)),
    "reference-n": ("at which the reference is timed too, forward", (512,), (64,)),
    "modes-n": ("at which several numbers of modes are timed", (2048,), ()),
    "memory-n": ("whose memory is measured in a process of its own", (4096, 8192, 17984), ()),
    "error-n": ("of the comparison with the oracle", (8, 17), (8,)),
}
TIMED_QUERIES = (("hold", "linear", "ridge"), ("hold", "ridge"))
# The oracle is slow: a quick run compares fewer series, and only the value mode that it times.
COMPARED = ((("average", "point"), 8), (("average",), 4))
SHARED = ("batch", "heads", "channels", "dtype", "device", "threads")  # options of all commands
SECONDS = (3.0, 0.7)  # for the repetitions of one group

EPILOG = f"""\
One row has the keys {", ".join(report.KEYS)}.
ms is a median; peak_mib is memory above that before the call; error is the largest one relative
to the largest entry of each output and gradient; ratio_sdpa and ratio_reference are the row's ms
divided by that of scaled_dot_product_attention, and of backend "reference" with the same query, at
the same pass and n in the same run. What was not measured is null.

No time is reported when an error exceeds 1e-10 in float64 or 1e-5 in float32: the exit status is 1.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in SUITES:
        place, _ = SUITES[arguments[0]]
        suite = importlib.import_module(f"osciformer.bench.{place}")
        run: Callable[[Sequence[str]], int] = getattr(suite, "SUITE", suite).main
        return run(arguments[1:])
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    seconds = SECONDS[getattr(options, "quick", False)]
    setting = speed.Setting(options.batch, options.heads, options.channels, dtype, device, seconds)
    found = report.Report(is_json=options.json)
    if options.command == "memory":
        found.add([speed.memory_row(options.query, options.n, setting=setting)])
        return 0
    command = report.shown_command("python", "-m", "osciformer.bench", arguments=arguments)
    meta = report.describe_run(command, device)
    progress(", ".join(f"{key}: {entry}" for key, entry in meta.items()))
    status = run_speed(options, setting, found)
    if options.output is not None:
        write_json(options.output, {"meta": meta, "rows": found.rows}, indent=1)
    return status


def run_speed(options: argparse.Namespace, setting: speed.Setting, found: report.Report) -> int:
    """Measure errors, then, if they are small, times and memory; return the exit status."""
    lengths = {}
    for name, (_, *defaults) in LENGTHS.items():
        given = getattr(options, name.replace("-", "_"))
        lengths[name] = defaults[options.quick] if given is None else given
    values, batch = COMPARED[options.quick]
    for query in QUERIES:
        progress(f"error: {query}")
        compared = (batch, lengths["error-n"], setting.device, values)
        found.add(speed.error_rows(query, "blocked", *compared))
    if wrong := speed.failures(found.rows):
        progress("no speed is reported, because blocked differs from the oracle:")
        progress("\n".join(f"  {line}" for line in wrong))
        return 1

    group = [*(Candidate("blocked", q) for q in TIMED_QUERIES[options.quick]), speed.SDPA]
    sdpa_ms: dict[int, float] = {}
    for length in sorted({*lengths["n"], *lengths["reference-n"]}):
        progress(f"speed: n = {length}")
        rows = speed.timed_rows("speed", group, length, "fwd", setting)
        sdpa_ms[length] = rows[-1]["ms"]
        if length in lengths["n"]:
            rows += speed.timed_rows("speed", group, length, "fwdbwd", setting)
        if length in lengths["reference-n"]:
            progress(f"speed: n = {length}, reference (slow)")
            rows += speed.add_reference(rows, ("hold", "ridge"), setting)
        found.add(rows)
    for length in lengths["modes-n"]:
        progress(f"modes: n = {length}, J = {', '.join(map(str, NUM_MODES))}")
        modes = [Candidate("blocked", "ridge", j) for j in NUM_MODES]
        rows = speed.timed_rows("modes", modes, length, "fwd", setting)
        for row in rows if length in sdpa_ms else ():
            row["ratio_sdpa"] = row["ms"] / sdpa_ms[length]
        found.add(rows)
    for length in lengths["memory-n"]:
        progress(f"memory: n = {length}, in a process of its own")
        given = {name: getattr(options, name) for name in SHARED} | {"n": length}
        arguments = [f"--{name}={value}" for name, value in given.items() if value is not None]
        # Memory that earlier calls have left would hide a part of the peak.
        again = [sys.executable, "-m", "osciformer.bench", "memory", "--json", *arguments]
        measured = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True)
        found.add([json.loads(measured.stdout)])
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    return () if text == "0" else report.tuple_of(positive)(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m osciformer.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("speed", help="error, time and memory of the backends")
    timing.epilog, timing.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    memory = commands.add_parser("memory", help="peak memory of one call, in this process")
    for name, (_, what) in SUITES.items():
        commands.add_parser(name, help=f"{what}; {name} --help says more")
    for add in (timing.add_argument, memory.add_argument):
        add("--json", action="store_true", help="one JSON object a line")
        add("--batch", type=positive, default=1)
        add("--heads", type=positive, default=8)
        add("--channels", type=positive, default=32, help="channels a head")
        add("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
        add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
        add("--threads", type=positive, help="threads of torch on the CPU")
    timing.add_argument("--quick", action="store_true", help="less than a minute on two cores")
    timing.add_argument("--output", type=Path, help="also write a JSON file with versions and rows")
    for name, (what, *defaults) in LENGTHS.items():
        full, quick = (",".join(map(str, lengths)) or "none" for lengths in defaults)
        told = f"lengths {what}, 0 for none; {full}, or {quick} with --quick"
        timing.add_argument(f"--{name}", type=_lengths, metavar="N,N", help=told)
    memory.add_argument("--n", type=positive, required=True)
    memory.add_argument("--query", choices=QUERIES[:4], default="hold")
    return parser


if __name__ == "__main__":
    sys.exit(main())
