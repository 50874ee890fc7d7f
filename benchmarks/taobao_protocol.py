"""What decides the likelihood of Taobao: the rule of integration, or gaps that no test part has?

    PYTHONPATH=src python benchmarks/taobao_protocol.py --output taobao.json --table taobao.md

A network is trained on the parts as given and on parts that are alike (`bench events`), and its
test likelihood is taken in several ways:

- exactly, as `bench events` does;
- with the compensator of each gap from 20 even nodes by the trapezoid rule, or by their mean, as
  EasyTPP's releases do;
- given that no gap is longer than 1, which is so in the test part and not in the given train part:
  what a network loses by expecting long gaps is what this gains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shared import describe

from osciformer._files import write_json, write_text
from osciformer._types import Float, Tensor
from osciformer.bench.events.datasets import TASKS
from osciformer.bench.events.models import FitRequest, TrainingSettings, find_model
from osciformer.bench.report import Row, markdown_table, progress, tuple_of
from osciformer.events import (
    EventBatch,
    EventProcess,
    EventSequences,
    likelihood_terms,
    predict_next,
)

NUM_NODES, LONGEST = 20, 1.0
WAYS = ("exact", "trapezoid", "mean", "given_short")
_TOLERANCE = 1e-3


def even_compensators(
    process: EventProcess, batch: EventBatch, num_nodes: int
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
    """Return integrals over the gap behind each event: trapezoids, and the mean of the nodes."""
    waits = torch.diff(batch.finite_times, dim=1).clamp(min=0.0)
    waits = torch.nn.functional.pad(waits, (0, 1))
    share = torch.linspace(0.0, 1.0, num_nodes, dtype=waits.dtype, device=waits.device)
    rates = process.intensity_after(batch, waits[..., None] * share).sum(dim=-1).double()
    ends = (rates[..., 0] + rates[..., -1]) / 2
    trapezoid = (rates.sum(dim=-1) - ends) / (num_nodes - 1)
    return waits * trapezoid, waits * rates.mean(dim=-1)


@torch.no_grad()
def score_ways(
    process: EventProcess, sequences: EventSequences, *, batch_size: int = 16
) -> dict[str, float]:
    """Return the log-likelihood per event by each of `WAYS`."""
    sums, count = dict.fromkeys(WAYS, 0.0), 0
    for batch in sequences.batches(batch_size):
        batch = batch.to(process.device)
        terms = likelihood_terms(process, batch, tolerance=5e-4, max_halvings=4)
        scored = terms.scored
        log_intensity = float(terms.log_intensity[scored].sum())
        exact = log_intensity - float(terms.compensator[scored].sum())
        rules = even_compensators(process, batch, NUM_NODES)
        # The gap behind an event is the one before the next.
        trapezoid, mean = (float(rule[:, :-1][scored[:, 1:]].sum()) for rule in rules)
        precision: dict[str, Any] = {"tolerance": _TOLERANCE, "negligible": _TOLERANCE}
        survival = predict_next(process, batch, horizon=LONGEST, **precision).survival
        short = float(torch.log1p(-survival[:, :-1][scored[:, 1:]]).sum())
        found = (exact, log_intensity - trapezoid, log_intensity - mean, exact - short)
        for way, value in zip(WAYS, found, strict=True):
            sums[way] += value
        count += int(scored.sum())
    return {way: value / count for way, value in sums.items()}


def measure(dataset: str, model: str, seed: int, settings: TrainingSettings) -> Row:
    """Return the likelihoods of a network that is trained on a data set's parts."""
    task = TASKS[dataset]
    parts = task.load(seed)
    fit = find_model(model).fit
    if fit is None:
        raise ValueError(f"{model} is a rule, without a likelihood")
    fitted = fit(FitRequest(task, parts.train, parts.dev, seed, settings))
    long = {name: float((part.gaps > LONGEST).mean()) for name, part in parts._asdict().items()}
    return {
        "dataset": dataset,
        "model": model,
        "seed": seed,
        "dev": fitted.dev_ll,
        **score_ways(fitted.process, parts.test),
        "epochs": fitted.training["epochs"],
        "long_gaps": long,
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as Markdown."""
    titles = ["data set", "model", "dev", "test", "20 nodes, trapezoid", "20 nodes, mean"]
    body = [
        [row["dataset"], row["model"], *(f"{row[key]:.3f}" for key in ("dev", *WAYS))]
        for row in rows
    ]
    return markdown_table([*titles, f"no gap above {LONGEST:g}"], body)


def main(arguments: Sequence[str]) -> int:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file")
    add("--table", type=Path, help="Markdown file; without it, standard output")
    add("--datasets", type=tuple_of(str), default=("taobao", "taobao_alike"))
    add("--models", type=tuple_of(str), default=("neural_hawkes", "rmtpp"))
    add("--seeds", type=tuple_of(int), default=(0,))
    add("--steps", type=int, default=600, help="of a training, about")
    add("--commit", help="to record, where git cannot tell")
    options = parser.parse_args(arguments)
    settings = TrainingSettings(learning_rates=(3e-3,), steps=options.steps)
    meta = describe("taobao_protocol.py", arguments, commit=options.commit)
    content: dict[str, Any] = {"meta": meta, "rows": []}
    for dataset in options.datasets:
        for model in options.models:
            for seed in options.seeds:
                row = measure(dataset, model, seed, settings)
                content["rows"].append(row)
                write_json(options.output, content, indent=1)
                progress(f"{dataset} {model} {seed}: {row['exact']:.4f}")
    lines = table(content["rows"])
    if options.table is None:
        print("\n".join(lines))
    else:
        write_text(options.table, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
