"""Means, spreads and paired differences over the cells of the benchmark of events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from osciformer.bench.events.cells import find_model
from osciformer.bench.events.datasets import TASKS

Row = dict[str, Any]
#: Scores of a cell, and whether more is better.
SCORES = {
    "ll_micro": True,
    "ll_macro": True,
    "accuracy": True,
    "accuracy_at_time": True,
    "time_rmse": False,
    "time_mae": False,
}
REFERENCE = "osciformer"
#: A row made of others: at each repeat, the head of OsciFormer with the best dev likelihood.
CHOSEN_HEAD = "osciformer_chosen"
_HEADS = ("osciformer", "osciformer_softplus", "osciformer_decay")
# 97.5 % quantiles of Student's t by degrees of freedom, for the few repeats there are.
_STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a sample.

    Attributes:
        mean: Mean.
        sd: Standard deviation (n - 1), or None for a single number.
        count: Size of the sample.
    """

    mean: float
    sd: float | None
    count: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Return the spread of some numbers, at least one.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0])
            Spread(mean=2.0, sd=1.0, count=3)
        """
        sd = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), sd, len(numbers))


@dataclass(frozen=True)
class Difference:
    """How much better the reference is than another model, repeat by repeat.

    Attributes:
        mean: Mean difference, positive where the reference is better.
        error: Its standard error over repeats, or None for a single one.
        count: Repeats that both have.
    """

    mean: float
    error: float | None
    count: int

    @property
    def is_within_spread(self) -> bool:
        """Whether zero lies within the 95 % interval of Student's t."""
        if self.error is None:
            return True
        quantile = _STUDENT[min(self.count - 1, len(_STUDENT) - 1)]
        return abs(self.mean) <= quantile * self.error


def good_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the cells that did not fail, and those in which a head of OsciFormer is chosen."""
    good = [row for row in rows if row["error"] is None]
    return good + _chosen_heads(good)


def _chosen_heads(rows: Sequence[Row]) -> list[Row]:
    found = []
    keys = dict.fromkeys((row["dataset"], row["repeat"]) for row in rows if row["model"] in _HEADS)
    for dataset, repeat in keys:
        heads = [
            row
            for row in rows
            if (row["dataset"], row["repeat"]) == (dataset, repeat) and row["model"] in _HEADS
        ]
        # One head alone is no choice.
        if len(heads) == len(_HEADS):
            best = max(heads, key=lambda row: row["dev_ll"])
            found.append({**best, "model": CHOSEN_HEAD, "head_of": best["model"]})
    return found


def by_model(rows: Sequence[Row], dataset: str) -> dict[str, dict[int, Row]]:
    """Return the cells of a data set by model and repeat."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["dataset"] == dataset:
            found.setdefault(row["model"], {})[row["repeat"]] = row
    return found


def spread_of(cells: dict[int, Row], key: str) -> Spread | None:
    """Return the spread of a score over repeats, or None where no cell has it."""
    numbers = [cell[key] for cell in cells.values() if cell.get(key) is not None]
    return Spread.of(numbers) if numbers else None


def difference(
    reference: dict[int, Row], other: dict[int, Row], key: str, *, is_constant: bool
) -> Difference | None:
    """Return the paired difference of a score; None without a common repeat.

    Args:
        reference: Cells of the reference by repeat.
        other: Cells of the other model.
        key: The score.
        is_constant: Whether the other model is the same at all repeats, and has one cell.
    """
    if is_constant and other:
        (single,) = list(other.values())[:1]
        other = dict.fromkeys(reference, single)
    common = [number for number in reference if number in other]
    if not common:
        return None
    sign = 1.0 if SCORES[key] else -1.0
    values = [sign * (reference[n][key] - other[n][key]) for n in common]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Difference(statistics.fmean(values), error, len(values))


def differences(
    rows: Sequence[Row], dataset: str, key: str = "ll_micro", *, reference: str = REFERENCE
) -> dict[str, Difference]:
    """Return how much better a reference is than each other model of a data set.

    Args:
        rows: Cells.
        dataset: The data set.
        key: The score.
        reference: Name of a model.
    """
    cells = by_model(rows, dataset)
    of_reference = cells.get(reference)
    if not of_reference:
        return {}
    found = {}
    for name, others in cells.items():
        if name == reference:
            continue
        entry = difference(of_reference, others, key, is_constant=is_constant(name, dataset))
        if entry is not None:
            found[name] = entry
    return found


def is_random(name: str) -> bool:
    """Return whether a row of the table depends on a seed."""
    return name == CHOSEN_HEAD or find_model(name).is_random


def is_constant(name: str, dataset: str) -> bool:
    """Return whether all repeats of a row would be alike, so that there is one."""
    return TASKS[dataset].repeat == "seed" and not is_random(name)


def kind_of(name: str) -> str:
    """Return what a row is: `truth`, `trivial`, `classical` or `neural`."""
    return "neural" if name == CHOSEN_HEAD else find_model(name).kind


def title_of(name: str) -> str:
    """Return the name of a row in tables."""
    return "OsciFormer, head by dev" if name == CHOSEN_HEAD else find_model(name).title


def best_of(cells: dict[str, dict[int, Row]], key: str, kinds: Sequence[str]) -> str | None:
    """Return the model with the best mean of a score among some kinds, or None.

    Those of which fewer runs have the score are left out, unless their runs would all be alike.
    """
    most = max((len(of_model) for of_model in cells.values()), default=0)
    means = {}
    for name, of_model in cells.items():
        spread = spread_of(of_model, key)
        if spread is None or kind_of(name) not in kinds:
            continue
        dataset = next(iter(of_model.values()))["dataset"]
        if spread.count == most or is_constant(name, dataset):
            means[name] = spread.mean if SCORES[key] else -spread.mean
    return max(means, key=lambda name: means[name]) if means else None
