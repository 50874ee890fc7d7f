"""What is predicted to happen next, for each of many sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer._text import check_choice
from osciformer._types import Float


@dataclass(frozen=True)
class NextEvents:
    """The event that follows the last one of each sequence.

    Times are numbers, dates (UTC) or durations, as those of the sequences; gaps are numbers in
    `time_unit`.

    Attributes:
        ids: Names of the sequences.
        last_time: When their last events came.
        type: Names of the likeliest types.
        type_probability: Probability of each type, whenever the event comes.
        median_gap: After which the event has come with probability 1/2; the horizon if that is not
            reached.
        mean_gap: Expected gap, given that the event comes before the horizon.
        median_time: `last_time` and the median gap later.
        mean_time: `last_time` and the mean gap later.
        survival: Probability that no event comes before the horizon.
        type_names: Names of the K types.
        horizon: Largest gap that was considered.
        time_unit: Unit of the gaps.
    """

    ids: np.ndarray
    last_time: np.ndarray
    type: np.ndarray
    type_probability: Float[np.ndarray, "n K"]
    median_gap: Float[np.ndarray, "n"]
    mean_gap: Float[np.ndarray, "n"]
    median_time: np.ndarray
    mean_time: np.ndarray
    survival: Float[np.ndarray, "n"]
    type_names: tuple[str, ...]
    horizon: float
    time_unit: str

    def __len__(self) -> int:
        return len(self.ids)

    def columns(self, *, id: str = "id") -> dict[str, np.ndarray]:
        """Return the predictions as columns by name, a row per sequence.

        Args:
            id: Name of the column of ids.
        """
        names = ("last_time", "type", "median_time", "mean_time", "median_gap", "mean_gap")
        chances = {
            f"probability_{name}": self.type_probability[:, number]
            for number, name in enumerate(self.type_names)
        }
        return {
            id: self.ids,
            **{name: getattr(self, name) for name in (*names, "survival")},
            **chances,
        }

    def to_frame(self, library: str = "pandas", *, id: str = "id") -> Any:
        """Return the predictions as a table.

        Args:
            library: `pandas`, `polars` or `pyarrow`: whose table to return.
            id: Name of the column of ids.
        """
        check_choice("library", library, ("pandas", "polars", "pyarrow"))
        pa = need("pyarrow", extra="data")
        table = pa.table({name: pa.array(item) for name, item in self.columns(id=id).items()})
        if library == "pandas":
            need("pandas", extra="data")
            return table.to_pandas()
        return need("polars", extra="data").from_arrow(table) if library == "polars" else table
