"""A picture of the resonators that matter most for one prediction."""

from __future__ import annotations

from typing import Any

import numpy as np


def plot_resonators(model: Any, X: Any, *, top: int = 3, **options: Any) -> Any:
    """Return a figure of how oscillators respond along one series, for its heaviest variables.

    Args:
        model: A resonator model, or one that is joined with such.
        X: One series, such as `X[3:4]`.
        top: Number of variables, those that add most to this prediction.
        options: Others of `ResonatorEstimator.response`, such as `periods` and `q`.
    """
    resonator = getattr(model, "resonator_", None) or model
    if not hasattr(resonator, "response"):
        name = type(model).__name__
        raise TypeError(
            f"model must have resonators; this {name} has none. Fit one with resonators"
        )
    response = resonator.response(X, **options)
    sizes = dict.fromkeys(response.variables, 0.0)
    for row in resonator.importance(X):
        if row["variable"] in sizes:
            sizes[row["variable"]] += row["importance"]
    order = np.argsort([-size for size in sizes.values()], kind="stable")[:top]
    names = tuple(response.variables[place] for place in order)
    return response._replace(variables=names, amplitude=response.amplitude[:, order]).plot()
