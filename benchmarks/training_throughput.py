"""What data handling and the training loop cost beside the bare step of the model.

    python benchmarks/training_throughput.py [--series 256] [--pairs 12] [--output file.json]

Synthetic series like those of an intensive care unit (37 features, about 80 % missing) train the
default classifier, from memory and from a Parquet table on disk. Before each epoch of the whole
pipeline (batches drawn and padded, Lightning's loop, metrics of training, schedule, clipping) the
same batches are made once without a model, and are trained on by bare steps (forward, backward,
clipping, optimizer). So each epoch has its two yardsticks right before it, in the same process.

The cost of data and loop is the ratio of an epoch to its bare steps, less one; that of data alone
is the ratio of making the batches to the bare steps. Reported are the medians and quartiles of the
ratios of all pairs, from processor time, which neighbours on a busy machine disturb little, and
from wall time as well. One thread computes unless --threads says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet
import torch
from shared import describe
from torch import nn

from osciformer._files import write_json
from osciformer.data import (
    Batch,
    IrregularSeries,
    ParquetSeries,
    SeriesTransform,
    collate,
    from_frame,
)
from osciformer.models import SeriesModel, SeriesModelConfig
from osciformer.nn import parameter_groups
from osciformer.train import (
    BatchSource,
    Classification,
    SeriesSource,
    StreamSource,
    TrainConfig,
    fit,
)
from osciformer.train.sources import EpochBatches

NUM_FEATURES, NUM_STATIC = 37, 8
CLOCKS = ("processor", "wall")
EPOCHS_A_RUN = 4  # measured epochs of one training run, in the middle of it


class Seconds(NamedTuple):
    """Processor and wall seconds."""

    processor: float
    wall: float


class Pair(NamedTuple):
    """Seconds of an epoch: of making its batches, of bare steps, of the whole pipeline."""

    data: Seconds
    bare: Seconds
    pipeline: Seconds


def now() -> Seconds:
    return Seconds(time.process_time(), time.perf_counter())


def since(before: Seconds) -> Seconds:
    after = now()
    return Seconds(after.processor - before.processor, after.wall - before.wall)


class TimedSource:
    """Passes the epochs of a source on, and measures each beside its bare steps.

    The first epoch, in which Lightning sets itself up, and the last, whose end is not seen, are not
    measured.
    """

    def __init__(self, source: BatchSource, run_bare: Callable[[list[Batch]], Seconds]) -> None:
        self.source, self.run_bare = source, run_bare
        self.pairs: list[Pair] = []
        self._began: Seconds | None = None
        self._before: tuple[Seconds, Seconds] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        if self._began is not None and self._before is not None:
            self.pairs.append(Pair(*self._before, since(self._began)))
        self._before = None
        if number > 0:
            start = now()
            batches = list(self.source.epoch(number))
            self._before = since(start), self.run_bare(batches)
        self._began = now()
        return self.source.epoch(number, rank=rank, world_size=world_size)


def make_series(count: int) -> IrregularSeries:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.normal(75, 22, count), 10, 200).astype(int)
    times = [np.sort(generator.uniform(0, 2880, length)) for length in lengths]
    values = generator.normal(size=(lengths.sum(), NUM_FEATURES)).astype(np.float32)
    values[generator.random(values.shape) < 0.8] = np.nan
    return IrregularSeries.from_arrays(
        times,
        np.split(values, np.cumsum(lengths)[:-1]),
        labels=generator.integers(0, 2, count),
        static=generator.normal(size=(count, NUM_STATIC)),
        empty="keep",
    )


def make_model(series: IrregularSeries) -> SeriesModel:
    torch.manual_seed(0)
    config = SeriesModelConfig(input_dim=NUM_FEATURES, static_dim=NUM_STATIC, output_dim=2)
    sample = collate(series, np.arange(min(len(series), 500)))
    return SeriesModel(config).fit_time_scale(sample.times, sample.mask)


class BareSteps:
    """Training steps over batches that are ready, and nothing else."""

    def __init__(self, model: nn.Module, task: Classification, config: TrainConfig) -> None:
        self.model, self.task = model.train(), task
        groups = parameter_groups(model, config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate)

    def __call__(self, batches: list[Batch]) -> Seconds:
        start = now()
        for batch in batches:
            total, count = self.task.loss(self.model(batch), batch)
            self.optimizer.zero_grad()
            (total / count).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return since(start)


def make_sources(series: IrregularSeries, batch_size: int, folder: Path) -> dict[str, BatchSource]:
    """Return the scaled series as batches from memory, and from a table on disk."""
    transform = SeriesTransform("standard").partial_fit(series)
    path = folder / "table.parquet"
    parquet.write_table(series.to_frame("pyarrow"), path)
    layout: dict[str, Any] = {"id": "id", "time": "time", "label": "label", "empty": "keep"}
    table = ParquetSeries(path, static=series.static_names, **layout)
    assert from_frame(parquet.read_table(path), table.layout).equals(series)
    return {
        "memory": SeriesSource(transform.transform(series), batch_size, labels=series.labels),
        "disk": StreamSource(table, batch_size, prepare=transform.transform, labels=series.labels),
    }


def measure(source: BatchSource, series: IrregularSeries, pairs: int) -> list[Pair]:
    """Return the seconds of so many epochs, from training runs of a few epochs each."""
    found: list[Pair] = []
    # One epoch before the measured ones, and one whose beginning ends the last of them.
    config = TrainConfig(max_epochs=EPOCHS_A_RUN + 2, accelerator="cpu")
    task = Classification(2)
    while len(found) < pairs:
        timed = TimedSource(source, BareSteps(make_model(series), task, config))
        fit(make_model(series), task, timed, None, config)
        found += timed.pairs
    return found[:pairs]


def summarise(pairs: Sequence[Pair], num_series: int) -> dict[str, Any]:
    """Return, for both clocks, throughput, and the ratios as first quartile, median and third."""
    report: dict[str, Any] = {}
    for position, clock in enumerate(CLOCKS):
        data, bare, pipeline = (
            np.array([getattr(pair, name)[position] for pair in pairs]) for name in Pair._fields
        )
        quarters = (25, 50, 75)
        report[clock] = {
            "bare_series_per_second": round(num_series / float(np.median(bare)), 1),
            "pipeline_series_per_second": round(num_series / float(np.median(pipeline)), 1),
            "cost_of_data": np.percentile(data / bare, quarters).round(4).tolist(),
            "cost_of_data_and_loop": np.percentile(pipeline / bare - 1, quarters).round(4).tolist(),
            **{
                f"{name}_seconds": seconds.round(3).tolist()
                for name, seconds in (("data", data), ("bare", bare), ("pipeline", pipeline))
            },
        }
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--series", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=12, help="measured epochs of each source")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    series = make_series(options.series)
    arguments = sys.argv[1:] if argv is None else argv
    report: dict[str, Any] = {
        "meta": {
            **describe("training_throughput.py", arguments, packages=["pyarrow"]),
            "load": round(os.getloadavg()[0], 2),
        },
        "series": options.series,
        "rows": len(series.times),
    }
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(series, TrainConfig().batch_size, Path(folder))
        for name, source in sources.items():
            report[name] = summarise(measure(source, series, options.pairs), options.series)
    print(json.dumps(report, indent=1))
    if options.output is not None:
        write_json(options.output, report, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
