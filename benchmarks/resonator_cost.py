"""What `ResonatorClassifier` costs: one fit of the size of its goal, and series ever longer.

    PYTHONPATH=src python benchmarks/resonator_cost.py --output cost.json [--longest 100000]
    PYTHONPATH=src python benchmarks/resonator_cost.py --output toy.json --quick   # to see it run

Processor seconds of one thread, and the largest resident set of a process that does one of these
and nothing else, less what it had when its series were made.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from large_table import resident
from shared import describe

from osciformer._files import write_json
from osciformer.bench.report import Row, markdown_table, progress
from osciformer.bench.workers import Job, run_jobs
from osciformer.data import IrregularSeries
from osciformer.estimators import ResonatorClassifier

VARIABLES = 6
#: Of the goal, 60 s: series and rows of each.
GOAL = (1000, 1000)
#: Series that are made longer.
NUM_LONG = 20
_MIB = 2**20


def make_series(number: int, rows: int) -> IrregularSeries:
    """Return irregular series of two classes: the period of the first variable is 10 or 12."""
    generator = np.random.default_rng(0)
    times = np.cumsum(generator.exponential(1.0, (number, rows)), axis=1)
    values = generator.standard_normal((number, rows, VARIABLES), dtype=np.float32)
    labels = np.arange(number) % 2
    period = np.array([10.0, 12.0])[labels][:, None]
    phase = generator.uniform(0.0, 2 * np.pi, (number, 1))
    values[..., 0] += np.sin(2 * np.pi * times / period + phase)
    return IrregularSeries.from_arrays(times, values, labels=labels)


def measure(job: Job, settings: dict[str, Any]) -> Row:
    """Return seconds and memory of fitting and of predicting the same series."""
    small = make_series(12, 20)
    ResonatorClassifier(random_state=0).fit(small).predict(small)  # imports, and starts, everything
    series = make_series(job["series"], job["rows"])
    before = resident(os.getpid(), "VmRSS")
    started = time.process_time()
    model = ResonatorClassifier(random_state=0).fit(series)
    fitted = time.process_time()
    accuracy = model.score(series)
    scored = time.process_time()
    return {
        "features": sum(len(family.names()) for family in model.features_.families_),
        "fit_s": round(fitted - started, 2),
        "predict_s": round(scored - fitted, 2),
        "fit_us_a_row": 1e6 * (fitted - started) / (job["series"] * job["rows"]),
        "series_mib": round((series.times.nbytes + series.values.nbytes) / _MIB, 1),
        "added_mib": round((resident(os.getpid(), "VmHWM") - before) / _MIB, 1),
        "train_accuracy": accuracy,
    }


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the report."""
    columns = {
        "series": ("series", "{:,}"),
        "rows": ("rows", "{:,}"),
        "features": ("features", "{:,}"),
        "fit_s": ("fit, processor s", "{:.1f}"),
        "predict_s": ("predict, processor s", "{:.1f}"),
        "fit_us_a_row": ("fit, µs a row", "{:.1f}"),
        "series_mib": ("series, MiB", "{:.0f}"),
        "added_mib": ("memory beside, MiB", "{:.0f}"),
    }
    body = [
        [form.format(row[key]) if key in row else "-" for key, (_, form) in columns.items()]
        for row in rows
    ]
    failed = [f"- failed: {row['error']}" for row in rows if "error" in row]
    return [*markdown_table([title for title, _ in columns.values()], body), *failed]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--longest", type=int, default=100_000, help="rows of the longest series")
    parser.add_argument("--commit", help="to record, where git cannot tell")
    parser.add_argument("--quick", action="store_true", help="toy size, only to see it run")
    options = parser.parse_args(arguments)
    lengths = [rows for rows in (1000, 3000, 10_000, 30_000, 100_000) if rows <= options.longest]
    jobs = [GOAL, *((NUM_LONG, rows) for rows in lengths)]
    if options.quick:
        jobs = [(20, 30), (20, 60)]
    meta = describe("resonator_cost.py", arguments, commit=options.commit)
    rows: list[Row] = []
    for series, length in jobs:
        job = {"series": series, "rows": length}
        # One at a time, so that each has a process, and its record of memory, to itself.
        for _, found in run_jobs([job], measure, {}, num_workers=1, deadline=math.inf):
            rows.append({**job, **found})
            progress(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
            write_json(options.output, {"meta": meta, "rows": rows}, indent=1)
    print("\n".join(tables(rows)), flush=True)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
