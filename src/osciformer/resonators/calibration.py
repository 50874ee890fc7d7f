"""Probabilities from scores of series that were left out: a temperature, and a bias per class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from osciformer._types import Float, Int

# Weight of the prior of a bias: as much as one series says.
_BIAS_STRENGTH = 1.0
_MOST_STEPS = 50
_TOLERANCE = 1e-10


class Calibration(NamedTuple):
    """Logits are `scale * scores + bias`."""

    scale: float
    bias: Float[np.ndarray, "C"]

    def logits(self, scores: Float[np.ndarray, "n C"]) -> Float[np.ndarray, "n C"]:
        """Return logits, whose softmax are probabilities."""
        return self.scale * scores + self.bias


def log_softmax(logits: Float[np.ndarray, "*B C"]) -> Float[np.ndarray, "*B C"]:
    """Return the logarithms of probabilities."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def smooth_hits(classes: Int[np.ndarray, "n"], num_classes: int) -> Float[np.ndarray, "n C"]:
    """Return one-hot targets, less a little, as if one more series had any class (Platt 1999).

    So the temperature stays finite even if all scores are right.
    """
    part = 1.0 / (len(classes) + 2.0)
    return (1.0 - part) * np.eye(num_classes)[classes] + part / num_classes


def temperature_losses(
    scores: Float[np.ndarray, "A n C"],
    hits: Float[np.ndarray, "n C"],
    weight: Float[np.ndarray, "n"],
) -> tuple[Float[np.ndarray, "A"], Float[np.ndarray, "A n"]]:
    """Return the best scale of each of A alternatives and its log losses, by Newton's method."""
    share = weight / weight.sum()
    spread = np.sqrt(np.einsum("i,aik->a", share, scores**2) / scores.shape[2])
    scores = scores / np.maximum(spread, 1e-300)[:, None, None]
    aim = np.einsum("i,aik,ik->a", share, scores, hits)
    log_scale = np.zeros(len(scores))
    for _ in range(12):
        scale = np.exp(log_scale)
        chance = np.exp(log_softmax(scale[:, None, None] * scores))
        mean = (chance * scores).sum(axis=2)
        slope = scale * (mean @ share - aim)
        bend = scale**2 * (((chance * scores**2).sum(axis=2) - mean**2) @ share)
        # In the logarithm the loss need not be convex; |slope| keeps the steps downhill.
        step = slope / np.maximum(bend + np.maximum(slope, 0.1 * np.abs(slope)), 1e-12)
        log_scale = np.clip(log_scale - np.clip(step, -2.0, 2.0), -12.0, 12.0)
        if np.abs(slope).max() < 1e-6:
            break
    scale = np.exp(log_scale)
    logs = log_softmax(scale[:, None, None] * scores)
    losses = -np.einsum("aik,ik->ai", logs, hits)
    return scale / np.maximum(spread, 1e-300), losses


def calibrate(
    scores: Float[np.ndarray, "n C"], classes: Int[np.ndarray, "n"], weight: Float[np.ndarray, "n"]
) -> tuple[Calibration, float]:
    """Return the most likely calibration of scores, and its mean log loss."""
    count, num_classes = scores.shape
    hits = smooth_hits(classes, num_classes)
    (scale,), _ = temperature_losses(scores[None], hits, weight)
    unknowns = np.append(scale, np.zeros(num_classes))

    def loss_of(unknowns: np.ndarray) -> float:
        logs = log_softmax(unknowns[0] * scores + unknowns[1:])
        penalty = 0.5 * _BIAS_STRENGTH * np.square(unknowns[1:]).sum()
        return float(penalty - weight @ (hits * logs).sum(axis=1))

    loss = loss_of(unknowns)
    prior = np.append(1e-12, np.full(num_classes, _BIAS_STRENGTH))
    for _ in range(_MOST_STEPS):
        chance = np.exp(log_softmax(unknowns[0] * scores + unknowns[1:]))
        error, share = weight[:, None] * (chance - hits), weight[:, None] * chance
        slope = np.append((error * scores).sum(), error.sum(axis=0)) + prior * unknowns
        mean = (chance * scores).sum(axis=1, keepdims=True)
        bend = np.diag(np.append(0.0, share.sum(axis=0)) + prior)
        bend[1:, 1:] -= chance.T @ share
        bend[0, 0] += (share * (scores - mean) ** 2).sum()
        bend[0, 1:] = bend[1:, 0] = (share * (scores - mean)).sum(axis=0)
        step = np.linalg.solve(bend, slope)
        size = 1.0
        while size > 1e-6 and not loss_of(unknowns - size * step) <= loss:
            size *= 0.5
        candidate = unknowns - size * step
        if size <= 1e-6 or candidate[0] <= 0:
            break
        before, loss, unknowns = loss, loss_of(candidate), candidate
        if before - loss < _TOLERANCE * max(1.0, abs(loss)):
            break
    found = Calibration(float(unknowns[0]), unknowns[1:])
    logs = log_softmax(found.logits(scores))
    return found, float(-np.average(logs[np.arange(count), classes], weights=weight))
