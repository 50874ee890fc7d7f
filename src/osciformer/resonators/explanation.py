"""What a linear model on named features looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from osciformer._types import Float
from osciformer.resonators.families import FeatureName


def heaviest(
    names: Sequence[FeatureName],
    effects: Float[np.ndarray, "P K"],
    sizes: Float[np.ndarray, "P K"],
    outputs: Sequence[Any],
    top: int,
) -> list[dict[str, Any]]:
    """Return the features of the largest sizes of each output, as rows of a table."""
    rows = []
    for number, output in enumerate(outputs):
        order = np.argsort(-sizes[:, number], kind="stable")[:top]
        for place in order[sizes[order, number] > 0]:
            name = names[place]
            rows.append(
                {
                    "output": output,
                    "feature": str(name),
                    "family": name.family,
                    "variable": " + ".join(name.variables),
                    "period": name.period,
                    "q": name.q,
                    "statistic": name.statistic,
                    "weight": float(effects[place, number]),
                    "importance": float(sizes[place, number]),
                }
            )
    return rows


def sum_importance(
    names: Sequence[FeatureName], sizes: Float[np.ndarray, "P K"]
) -> list[dict[str, Any]]:
    """Return the sum of sizes by variable and period, in parts of 1, the largest first.

    A feature of several variables counts for each in equal parts.
    """
    total: dict[tuple[str, float | None], float] = {}
    for name, size in zip(names, sizes.mean(axis=1), strict=True):
        for variable in name.variables or ("",):
            key = variable, name.period
            total[key] = total.get(key, 0.0) + float(size) / max(len(name.variables), 1)
    whole = sum(total.values()) or 1.0
    ranked = sorted(total.items(), key=lambda item: -item[1])
    return [
        {"variable": variable, "period": period, "importance": size / whole}
        for (variable, period), size in ranked
    ]
