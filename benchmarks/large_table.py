"""Time and memory of the command line on a table of ten million rows, and on parts of it.

    python benchmarks/large_table.py [--series 50000] [--output large.json] [--table large.md]

Writes Parquet tables of 1/100, 1/10 and all of the series (200 irregular rows each, four features,
a class that moves the level of one of them), and runs `osciformer data describe`, `fit
--stream` for one epoch and `predict --stream` on each, every one in a process of its own. Memory is
the largest resident set of that process and its children together, Python and torch included, from
/proc: where it is bounded, ten times the rows take hardly more of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from shared import describe

from osciformer._files import write_json, write_text
from osciformer.bench.report import markdown_table

ROWS, FEATURES = 200, 4
SPAN = 100.0  # units of time that a series lasts
MISSING = 0.2  # part of the values
FREQUENCIES = (0.3, 3.0)  # of the first feature, lowest and highest, in radians per unit of time
SHIFT = 0.4  # of the first feature, up or down by class; the noise of a single value is 1
SERIES_PER_GROUP = 1250  # a row group of 250,000 rows, about a chunk of `ParquetSeries`
PARTS = (100, 10, 1)  # the tables have this part of the series
PERIOD = 0.05  # seconds between two looks at the memory
MODEL = ("--dim=16", "--num-layers=1", "--num-heads=1", "--no-resonators")
COLUMNS = ("--id=series", "--time=time")
_MIB = 2**20


@dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
        command: Name of the command.
        rows: Rows of its table.
        wall_s: Seconds that it ran.
        processor_s: Seconds of processor time of it and its children.
        rows_per_s: Rows per second of wall time.
        peak_mib: Largest resident set, of it and its children together.
    """

    command: str
    rows: int
    wall_s: float
    processor_s: float
    rows_per_s: float
    peak_mib: float


def make_groups(num_series: int, seed: int = 0) -> Iterator[pa.Table]:
    """Yield the rows of the series, a row group at a time, each from a seed of its own."""
    for first in range(0, num_series, SERIES_PER_GROUP):
        count = min(SERIES_PER_GROUP, num_series - first)
        generator = np.random.default_rng((seed, first))
        label = generator.integers(0, 2, count)
        times = np.sort(generator.uniform(0.0, SPAN, (count, ROWS)), axis=1)
        omega = generator.uniform(*FREQUENCIES, count)
        phase = generator.uniform(0.0, 2.0 * np.pi, count)
        values = generator.standard_normal((FEATURES, count, ROWS), dtype=np.float32)
        values[0] += 1.5 * np.sin(omega[:, None] * times + phase[:, None])
        values[0] += SHIFT * (2 * label[:, None] - 1)
        hidden = generator.random(values.shape, dtype=np.float32) < MISSING
        columns = {
            "series": np.repeat(np.arange(first, first + count), ROWS),
            "time": times.ravel(),
            "label": np.repeat(label, ROWS),
        }
        table = pa.table(columns)
        for number in range(FEATURES):
            column = pa.array(values[number].ravel(), mask=hidden[number].ravel())
            table = table.append_column(f"x{number}", column)
        yield table


def write_table(path: Path, num_series: int) -> None:
    """Write the table, with one row group in memory at a time."""
    groups = make_groups(num_series)
    first = next(groups)
    with parquet.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for group in groups:
            writer.write_table(group)


class MemoryWatch(threading.Thread):
    """Looks at the resident set of a process and its descendants until it ends.

    The kernel's own record of the largest resident set of each process makes up for what happens
    between two looks; it is not that of the parent, as `ru_maxrss` may be.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.is_over = pid, 0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(PERIOD):
            self.look()

    def look(self) -> None:
        family = list(descendants(self.pid))
        together = sum(resident(pid, "VmRSS") for pid in family)
        alone = max((resident(pid, "VmHWM") for pid in family), default=0)
        self.peak = max(self.peak, together, alone)


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that it started, as far as they still run."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # it ended meanwhile
            continue
        for child in found:
            yield from descendants(int(child))


def resident(pid: int, key: str) -> int:
    """Return an entry of the status of a process in bytes; 0 if it ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def measure(name: str, arguments: Sequence[object], rows: int) -> Cost:
    """Run a command of the command line in a process of its own and return its cost."""
    command = [sys.executable, "-m", "osciformer", *map(str, arguments)]
    before, started = os.times(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watch = MemoryWatch(process.pid)
    watch.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - started
    watch.is_over.set()
    watch.join()
    if process.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}:\n{output}")
    after = os.times()
    used = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    cost = Cost(
        name,
        rows,
        round(seconds, 2),
        round(used, 2),
        round(rows / seconds),
        round(watch.peak / _MIB, 1),
    )
    print(f"{name}: {rows} rows, {seconds:.1f} s, {cost.peak_mib:.0f} MiB", file=sys.stderr)
    return cost


