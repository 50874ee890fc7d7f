"""Ridge regression from a kernel or a Gram matrix, judged by leaving out each series in turn.

With weights s of the series, K the kernel centred by them, S = diag(s), and the strength a,
c = (S^1/2 K S^1/2 + a I)^-1 S^1/2 (y - mean). The residual of a series under the model of all the
others is its residual divided by one minus its leverage, exactly; the mean is part of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from osciformer._types import Float, Int
from osciformer.resonators.calibration import smooth_hits, temperature_losses
from osciformer.resonators.gaussian import sharpen

STRENGTHS = 10.0 ** np.arange(4.0, -6.1, -0.5)
_GAIN = 5e-3  # part by which an alternative must be better: lines come first
# Least weight of a series beside a mean of 1: what is left out cannot have none.
_LEAST_WEIGHT = 1e-8
_LEAST_REST = 1e-10  # one minus the leverage, of a series that nothing else tells about


@dataclass(frozen=True)
class Targets:
    """What to learn: numbers, the classes that they stand for if any, and weights of mean 1."""

    values: Float[np.ndarray, "n K"]
    classes: Int[np.ndarray, "n"] | None
    weight: Float[np.ndarray, "n"]

    @classmethod
    def of(cls, labels: np.ndarray, num_classes: int, weight: Any = None) -> Targets:
        """Return targets of class numbers [n], one against the rest, or of numbers [n, K]."""
        weight = np.ones(len(labels)) if weight is None else np.asarray(weight, dtype=np.float64)
        weight = np.maximum(weight / weight.mean(), _LEAST_WEIGHT)
        if num_classes:
            return cls(2.0 * np.eye(num_classes)[labels] - 1.0, labels, weight)
        return cls(np.asarray(labels, dtype=np.float64), None, weight)

    def take(self, index: Any) -> Targets:
        """Return those of some series."""
        classes = None if self.classes is None else self.classes[index]
        return Targets(self.values[index], classes, self.weight[index])

    @property
    def mean(self) -> Float[np.ndarray, "K"]:
        """The weighted mean."""
        found: np.ndarray = np.average(self.values, axis=0, weights=self.weight)
        return found

    def each_loss(self, scores: Float[np.ndarray, "A n K"]) -> Float[np.ndarray, "A n"]:
        """Return the squared error, or the log loss at the best temperature, of each series."""
        if self.classes is None:
            found: np.ndarray = np.square(scores - self.values).mean(axis=2)
            return found
        hits = smooth_hits(self.classes, self.values.shape[1])
        return temperature_losses(scores, hits, self.weight)[1]

    def losses(self, scores: Float[np.ndarray, "A n K"]) -> Float[np.ndarray, "A"]:
        """Return the mean loss of alternatives."""
        found: np.ndarray = self.each_loss(scores) @ self.weight / self.weight.sum()
        return found


class DualFit(NamedTuple):
    """A fit from a kernel: coefficients of series, and scores of each under all others."""

    strength: float
    duals: Float[np.ndarray, "n K"]
    left_out: Float[np.ndarray, "n K"]


class PrimalFit(NamedTuple):
    """A fit from a Gram matrix: coefficients of columns, and scores of a sample left out."""

    strength: float
    coefficients: Float[np.ndarray, "P K"]
    left_out: Float[np.ndarray, "m K"]


def center_kernel(
    kernel: Float[np.ndarray, "n n"], weight: Float[np.ndarray, "n"]
) -> Float[np.ndarray, "n n"]:
    """Return S^1/2 K S^1/2 of the kernel K of columns without their weighted means."""
    mean, root = kernel @ weight / weight.sum(), np.sqrt(weight)
    center = kernel - mean
    center -= (mean - weight @ mean / weight.sum())[:, None]
    center *= root
    center *= root[:, None]
    return center


def leave_out(
    kernel: Float[np.ndarray, "n n"], targets: Targets, strengths: Iterable[float]
) -> Float[np.ndarray, "A n K"]:
    """Return scores of each series under the model of all others, for each strength.

    `kernel` is centred.
    """
    spectrum, basis = np.linalg.eigh(kernel)
    spectrum = np.maximum(spectrum, 0.0)
    root, strength = np.sqrt(targets.weight)[:, None], np.asarray(strengths)[:, None]
    inner = basis.T @ (root * (targets.values - targets.mean))
    kept = strength / (spectrum + strength)  # [A, n]
    residual = basis @ (kept[:, :, None] * inner)
    rest = (basis**2 @ kept.T).T - targets.weight / targets.weight.sum()
    return _undo(residual, rest[:, :, None], root, targets)


def _undo(residual: Any, rest: Any, root: np.ndarray, targets: Targets) -> np.ndarray:
    found: np.ndarray = targets.values - residual / (root * np.maximum(rest, _LEAST_REST))
    return found


class Choice(NamedTuple):
    """The best strength for a kernel, or for the Gaussian kernel made of it."""

    strength: float
    is_gaussian: bool
    losses: Float[np.ndarray, "n"]  # of series left out, times their weights

    @classmethod
    def of(
        cls, kernel: Float[np.ndarray, "n n"], targets: Targets, *, is_gaussian: bool = False
    ) -> Choice:
        """Return the choice for a kernel that is not centred."""
        kernel = center_kernel(sharpen(kernel) if is_gaussian else kernel, targets.weight)
        losses = targets.each_loss(leave_out(kernel, targets, STRENGTHS)) * targets.weight
        best = int(losses.mean(axis=1).argmin())
        return cls(float(STRENGTHS[best]), is_gaussian, losses[best])

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.losses.mean())

    def is_clearly_better(self, than: Choice) -> bool:
        """Return whether the loss is lower by more than the standard error of the difference."""
        gain = than.losses - self.losses
        return bool(gain.mean() > gain.std() / np.sqrt(max(len(gain) - 1, 1)))


def choose_groups(kernels: Float[np.ndarray, "G n n"], targets: Targets) -> tuple[int, ...]:
    """Return the groups of features, by their kernels, that tell most about series left out.

    It is the simplest choice that the best is not clearly better than, the first group alone before
    all others: on few series the best of many choices is the luckiest one.
    """
    numbers = range(len(kernels))
    subsets = [some for k in numbers for some in itertools.combinations(numbers, k + 1)]
    choices = [Choice.of(kernels[list(some)].mean(axis=0), targets) for some in subsets]
    best = min(choices, key=lambda choice: choice.loss)
    pairs = zip(subsets, choices, strict=True)
    return next(some for some, choice in pairs if not best.is_clearly_better(choice))


def is_better(loss: float, than: float) -> bool:
    """Return whether a less simple alternative is better, by more than a trifle."""
    return loss < (1.0 - _GAIN) * than


def around(strength: float) -> list[float]:
    """Return strengths to try on more series than those that it was found with."""
    return [strength * 10.0**0.5, strength, strength * 10.0**-0.5]


def fit_kernel(
    kernel: Float[np.ndarray, "n n"], targets: Targets, strengths: Iterable[float]
) -> DualFit:
    """Return the fit with the best of a few strengths; `kernel` is centred."""
    root = np.sqrt(targets.weight)[:, None]
    aims = torch.from_numpy(root * (targets.values - targets.mean))
    best, loss = None, np.inf
    for strength in strengths:
        shifted = torch.from_numpy(kernel).clone()
        shifted.diagonal().add_(strength)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(shifted))
        duals = (inverse @ aims).numpy()
        share = targets.weight / targets.weight.sum()
        rest = strength * inverse.diagonal().numpy() - share
        left_out = _undo(strength * duals, rest[:, None], root, targets)
        (found,) = targets.losses(left_out[None])
        if best is None or found < loss:
            best, loss = DualFit(float(strength), duals, left_out), found
    assert best is not None
    return best


class Gram:
    """Sums over series of products of columns, from blocks of rows."""

    def __init__(self, width: int, num_targets: int) -> None:
        self.products = np.zeros((width, width))
        self.aims = np.zeros((width, num_targets))
        self.sums = np.zeros(width)

    def add(self, columns: Float[np.ndarray, "m P"], targets: Targets) -> None:
        """Take more series into account."""
        weighted = columns * targets.weight[:, None]
        self.products += weighted.T @ columns
        self.aims += weighted.T @ targets.values
        self.sums += weighted.sum(axis=0)

    def fit(
        self,
        targets: Targets,
        sample: Float[np.ndarray, "m P"],
        index: Int[np.ndarray, "m"],
        strengths: Iterable[float],
    ) -> PrimalFit:
        """Return the fit with the best of a few strengths, judged by a sample of the series."""
        total, mean = targets.weight.sum(), self.sums / targets.weight.sum()
        products = torch.from_numpy(self.products - np.outer(mean, self.sums))
        aims = torch.from_numpy(self.aims - np.outer(self.sums, targets.mean))
        center = torch.from_numpy(sample - mean)
        part, best, loss = targets.take(index), None, np.inf
        for strength in strengths:
            shifted = products.clone()
            shifted.diagonal().add_(strength)
            factor = torch.linalg.cholesky(shifted)
            coefficients = torch.cholesky_solve(aims, factor)
            half = torch.linalg.solve_triangular(factor, center.T, upper=False)
            leverage = part.weight * (half.square().sum(dim=0).numpy() + 1.0 / total)
            residual = part.values - targets.mean - (center @ coefficients).numpy()
            left_out = _undo(residual, 1.0 - leverage[:, None], np.ones(1), part)
            (found,) = part.losses(left_out[None])
            if best is None or found < loss:
                best, loss = PrimalFit(float(strength), coefficients.numpy(), left_out), found
        assert best is not None
        return best
