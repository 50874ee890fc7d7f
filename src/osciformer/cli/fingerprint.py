"""By which a continued run knows its data again."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from osciformer.cli.tables import is_streamed

_ARRAYS = ("ids", "lengths", "times", "values", "types", "labels", "static", "starts", "ends")
_SLICE = 2**20  # numbers that are hashed at a time


def fingerprint(data: Any, labels: np.ndarray | None = None) -> dict[str, str]:
    """Return a hash of each array of series or events, by name, whatever format they came in.

    Labels that are given stand for those of the data. A table on disk is read once, part by part.

    Example:
        >>> from osciformer.data import IrregularSeries
        >>> one = IrregularSeries([0.0, 1.0], [[2.0], [3.0]], [0, 2], ids=["a"])
        >>> other = one.replace(values=one.values + 1)
        >>> first, second = fingerprint(one), fingerprint(other)
        >>> sorted(first), [name for name in first if first[name] != second[name]]
        (['ids', 'lengths', 'times', 'values'], ['values'])
    """
    hashes: dict[str, Any] = {}
    for chunk in data.chunks() if is_streamed(data) else (data,):
        for name in _ARRAYS:
            found = getattr(chunk, name, None)
            if found is not None and not (name == "labels" and labels is not None):
                _update(hashes.setdefault(name, hashlib.blake2b(digest_size=16)), name, found)
    if labels is not None:
        _update(hashes.setdefault("labels", hashlib.blake2b(digest_size=16)), "labels", labels)
    return {name: found.hexdigest() for name, found in hashes.items()}


def _update(found: Any, name: str, array: Any) -> None:
    flat = np.asarray(array).ravel()
    for start in range(0, len(flat), _SLICE):
        part = flat[start : start + _SLICE]
        if name == "ids" or part.dtype.kind in "OUS":
            text = "".join(f"{len(item)}:{item}" for item in map(str, part.tolist()))
            found.update(text.encode("utf-8", "surrogateescape"))
        else:
            numbers = part.astype(np.float64)
            numbers[np.isnan(numbers)] = np.nan  # which has many patterns of bits
            found.update(numbers.tobytes())
