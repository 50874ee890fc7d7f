"""What benchmarks of estimators share: the record of a run, its settings, and rows of networks."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from osciformer.bench.documents import Document, current_commit, run_documented
from osciformer.bench.documents import make_parser as make_plain_parser
from osciformer.bench.report import Row, describe_run, shown_command
from osciformer.bench.workers import Job, Work
from osciformer.config import estimator_arguments
from osciformer.data import IrregularSeries
from osciformer.estimators import OsciFormerClassifier

PACKAGES = ("pytorch-lightning", "scikit-learn", "pandas", "pyarrow")
#: Settings of estimators at toy size.
TINY = {"dim": 8, "num_layers": 1, "num_heads": 1, "max_epochs": 1}


def describe(
    script: str,
    arguments: Sequence[str],
    *,
    device: str | torch.device = "cpu",
    commit: str | None = None,
    packages: Sequence[str] = PACKAGES,
) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a run of `benchmarks/SCRIPT`."""
    device = torch.device(device)
    command = shown_command("python", f"benchmarks/{script}", arguments=arguments)
    meta = describe_run(command, device, packages=packages)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        meta["gpu_memory_mib"] = properties.total_memory // 2**20
        meta["gpu_processors"] = properties.multi_processor_count
    return {**meta, "commit": commit or current_commit(Path(__file__).parent)}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all benchmarks that train estimators."""
    parser = make_plain_parser(argparse.ArgumentParser(description=description))
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--checkpoints", type=Path, help="folder from which jobs that were stopped go on")
    return parser


def run_benchmark(
    script: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    jobs: Sequence[Job],
    work: Work,
    settings: dict[str, Any],
    tables: Callable[[Document], list[str]],
    **more: Any,
) -> int:
    """Run the jobs that the output file lacks, write the files, and return the exit status.

    Arguments and result are those of `run_documented`; `script` and `arguments` are its command.
    """

    def describe_this() -> Row:
        return describe(script, arguments, device=options.device, commit=options.commit)

    more = {"device": options.device, "checkpoints": options.checkpoints, **more}
    return run_documented(describe_this, options, jobs, work, settings, tables, **more)


def estimator_settings(backbone: str, job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an estimator that a job needs beside those of its task."""
    chosen: dict[str, Any] = {
        **settings["estimator"],
        "backbone": backbone,
        "random_state": job["seed"],
        "accelerator": "gpu" if settings["device"] == "cuda" else "cpu",
    }
    folder = _checkpoint(job, settings)
    chosen = estimator_arguments("classification", chosen)  # where they go is the same in all tasks
    return chosen if folder is None else {**chosen, "run_dir": folder, "resume": True}


def training_entries(estimator: Any, job: Job, settings: dict[str, Any]) -> Row:
    """Return what a row says about the training of a fitted estimator; drop its checkpoint."""
    folder = _checkpoint(job, settings)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "device": settings["device"],
        "epochs": estimator.n_iter_,
        "best_epoch": estimator.best_epoch_,
        # Those of an interrupted and continued training, too.
        "fit_seconds": round(sum(epoch["seconds"] for epoch in estimator.history_), 2),
        "parameters": sum(p.numel() for p in estimator.model_.parameters()),
    }


def _checkpoint(job: Job, settings: dict[str, Any]) -> Path | None:
    """Return the folder of a job's checkpoint, if there are to be some."""
    if settings["checkpoints"] is None:
        return None
    return Path(settings["checkpoints"]) / "-".join(map(str, job.values()))


def score_network(
    train: IrregularSeries, test: IrregularSeries, job: Job, settings: dict[str, Any]
) -> Row:
    """Return accuracy and training of `OsciFormerClassifier` with the job's model as backbone.

    `osciformer` is the default classifier, with resonators; its row has the accuracy of each of the
    two, too. The others are networks alone.
    """
    chosen = estimator_settings(job["model"], job, settings)
    is_joined = job["model"] == "osciformer"
    started = time.process_time()
    model = OsciFormerClassifier(**{**chosen, "resonators": is_joined}).fit(train)
    found: Row = {
        "cpu_seconds": round(time.process_time() - started, 2),
        **training_entries(model, job, settings),
        "accuracy": model.score(test),
    }
    if not is_joined:
        return found
    found |= {"network_weight": model.network_weight_}
    found |= {"resonator_accuracy": model.resonator_.score(test)}
    model.network_weight_ = 1.0  # the network alone answers
    return {**found, "network_accuracy": model.score(test)}


def accuracies(row: Row) -> dict[str, float]:
    """Return the accuracies in a row by model; `network` is that of `osciformer` alone."""
    found = {row["model"]: row["accuracy"]}
    return found | ({"network": row["network_accuracy"]} if "network_accuracy" in row else {})
