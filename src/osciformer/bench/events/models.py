"""Trivial and classical models of the benchmark of events; dev alone decides their settings."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from osciformer.bench.events.datasets import EventTask
from osciformer.events import (
    EventProcess,
    EventSequences,
    HawkesProcess,
    PoissonProcess,
    RenewalProcess,
    fit_hawkes,
    log_likelihood,
)
from osciformer.events.classical.hawkes_fit import DecayShape
from osciformer.events.classical.renewal import MarkRule

Kind = Literal["truth", "trivial", "classical", "neural"]
#: Largest numbers of bins of a histogram of gaps; 0 is an exponential density.
NUM_BINS = (0, 4, 8, 12, 20, 40, 80, 160)
#: Weights of the frequencies of types against what followed a type, in events.
SMOOTHINGS = (1.0, 5.0, 20.0)
#: Evaluations after which the fit of a Hawkes process is stopped: with many pairs of types and few
#: events it must not run to the end.
HAWKES_STEPS = (10, 30, 100)
# A kernel of its own for each pair of types takes memory and time with the square of their number.
_MOST_TYPES_BY_PAIR = 3
_HAWKES_BATCH = 256


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


def best_on_dev(
    candidates: Iterable[tuple[Mapping[str, Any], EventProcess]], dev: EventSequences
) -> tuple[float, Mapping[str, Any], EventProcess]:
    """Return the dev log-likelihood, the settings and the process of the best candidate.

    Args:
        candidates: Pairs of settings and process.
        dev: The dev part. A candidate that is not finite on it is never the best.
    """
    best: tuple[float, Mapping[str, Any], EventProcess] | None = None
    for settings, process in candidates:
        found = log_likelihood(process, dev).micro
        found = found if math.isfinite(found) else -math.inf
        if best is None or found > best[0]:
            best = (found, settings, process)
    if best is None:
        raise ValueError("there is no candidate")
    return best


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
    smoothings = SMOOTHINGS if marks == "markov" else SMOOTHINGS[:1]
    found, chosen, process = best_on_dev(
        (
            (
                {"num_bins": bins, "smoothing": smoothing},
                RenewalProcess.fit(
                    request.train,
                    marks=marks,
                    num_bins=bins,
                    smoothing=smoothing,
                    min_width=request.task.min_width,
                ),
            )
            for bins, smoothing in itertools.product(num_bins, smoothings)
        ),
        request.dev,
    )
    assert isinstance(process, RenewalProcess)
    types, bins = process.num_types, len(process.gaps.mass)
    of_marks = types * (types - 1) if marks == "markov" else types
    return Fitted(process, found, parameters=bins + 1 + of_marks, chosen=chosen)


def fit_classical_hawkes(request: FitRequest) -> Fitted:
    """Return a Hawkes process with exponential kernels; their shape and the steps are chosen."""
    shapes: list[DecayShape] = ["shared"]
    if request.train.num_types > 1:
        shapes.append("by_cause")
    if 1 < request.train.num_types <= _MOST_TYPES_BY_PAIR:
        shapes.append("by_pair")
    began = time.perf_counter()
    found, chosen, process = best_on_dev(
        (
            (
                {"decay": shape, "max_steps": steps},
                fit_hawkes(
                    request.train, decay=shape, max_steps=steps, batch_size=_HAWKES_BATCH
                ).process,
            )
            for shape, steps in itertools.product(shapes, HAWKES_STEPS)
        ),
        request.dev,
    )
    assert isinstance(process, HawkesProcess)
    parameters = sum(item.numel() for item in (process.base, process.branching, process.decay))
    training = {"fit_seconds": round(time.perf_counter() - began, 2)}
    return Fitted(process, found, parameters=parameters, chosen=chosen, training=training)


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
