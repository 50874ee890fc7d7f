"""One series, as plain attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from osciformer._types import Float


@dataclass(frozen=True)
class SingleSeries:
    """One series of an `IrregularSeries`; its arrays are views.

    Attributes:
        id: Its name.
        times: Observation times [N], float64.
        values: Values [N, F], float32; NaN is a missing one.
        static: Static features [S], or None.
        label: Its class, its target or its targets [K], or None.
    """

    id: Any
    times: Float[np.ndarray, "N"]
    values: Float[np.ndarray, "N F"]
    static: Float[np.ndarray, "S"] | None = None
    label: Any = None

    def __len__(self) -> int:
        return len(self.times)
