"""Multinomial logistic regression with a quadratic penalty, its strength found by folds."""

from __future__ import annotations

import numpy as np

from osciformer._optional import need
from osciformer._types import Float, Int
from osciformer.resonators.calibration import log_softmax
from osciformer.resonators.ridge import Targets

STRENGTHS = 10.0 ** np.arange(1.5, -3.1, -0.5)
NUM_FOLDS = 5
_MOST_STEPS = 100
_TOLERANCE = 1e-5  # of the gradient of the mean loss


def minimise(
    columns: Float[np.ndarray, "n r"],
    targets: Targets,
    strength: float,
    start: Float[np.ndarray, "r+1 C"],
) -> Float[np.ndarray, "r+1 C"]:
    """Return the coefficients of least loss, the intercepts last, by L-BFGS."""
    assert targets.classes is not None
    hits = np.eye(start.shape[1])[targets.classes]
    share = (targets.weight / len(columns))[:, None]
    penalty = strength / len(columns)

    def loss_and_slope(flat: np.ndarray) -> tuple[float, np.ndarray]:
        unknowns = flat.reshape(start.shape)
        logs = log_softmax(columns @ unknowns[:-1] + unknowns[-1])
        error = share * (np.exp(logs) - hits)
        slope = np.vstack((columns.T @ error + penalty * unknowns[:-1], error.sum(axis=0)))
        loss = 0.5 * penalty * np.square(unknowns[:-1]).sum() - (share * hits * logs).sum()
        return float(loss), slope.ravel()

    # scikit-learn, which the estimators need anyway, brings it.
    found = need("scipy.optimize", extra="train").minimize(
        loss_and_slope,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": _MOST_STEPS, "gtol": _TOLERANCE, "ftol": 0.0},
    )
    result: np.ndarray = found.x.reshape(start.shape)
    return result


def folds_of(classes: Int[np.ndarray, "n"], generator: np.random.Generator) -> Int[np.ndarray, "n"]:
    """Return the fold of each series, classes in equal parts."""
    folds = np.empty(len(classes), dtype=np.int64)
    order = np.lexsort((generator.random(len(classes)), classes))
    folds[order] = np.arange(len(classes)) % NUM_FOLDS
    return folds


def fit_logistic(
    columns: Float[np.ndarray, "n r"], targets: Targets, generator: np.random.Generator
) -> tuple[float, Float[np.ndarray, "r+1 C"], Float[np.ndarray, "n C"]]:
    """Return the best strength, its coefficients, and scores of each fold under all others.

    Strengths fall until the loss of the folds rises; each fit starts from the one before.
    """
    assert targets.classes is not None
    folds = folds_of(targets.classes, generator)
    zero = np.zeros((columns.shape[1] + 1, targets.values.shape[1]))
    fits, best = [zero] * NUM_FOLDS, (np.inf, 0.0, zero, targets.values)
    for strength in STRENGTHS:
        scores = np.empty_like(targets.values)
        for fold in range(NUM_FOLDS):
            is_in = folds != fold
            fits[fold] = minimise(columns[is_in], targets.take(is_in), strength, fits[fold])
            scores[~is_in] = columns[~is_in] @ fits[fold][:-1] + fits[fold][-1]
        (loss,) = targets.losses(scores[None])
        if loss >= best[0]:
            break
        best = loss, strength, np.mean(fits, axis=0), scores
    _, strength, start, scores = best
    return float(strength), minimise(columns, targets, strength, start), scores
