"""Trivial and classical models of the benchmark of events; dev alone decides their settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from osciformer.bench.events.datasets import EventTask
from osciformer.events import EventProcess, EventSequences, PoissonProcess, log_likelihood
from osciformer.events.classical.renewal import MarkRule
from osciformer.events.classical.selection import NUM_BINS, choose_hawkes, choose_renewal

Kind = Literal["truth", "trivial", "classical", "neural"]


@dataclass(frozen=True)
class FitRequest:
    """What a model may use: no test data are among it.

    Attributes:
        task: The data set.
        train: What to fit to.
        dev: What decides settings and when to stop.
        seed: Of all randomness.
        settings: Of training, `neural.TrainingSettings`; None for the defaults.
        learning_rates: To try in place of those of the settings.
    """

    task: EventTask
    train: EventSequences
    dev: EventSequences
    seed: int
    settings: Any = None
    learning_rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Fitted:
    """A fitted model.

    Attributes:
        process: It.
        dev_ll: Log-likelihood of the dev part, nats per event.
        parameters: Number of free parameters.
        chosen: Settings that the dev part decided.
        training: Further entries of the cell: epochs, seconds and the like.
    """

    process: EventProcess
    dev_ll: float
    parameters: int
    chosen: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchModel:
    """A row of the table.

    Attributes:
        name: On the command line.
        title: In the table.
        kind: What it is.
        fit: Makes it.
        is_about_types: Whether it differs from another row only by its types, and so makes sense
            where there are several.
    """

    name: str
    title: str
    kind: Kind
    fit: Callable[[FitRequest], Fitted]
    is_about_types: bool = False

    @property
    def is_random(self) -> bool:
        """Whether another seed gives another model."""
        return self.kind == "neural"


def fit_truth(request: FitRequest) -> Fitted:
    """Return the process that made the events."""
    if request.task.truth is None:
        raise ValueError(f"the process behind {request.task.name} is not known")
    process = request.task.truth()
    return Fitted(process, log_likelihood(process, request.dev).micro, parameters=0)


def fit_poisson(request: FitRequest) -> Fitted:
    """Return constant rates; half an event more of each type, so that none is impossible."""
    process = PoissonProcess.fit(request.train, smoothing=0.5)
    found = log_likelihood(process, request.dev).micro
    return Fitted(process, found, parameters=process.num_types)


def fit_renewal(request: FitRequest, marks: MarkRule, num_bins: tuple[int, ...]) -> Fitted:
    """Return a density of gaps and types by the last one; bins and smoothing are chosen.

    Args:
        request: What to fit to.
        marks: How types follow each other.
        num_bins: Numbers of bins to choose among.
    """
    best = choose_renewal(
        request.train,
        request.dev,
        marks=marks,
        num_bins=num_bins,
        min_width=request.task.min_width,
    )
    types, bins = best.process.num_types, len(best.process.gaps.mass)
    of_marks = types * (types - 1) if marks == "markov" else types
    parameters = bins + 1 + of_marks
    return Fitted(best.process, best.likelihood, parameters=parameters, chosen=best.settings)


def fit_classical_hawkes(request: FitRequest) -> Fitted:
    """Return a Hawkes process with exponential kernels; their shape and the steps are chosen."""
    began = time.perf_counter()
    best = choose_hawkes(request.train, request.dev)
    training = {"fit_seconds": round(time.perf_counter() - began, 2)}
    tensors = (best.process.base, best.process.branching, best.process.decay)
    return Fitted(
        best.process,
        best.likelihood,
        parameters=sum(item.numel() for item in tensors),
        chosen=best.settings,
        training=training,
    )


CLASSICAL = (
    BenchModel("truth", "the process itself", "truth", fit_truth),
    BenchModel("poisson", "Poisson", "trivial", fit_poisson),
    BenchModel(
        "poisson_markov",
        "Poisson x Markov",
        "trivial",
        lambda request: fit_renewal(request, "markov", NUM_BINS[:1]),
        is_about_types=True,
    ),
    BenchModel(
        "renewal_markov",
        "renewal x Markov",
        "trivial",
        lambda request: fit_renewal(request, "markov", NUM_BINS),
    ),
    BenchModel(
        "renewal_repeat",
        "renewal x repeat-last",
        "trivial",
        lambda request: fit_renewal(request, "repeat", NUM_BINS),
        is_about_types=True,
    ),
    BenchModel("hawkes", "Hawkes, fitted", "classical", fit_classical_hawkes),
)
