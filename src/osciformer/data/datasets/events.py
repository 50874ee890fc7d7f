"""Sequences of events in continuous time, each with a type.

A split is an Arrow table with a row per event: `seq_id` (from 0), `time` and `type` (from 0), in
time order inside a sequence, the rows of a sequence together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer.data.dataset_info import Request
from osciformer.data.errors import UnreadableFileError


def load_copy(request: Request) -> Any:
    """Return the events of one split, and of one fold where there are folds."""
    pa, compute = need("pyarrow", extra="data"), need("pyarrow.compute", extra="data")
    (path,) = request.files.values()
    table = need("pyarrow.parquet", extra="data").read_table(path)
    if "test_fold_mask" in table.column_names:  # bit k: the sequence is a test one in fold k + 1
        assert request.fold is not None  # the registry refuses a request without
        bit = table["test_fold_mask"].to_numpy() >> (request.fold - 1) & 1
        table = table.filter(pa.array(bit == (request.split == "test")))
        return table.drop_columns(["split", "test_fold_mask"])
    for name, wanted in (("fold", request.fold), ("split", request.split)):
        if wanted is not None and name in table.column_names:
            table = table.filter(compute.equal(table[name], wanted)).drop_columns(name)
    return table


def load_text(request: Request) -> Any:
    """Return the events of two text files, a line per sequence: types, from 1, and times."""
    key = f"{request.fold}-{request.split}.txt"
    types, times = (_read_lines(request.files[f"{what}-{key}"]) for what in ("event", "time"))
    if len(types) != len(times):
        found = f"event-{key} has {len(types)} sequences, time-{key} has {len(times)}"
        raise UnreadableFileError(found)
    for number, (some, others) in enumerate(zip(types, times, strict=True), start=1):
        if len(some) != len(others):
            found = f"{len(some)} types in event-{key} and {len(others)} times in time-{key}"
            raise UnreadableFileError(f"line {number} has {found}")
    return _table(times, [line - 1 for line in types])


def _read_lines(path: Path) -> list[np.ndarray]:
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [np.array(line.split(), dtype=np.float64) for line in lines if line.strip()]
    except ValueError as error:
        raise UnreadableFileError(f"{path}: {error}") from error


def load_json(request: Request) -> Any:
    """Return the events of a JSON file in the form of EasyTPP: a list, or a line per sequence."""
    path = request.files[f"{request.split}.json"]
    text = path.read_text(encoding="utf-8")
    lines = [text] if text.lstrip().startswith("[") else text.splitlines()
    try:
        items = [json.loads(line) for line in lines if line.strip()]
        sequences = items[0] if items and isinstance(items[0], list) else items
        times = [np.array(s["time_since_start"], dtype=np.float64) for s in sequences]
        types = [np.array(s["type_event"], dtype=np.float64) for s in sequences]
        return _table(times, types)
    except (KeyError, TypeError, ValueError) as error:
        wanted = f"sequences with time_since_start and type_event ({error})"
        raise UnreadableFileError(f"{path} must hold {wanted}") from error


def _table(times: list[np.ndarray], types: list[np.ndarray]) -> Any:
    lengths = [len(sequence) for sequence in times]
    columns = {
        "seq_id": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "time": np.concatenate([np.empty(0), *times]),
        "type": np.concatenate([np.empty(0), *types]).astype(np.int16),
    }
    return need("pyarrow", extra="data").table(columns)