def measure_table(
    folder: Path, num_series: int, flags: Sequence[str]
) -> tuple[list[Cost], dict[str, Any]]:
    """Return the costs of the commands on a table of so many series, and what came out."""
    table, run, output = folder / "table.parquet", folder / "run", folder / "predictions.parquet"
    write_table(table, num_series)
    rows = num_series * ROWS
    fit = ["fit", table, "--task=classification", *COLUMNS, "--target=label", "--stream"]
    fit += ["--epochs=1", "--accelerator=cpu", "--progress=none", *flags, "-o", run]
    predict = ["predict", run, table, "--stream", "--accelerator=cpu", "-o", output]
    costs = [
        measure("read", ["data", "describe", table, *COLUMNS, "--stream"], rows),
        measure("fit", fit, rows),
        measure("predict", predict, rows),
    ]
    written = parquet.read_table(output)
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    facts = {
        "series": num_series,
        "rows": rows,
        "file_mib": round(table.stat().st_size / _MIB, 1),
        "validation_auroc": metrics["validation"]["auroc"],
        "predictions": written.num_rows,
        "distinct_ids": len(written.column("series").unique()),
    }
    return costs, facts


def growth(costs: Sequence[Cost]) -> dict[str, dict[str, float]]:
    """Return, by command, the memory of the largest table beside that of the second largest."""
    result = {}
    for name in dict.fromkeys(cost.command for cost in costs):
        *_, smaller, larger = sorted(
            (cost for cost in costs if cost.command == name), key=lambda cost: cost.rows
        )
        result[name] = {
            "rows": larger.rows / smaller.rows,
            "memory": round(larger.peak_mib / smaller.peak_mib, 3),
            "bytes_per_added_row": round(
                (larger.peak_mib - smaller.peak_mib) * _MIB / (larger.rows - smaller.rows), 2
            ),
        }
    return result


def markdown(costs: Sequence[Cost], ratios: dict[str, dict[str, float]]) -> str:
    """Return the costs as a table."""
    columns = ["command", "rows", "wall s", "processor s", "rows/s", "peak MiB"]
    forms = ("{}", "{:,}", "{:,.1f}", "{:,.1f}", "{:,}", "{:,.0f}")
    body = [
        [form.format(entry) for form, entry in zip(forms, asdict(c).values(), strict=True)]
        for c in costs
    ]
    lines = markdown_table(columns, body)
    lines.append("")
    lines += [
        f"- `{name}`: {r['rows']:g} times the rows take {r['memory']:.2f} times the memory, "
        f"{r['bytes_per_added_row']:g} bytes for each further row."
        for name, r in ratios.items()
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--series", type=int, default=50_000)
    parser.add_argument("--flags", default=shlex.join(MODEL), help="further flags of fit")
    parser.add_argument("--folder", type=Path, help="where to put the tables, for a while")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    options = parser.parse_args(argv)
    if options.series < PARTS[0] * 40:
        parser.error(f"--series must be at least {PARTS[0] * 40}; got {options.series}")
    if not Path("/proc/self/status").is_file():
        parser.error("memory is read from /proc, which this system does not have; use Linux")
    costs, facts, load = [], [], [os.getloadavg()[0]]
    for part in PARTS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = measure_table(Path(folder), options.series // part, shlex.split(options.flags))
        costs += found[0]
        facts.append(found[1])
        load.append(os.getloadavg()[0])
    ratios = growth(costs)
    report = {
        "meta": {
            **describe("large_table.py", argv or sys.argv[1:], packages=["pyarrow"]),
            "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
            "load": [round(item, 2) for item in load],  # before, between and after the tables
        },
        "model": options.flags,
        "tables": facts,
        "costs": [asdict(cost) for cost in costs],
        "growth": ratios,
    }
    text = markdown(costs, ratios)
    print(text)
    if options.output is not None:
        write_json(options.output, report, indent=1)
    if options.table is not None:
        write_text(options.table, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
