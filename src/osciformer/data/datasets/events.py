"""Sequences of events in continuous time, each with a type.

A split is an Arrow table with one row an event: `seq_id` (from 0), `time` and `type` (from 0), in
time order inside a sequence, the rows of a sequence together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer.data.dataset_info import Request
from osciformer.data.errors import UnreadableFileError


def load_copy(request: Request) -> Any:
    """Return the events of one split, and of one fold where there are folds."""
    table = _read_copy(request)
    compute = need("pyarrow.compute", extra="data")
    if request.fold is not None:
        table = table.filter(compute.equal(table["fold"], request.fold)).drop_columns("fold")
    if "split" in table.column_names:
        table = table.filter(compute.equal(table["split"], request.split)).drop_columns("split")
    return table


def load_stackoverflow_copy(request: Request) -> Any:
    """Return the sequences that are, or are not, in the test part of a fold."""
    if request.fold is None:
        raise ValueError("fold must be one of 1 to 5, got None")
    table = _read_copy(request)
    bit = table["test_fold_mask"].to_numpy() >> (request.fold - 1) & 1
    table = table.filter(need("pyarrow", extra="data").array(bit == (request.split == "test")))
    return table.drop_columns(["split", "test_fold_mask"])


def _read_copy(request: Request) -> Any:
    (path,) = request.files.values()
    return need("pyarrow.parquet", extra="data").read_table(path)


def load_text(request: Request) -> Any:
    """Return the events of two text files: a line a sequence, one with types, one with times.

    The types count from 1 in the files.
    """
    key = f"{request.fold}-{request.split}.txt"
    types = _read_lines(request.files[f"event-{key}"])
    times = _read_lines(request.files[f"time-{key}"])
    if len(types) != len(times):
        raise UnreadableFileError(
            f"event-{key} has {len(types)} sequences, time-{key} has {len(times)}"
        )
    for number, (some, others) in enumerate(zip(types, times, strict=True), start=1):
        if len(some) != len(others):
            raise UnreadableFileError(
                f"line {number} has {len(some)} types in event-{key} "
                f"and {len(others)} times in time-{key}"
            )
    return _table(times, [line - 1 for line in types])


def _read_lines(path: Path) -> list[np.ndarray]:
    with path.open(encoding="utf-8") as stream:
        lines = [line.split() for line in stream]
    try:
        return [np.array(line, dtype=np.float64) for line in lines if line]
    except ValueError as error:
        raise UnreadableFileError(f"{path}: {error}") from error


def load_json(request: Request) -> Any:
    """Return the events of one JSON file in the form of EasyTPP, a list or a line a sequence."""
    path = request.files[f"{request.split}.json"]
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            sequences = json.loads(text)
        else:
            sequences = [json.loads(line) for line in text.splitlines() if line.strip()]
        times = [np.array(s["time_since_start"], dtype=np.float64) for s in sequences]
        types = [np.array(s["type_event"], dtype=np.float64) for s in sequences]
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFileError(
            f"{path} must hold sequences with time_since_start and type_event ({error})"
        ) from error
    return _table(times, types)


def _table(times: Sequence[np.ndarray], types: Iterable[np.ndarray]) -> Any:
    pyarrow = need("pyarrow", extra="data")
    lengths = [len(sequence) for sequence in times]
    return pyarrow.table(
        {
            "seq_id": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
            "time": np.concatenate([np.empty(0), *times]),
            "type": np.concatenate([np.empty(0), *types]).astype(np.int16),
        }
    )
