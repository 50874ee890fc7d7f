"""What the training loop costs beside the bare step of the model, in one run.

    python benchmarks/training_throughput.py [--series 256] [--rounds 3] [--output file.json]

Synthetic series like those of an intensive care unit (37 features, about 80 % missing) train the
default classifier. The whole pipeline (batches drawn and padded from the container, Lightning's
loop, metrics of training, schedule, clipping) takes turns with the bare step (forward, backward,
clipping, optimizer) over batches that were padded beforehand. The cost of data handling and loop
is the ratio of the two, less one; it is taken from processor time, which neighbours on a shared
machine disturb little, and from wall time as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from osciformer import parameter_groups
from osciformer.data import Batch, IrregularSeries, collate
from osciformer.models import SeriesModel, SeriesModelConfig
from osciformer.train import Classification, SeriesSource, TrainConfig, fit
from osciformer.train.sources import EpochBatches

NUM_FEATURES, NUM_STATIC = 37, 8
MEASURED_EPOCHS = 2


class TimedSource(SeriesSource):
    """Notes the time whenever an epoch begins."""

    def __init__(self, source: SeriesSource) -> None:
        vars(self).update(vars(source))
        self.marks: list[tuple[float, float]] = []

    def epoch(self, number: int, *, rank: int = 0, world_size: int = 1) -> EpochBatches:
        self.marks.append(now())
        return super().epoch(number, rank=rank, world_size=world_size)


def now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


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


def measure_bare(
    model: nn.Module, task: Classification, batches: list[Batch], config: TrainConfig
) -> tuple[float, float]:
    """Return processor and wall seconds of one epoch of bare steps."""
    groups = parameter_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate)
    model.train()
    before = now()
    for batch in batches:
        total, count = task.loss(model(batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    after = now()
    return after[0] - before[0], after[1] - before[1]


def measure_pipeline(
    model: nn.Module, task: Classification, source: SeriesSource, config: TrainConfig
) -> list[tuple[float, float]]:
    """Return processor and wall seconds of each measured epoch of a training run.

    The first epoch, in which Lightning sets itself up, is not measured.
    """
    timed = TimedSource(source)
    fit(model, task, timed, None, config)
    marks = timed.marks[-MEASURED_EPOCHS - 1 :]
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--series", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    series = make_series(options.series)
    # One epoch before the measured ones, and one whose beginning ends the last of them.
    config = TrainConfig(max_epochs=MEASURED_EPOCHS + 2, accelerator="cpu")
    task = Classification(2)
    source = SeriesSource(series, config.batch_size, labels=series.labels)
    bare, whole = [], []
    for _ in range(options.rounds):
        for number in range(1, MEASURED_EPOCHS + 1):
            batches = list(source.epoch(number))
            bare.append(measure_bare(make_model(series), task, batches, config))
        whole += measure_pipeline(make_model(series), task, source, config)
    report: dict[str, object] = {
        "series": options.series,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "machine": platform.processor() or platform.machine(),
    }
    for position, clock in enumerate(("processor", "wall")):
        middle = [statistics.median(r[position] for r in runs) for runs in (bare, whole)]
        report[clock] = {
            "bare_series_per_second": round(options.series / middle[0], 1),
            "pipeline_series_per_second": round(options.series / middle[1], 1),
            "cost_of_data_and_loop": round(middle[1] / middle[0] - 1.0, 4),
            "bare_seconds": [round(r[position], 3) for r in bare],
            "pipeline_seconds": [round(r[position], 3) for r in whole],
        }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
