"""How much a network counts beside another model, by series that neither was fitted to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from osciformer._types import Float, Int
from osciformer.resonators.calibration import log_softmax

#: Weights of the network that are compared.
WEIGHTS = np.linspace(0.0, 1.0, 11)
# Few series cannot tell, and they flatter a network that stopped where it did best on them; then
# it is best to stay near the model that needs few.
_PRIOR = np.append(0.75, np.full(10, 0.025))
_LEAST_ERROR = 1e-12  # of scaled targets, squared


def mix(
    network: Float[np.ndarray, "n K"], other: Float[np.ndarray, "n K"], weight: float
) -> Float[np.ndarray, "n K"]:
    """Return the weighted mean of outputs: targets, or logits, whose means mix log-probabilities.

    Example:
        >>> mix(np.array([[2.0]]), np.array([[4.0]]), 0.25)
        array([[3.5]])
    """
    return weight * network.astype(np.float64) + (1.0 - weight) * other


def weigh_network(
    network: Float[np.ndarray, "n K"],
    other: Float[np.ndarray, "n K"],
    log_likelihood: Callable[[Float[np.ndarray, "n K"]], float],
) -> float:
    """Return the weight of a network: the posterior mean over `WEIGHTS`, to two digits.

    Three quarters of the prior are on 0, the other model alone, and the rest is even; the
    likelihood is that of the mixed outputs. Without any series it is the mean of the prior.

    Args:
        network: Outputs of the network for series that it was not fitted to.
        other: Those of the other model.
        log_likelihood: That of the labels of these series, given outputs.
    """
    evidence = np.zeros(len(WEIGHTS))
    if len(network):
        evidence += [log_likelihood(mix(network, other, weight)) for weight in WEIGHTS]
    posterior = _PRIOR * np.exp(evidence - evidence.max())
    return round(float(WEIGHTS @ posterior / posterior.sum()), 2)


def class_log_likelihood(
    logits: Float[np.ndarray, "n C"], classes: Int[np.ndarray, "n"], weight: Float[np.ndarray, "n"]
) -> float:
    """Return the log-likelihood of classes."""
    found = log_softmax(logits)[np.arange(len(classes)), classes]
    count, share = _count(weight)
    return count * float(share @ found)


def target_log_likelihood(
    outputs: Float[np.ndarray, "n K"],
    targets: Float[np.ndarray, "n K"],
    weight: Float[np.ndarray, "n"],
) -> float:
    """Return the log-likelihood of targets with normal errors of the variance that fits best.

    The targets of a series may depend on each other, so that they count as one.
    """
    count, share = _count(weight)
    error = float(share @ np.square(outputs - targets).mean(axis=1))
    return -0.5 * count * float(np.log(max(error, _LEAST_ERROR)))


def _count(weight: Float[np.ndarray, "n"]) -> tuple[float, Float[np.ndarray, "n"]]:
    """Return how many series of equal weight say as much (Kish), and the share of each."""
    weight = weight.astype(np.float64)
    share = weight / max(weight.sum(), 1e-300)
    return 1.0 / max(float(share @ share), 1e-300) if share.any() else 0.0, share
