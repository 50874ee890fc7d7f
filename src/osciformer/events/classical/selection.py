"""Classical processes whose settings a validation part decides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from osciformer.events.classical.hawkes import HawkesProcess
from osciformer.events.classical.hawkes_fit import DecayShape, fit_hawkes
from osciformer.events.classical.renewal import MarkRule, RenewalProcess
from osciformer.events.likelihood import log_likelihood
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences

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

Process = TypeVar("Process", bound=EventProcess)


@dataclass(frozen=True)
class Choice(Generic[Process]):
    """The best of several processes.

    Attributes:
        process: It.
        likelihood: Its log-likelihood of the validation part, nats per event.
        settings: With which it was fitted.
    """

    process: Process
    likelihood: float
    settings: Mapping[str, Any] = field(default_factory=dict)


def choose(
    candidates: Iterable[tuple[Mapping[str, Any], Process]], validation: EventSequences
) -> Choice[Process]:
    """Return the candidate with the best likelihood of the validation part.

    Args:
        candidates: Pairs of settings and process.
        validation: Sequences. A candidate that is not finite on them is never the best.
    """
    best: Choice[Process] | None = None
    for settings, process in candidates:
        found = log_likelihood(process, validation).micro
        found = found if math.isfinite(found) else -math.inf
        if best is None or found > best.likelihood:
            best = Choice(process, found, settings)
    if best is None:
        raise ValueError("there is no candidate")
    return best


def choose_renewal(
    train: EventSequences,
    validation: EventSequences,
    *,
    marks: MarkRule = "markov",
    num_bins: tuple[int, ...] = NUM_BINS,
    min_width: float = 0.0,
) -> Choice[RenewalProcess]:
    """Return a density of gaps with types by the last one; bins and smoothing are chosen.

    Args:
        train: What it is fitted to.
        validation: What decides.
        marks: How types follow each other.
        num_bins: Numbers of bins to choose among.
        min_width: Smallest width of a bin.
    """
    smoothings = SMOOTHINGS if marks == "markov" else SMOOTHINGS[:1]
    return choose(
        (
            (
                {"num_bins": bins, "smoothing": smoothing},
                RenewalProcess.fit(
                    train, marks=marks, num_bins=bins, smoothing=smoothing, min_width=min_width
                ),
            )
            for bins, smoothing in itertools.product(num_bins, smoothings)
        ),
        validation,
    )


def choose_hawkes(train: EventSequences, validation: EventSequences) -> Choice[HawkesProcess]:
    """Return a Hawkes process with exponential kernels; their shape and the steps are chosen.

    Args:
        train: What it is fitted to.
        validation: What decides.
    """
    shapes: list[DecayShape] = ["shared"]
    if train.num_types > 1:
        shapes.append("by_cause")
    if 1 < train.num_types <= _MOST_TYPES_BY_PAIR:
        shapes.append("by_pair")
    return choose(
        (
            (
                {"decay": shape, "max_steps": steps},
                fit_hawkes(train, decay=shape, max_steps=steps, batch_size=_HAWKES_BATCH).process,
            )
            for shape, steps in itertools.product(shapes, HAWKES_STEPS)
        ),
        validation,
    )
