"""`osciformer bench xor`: parity of a stream of bits, a bit at a time or a change at a time."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from osciformer.bench.tables.harness import Table
from osciformer.bench.tables.problem import Part, Problem
from osciformer.data import IrregularSeries

#: Bits a unit of time.
UNIT = 32.0
CASES = ("equidistant", "event")


def make_streams(
    count: int, seed: int, *, is_event: bool, lengths: tuple[int, int] = (2, 31)
) -> IrregularSeries:
    """Return streams of fair bits, labelled with the parity of their ones.

    Bit i is at the time i / 32, counted from 1. In the event encoding there are only bits that
    differ from the one before, the first bit, and the last one.

    Args:
        count: How many.
        seed: Of all randomness.
        is_event: Which encoding.
        lengths: Least and greatest number of bits, which is uniform between them.
    """
    generator = np.random.default_rng(seed)
    sizes = generator.integers(lengths[0], lengths[1] + 1, count)
    times, values, labels = [], [], []
    for size in sizes:
        bits = generator.integers(0, 2, size)
        is_written = np.ones(size, dtype=bool)
        if is_event:
            is_written[1:] = bits[1:] != bits[:-1]
            is_written[-1] = True
        times.append((np.flatnonzero(is_written) + 1) / UNIT)
        values.append(bits[is_written].astype(np.float32))
        labels.append(int(bits.sum()) % 2)
    return IrregularSeries.from_arrays(times, values, labels=np.array(labels))


def load(case: str, seed: int, size: Mapping[str, Any]) -> Problem:
    """Return the problem of an encoding; the data do not depend on the seed."""
    make = functools.partial(make_streams, is_event=case == "event")
    most = size["bits"]
    train, validation, test = (
        Part(make(size[name], number, lengths=(2, most)))
        for number, name in enumerate(("train", "validation", "test"))
    )
    tests = {f"2 to {most} bits": test}
    for number in (1, 2):
        longer = number * (most + 1), 2 * number * (most + 1) - 1
        name = "{} to {} bits".format(*longer)
        tests[name] = Part(make(size["test"], 2 + number, lengths=longer))
    # A hidden bit would change the answer.
    settings: dict[str, Any] = {"observation_dropout": 0.0, "dropout": 0.0}
    settings |= {"max_epochs": size["epochs"], "batch_size": size["batch"], "dim": size["dim"]}
    return Problem("classification", train, validation, tests, settings)


_PUBLISHED = {
    "lstm": ("100.00", "89.71 ± 3.48"),
    "ct_gru": ("100.00", "61.36 ± 4.87"),
    "rnn_decay": ("60.28 ± 19.87", "75.53 ± 5.28"),
    "gru_d": ("100.00", "97.90 ± 1.71"),
    "phased_lstm": ("50.99 ± 0.76", "80.29 ± 0.99"),
    "ct_lstm": ("97.73 ± 0.08", "95.09 ± 0.30"),
    "cornn": ("100.00", "52.89 ± 1.25"),
    "ode_rnn": ("50.47 ± 0.06", "51.21 ± 0.37"),
    "ct_rnn": ("50.42 ± 0.12", "50.79 ± 0.34"),
    "gru_ode": ("50.41 ± 0.40", "52.52 ± 0.35"),
    "ode_lstm": ("100.00", "98.89 ± 0.26"),
    "ltc": ("100.00", "49.11 ± 0.00"),
    "cfc": ("100.00", "99.42 ± 0.42"),
    "contiformer": ("100.00", "99.93 ± 0.12"),
    "osciformer_paper": ("100.00", "99.83 ± 0.32"),
}

SUITE = Table(
    name="xor",
    module="xor",
    summary="Parity of a stream of bits.",
    rows=CASES,
    load=load,
    tasks="classification",
    sizes={
        "small": {
            **{"bits": 15, "train": 10_000, "validation": 1000, "test": 5000},
            **{"epochs": 30, "batch": 64, "dim": 32},
        },
        "full": {
            **{"bits": 31, "train": 100_000, "validation": 10_000, "test": 10_000},
            **{"epochs": 200, "batch": 128, "dim": 64},
        },
        "quick": {
            **{"bits": 7, "train": 64, "validation": 32, "test": 32},
            **{"epochs": 1, "batch": 16, "dim": 8},
        },
    },
    note=(
        "Streams of 2 to 31 fair bits (to 15 if small); the class is the parity of the ones; "
        "guessing is right in 50 %. `equidistant` has every bit, `event` those that differ from "
        "the one before, and the last. Longer streams than those trained on are scored, too. "
        "Nothing is dropped out."
    ),
    published={
        (case, name): figures[place]
        for name, figures in _PUBLISHED.items()
        for place, case in enumerate(CASES)
    },
    source=(
        "on 2 to 31 bits, 100,000 series, 200 epochs, without a validation part; CfC paper "
        "(arXiv 2106.13898), where `lstm` is the augmented LSTM; `contiformer` and "
        "`osciformer_paper` as printed in the OsciFormer paper"
    ),
)
