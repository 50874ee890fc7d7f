"""Checks of events at the door, each with an error that names the sequence and the fix."""

from __future__ import annotations

from typing import Any

import numpy as np

from osciformer._types import Float, Int
from osciformer.data.ragged import as_float_array, locate


def whole_numbers(types: Any, count: int) -> Int[np.ndarray, "T"]:
    """Return types as int64, one for each of so many times."""
    types = np.asarray(types)
    if types.size == 0:
        types = types.astype(np.int64)
    if types.dtype.kind not in "iu":
        raise TypeError(
            f"types must be integers from 0; got {types.dtype}. EventSequences.from_frame reads "
            "types that are text"
        )
    if types.shape != (count,):
        raise ValueError(f"types must be [{count}], one per time; got {list(types.shape)}")
    return np.ascontiguousarray(types, dtype=np.int64)


def check_range(
    types: Int[np.ndarray, "T"], num_types: int, offsets: Int[np.ndarray, "n+1"], ids: np.ndarray
) -> None:
    """Refuse types that are negative, or beyond the last one."""
    wrong = (types < 0) | (types >= num_types)
    if wrong.any():
        row = int(np.argmax(wrong))
        sequence, step = locate(offsets, row)
        raise ValueError(
            f"types must be from 0 to {num_types - 1}; event {step} of sequence "
            f"{ids[sequence]!s} has type {types[row]}. Types count from 0; pass a larger num_types "
            "if there are more of them"
        )


def window_edges(name: str, edges: Any, count: int) -> Float[np.ndarray, "n"]:
    """Return one edge of the windows of so many sequences, as finite float64."""
    edges = as_float_array(name, edges, np.float64)
    if edges.shape != (count,) or not np.isfinite(edges).all():
        raise ValueError(f"{name} must be [{count}] and finite; got {list(edges.shape)}")
    return edges


def check_windows(
    times: Float[np.ndarray, "T"],
    offsets: Int[np.ndarray, "n+1"],
    ids: np.ndarray,
    starts: Float[np.ndarray, "n"] | None,
    ends: Float[np.ndarray, "n"] | None,
) -> None:
    """Refuse windows that leave out events, or that end before they start."""
    count = len(offsets) - 1
    some = np.flatnonzero(np.diff(offsets) > 0)
    latest_start = np.full(count, np.inf) if ends is None else ends.copy()
    earliest_end = np.full(count, -np.inf) if starts is None else starts.copy()
    latest_start[some] = times[offsets[some]]
    earliest_end[some] = times[offsets[some + 1] - 1]
    wrong = (
        ("starts", starts, np.zeros(count, bool) if starts is None else starts > latest_start),
        ("ends", ends, np.zeros(count, bool) if ends is None else ends < earliest_end),
    )
    for name, edges, is_wrong in wrong:
        if edges is not None and is_wrong.any():
            where = int(np.argmax(is_wrong))
            raise ValueError(
                f"the window of a sequence must hold its events; {name} of sequence "
                f"{ids[where]!s} is {edges[where]:g}, which leaves some outside, or ends it "
                "before it starts"
            )
