"""Where the time of whole trainings goes: PhysioNet 2012, set-a, by model and phase.

    PYTHONPATH=src python benchmarks/training_phases.py --stays 800 --epochs 2 --output OUT.json
    PYTHONPATH=src python benchmarks/training_phases.py --device cuda --models osciformer
    PYTHONPATH=src python benchmarks/training_phases.py --profile network.txt --models network

`osciformer` is the default classifier, a network joined with resonators; `network` is it without
them, `grud` the baseline of `physionet2012.py`. A phase has the time of its own, without that of
the phases within it: processor time of all threads on a CPU, time by the clock on a GPU, where
`--synchronize` waits for the device at the borders of phases. The data are found through the
environment variable OSCIFORMER_DATA, or downloaded.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shared import describe

from osciformer._files import write_json, write_text
from osciformer.bench.report import Row, names_among, progress
from osciformer.data import get_dataset
from osciformer.estimators import OsciFormerClassifier
from osciformer.estimators.resonator import ResonatorEstimator
from osciformer.models import SeriesModel
from osciformer.nn.attention import OscillatorAttention
from osciformer.train.module import TrainingModule
from osciformer.train.sources import EpochBatches

MODELS: dict[str, dict[str, Any]] = {
    "osciformer": {},
    "network": {"resonators": False},
    "grud": {
        "model_options": {"backbone": "gru_d"},
        "resonators": False,
        "dim": 64,
        "num_heads": 2,
    },
}
#: Phases, by the method that each of them is.
PHASES = (
    ("resonators", ResonatorEstimator, "_fit"),
    ("step", TrainingModule, "training_step"),
    ("backward", TrainingModule, "backward"),
    ("optimizer", torch.optim.AdamW, "step"),
    ("validation", TrainingModule, "validation_step"),
    ("metrics", TrainingModule, "on_validation_epoch_end"),
    ("network", SeriesModel, "forward"),
    ("attention", OscillatorAttention, "forward"),
    ("to device", TrainingModule, "transfer_batch_to_device"),
)


class Clock:
    """Time of phases that lie within each other; each has its own share."""

    def __init__(self, device: str, *, synchronize: bool) -> None:
        self.now = time.perf_counter if device == "cuda" else time.process_time
        self.is_synchronized = synchronize and device == "cuda"
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._open: list[str] = []
        self._last = self.now()

    def _settle(self) -> None:
        if self.is_synchronized:
            torch.cuda.synchronize()
        now = self.now()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within for `name`."""
        self._settle()
        self._open.append(name)
        self.calls[name] = self.calls.get(name, 0) + 1
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time is counted for `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    def batches(self, source: EpochBatches) -> Iterator[Any]:
        """Yield batches, whose making is a phase."""
        iterator = iter(source.loader)
        while True:
            with self.phase("batches"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch if source.finish is None else source.finish(batch)


@contextmanager
def counted(clock: Clock) -> Iterator[None]:
    """Count the phases of trainings within."""
    with ExitStack() as patches:
        for name, owner, method in PHASES:
            timed = clock.timed(name, getattr(owner, method))
            patches.enter_context(mock.patch.object(owner, method, timed))
        made = mock.patch.object(EpochBatches, "__iter__", lambda source: clock.batches(source))
        patches.enter_context(made)
        yield


def train(model: str, series: Any, options: argparse.Namespace) -> Row:
    """Fit a model, and return its time, in all and by phase."""
    clock = Clock(options.device, synchronize=options.synchronize)
    settings = {"max_epochs": options.epochs} if options.epochs else {}
    accelerator = "gpu" if options.device == "cuda" else "cpu"
    settings |= {"accelerator": accelerator, "random_state": 0, "verbose": 0}
    estimator = OsciFormerClassifier(**{**settings, **MODELS[model], **options.settings})
    profile = cProfile.Profile()
    wall, processor = time.perf_counter(), time.process_time()
    with counted(clock), clock.phase("rest"):
        if options.profile is None:
            estimator.fit(series)
        else:
            profile.runcall(estimator.fit, series)
    row: Row = {
        "model": model,
        "stays": len(series),
        "epochs": estimator.n_iter_,
        "wall_seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - processor, 2),
        "phases": {name: round(seconds, 2) for name, seconds in clock.seconds.items()},
        "calls": clock.calls,
        "train_loss": estimator.history_[-1]["train_loss"],
        "val_loss": estimator.history_[-1].get("val_loss"),
    }
    if options.profile is not None:
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(60)
        write_text(options.profile, text.getvalue())
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    series = get_dataset("physionet2012", "set-a")
    if options.stays:
        series = series[: options.stays]
    meta = describe("training_phases.py", arguments, device=options.device)
    rows: list[Row] = []
    for turn in range(options.turns):
        for model in options.models:
            rows.append({"turn": turn, **train(model, series, options)})
            progress(str(rows[-1]))
            if options.output is not None:
                write_json(options.output, {"meta": meta, "rows": rows})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, help="JSON file: meta and rows")
    add("--models", type=names_among(MODELS), default=list(MODELS), help=",".join(MODELS))
    add("--stays", type=int, default=0, help="the first so many; default all")
    add("--epochs", type=int, default=0, help="at most; default those of the estimator")
    add("--turns", type=int, default=1, help="trainings of each model")
    add("--threads", type=int, default=1, help="of torch")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--synchronize", action="store_true", help="wait for the GPU at the borders of phases")
    add("--profile", type=Path, help="text file for functions by time, of the last training")
    add("--settings", type=json.loads, default={}, help="of the estimator, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
