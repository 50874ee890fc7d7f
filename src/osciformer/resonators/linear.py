"""Models of many columns that are linear in them, or in a Gaussian kernel of them.

Columns are standardised. Those of family b, p_b in all, share a weight w_b, so that the kernel of
two series is K = sum_b w_b Z_b Z_b' / p_b; a Gaussian one takes its distances from that. Groups of
families weigh the same, and the families of a group as the roots of their numbers of columns, so
that none drowns another. The error of each series under the model of all others has a closed form,
which chooses the groups, the kernel and the strength of the penalty, and whose scores make
probabilities that are calibrated without a second fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from osciformer._text import check_choice
from osciformer._types import Float, Int
from osciformer.resonators.calibration import calibrate
from osciformer.resonators.gaussian import Gaussian
from osciformer.resonators.logistic import fit_logistic
from osciformer.resonators.ridge import (
    STRENGTHS,
    Choice,
    Gram,
    Targets,
    around,
    center_kernel,
    choose_groups,
    fit_kernel,
    is_better,
    leave_out,
)

HEADS = ("auto", "ridge", "logistic")
#: Series on which groups of families are chosen.
CHOICE_SIZE = 600
#: Series on which kernels are compared, and which are landmarks.
SEARCH_SIZE = 1000
#: Series, at most, that judge kernel and strength and calibrate, if there are more than columns.
JUDGE_SIZE = 3000
#: Up to so many series, fewer than columns, the kernel of all pairs is inverted.
LARGEST_KERNEL = 10_000
_Map = Callable[[np.ndarray], np.ndarray]
_PLAIN = ("chosen", "strength", "loss", "num_classes")
_ARRAYS = ("families", "weights", "shares", "coefficients", "intercept")
# Rows or columns that are standardised at a time.
_BLOCK = 2048
# Kernels whose loss is above the least one's by this factor on a few series are not tried on all.
_CLOSE = 1.03
# Standardised values beyond this are cut off: one series must not decide a column.
_CLIP = 8.0


class Rows(Protocol):
    """A matrix [n, P] whose rows may be computed as they are needed."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def take(self, index: Any) -> Float[np.ndarray, "m P"]:
        """Return some rows: increasing positions, or `slice(None)` for all."""

    def blocks(self) -> Iterator[Float[np.ndarray, "m P"]]:
        """Yield all rows, in order."""


@dataclass(frozen=True)
class MatrixRows:
    """Rows that are in memory."""

    matrix: Float[np.ndarray, "n P"]

    def __len__(self) -> int:
        return len(self.matrix)

    def take(self, index: Any) -> Float[np.ndarray, "m P"]:
        """Return some rows."""
        return self.matrix[index]

    def blocks(self) -> Iterator[Float[np.ndarray, "m P"]]:
        """Yield all rows, in order."""
        return (self.matrix[part] for part in _parts(len(self.matrix)))


class Standardiser(NamedTuple):
    """Columns as `(x - center) / scale`, clipped; constant columns and NaN become 0."""

    center: Float[np.ndarray, "P"]
    scale: Float[np.ndarray, "P"]  # infinite for constant columns

    @classmethod
    def fit(cls, matrix: Float[np.ndarray, "m P"]) -> Standardiser:
        """Learn the means and spreads of columns."""
        center, scale = np.empty(matrix.shape[1]), np.empty(matrix.shape[1])
        for part in _parts(matrix.shape[1]):
            columns = matrix[:, part].astype(np.float64)
            count = np.maximum((~np.isnan(columns)).sum(axis=0), 1)
            center[part] = np.nansum(columns, axis=0) / count
            scale[part] = np.sqrt(np.nansum(np.square(columns - center[part]), axis=0) / count)
        is_constant = scale <= 1e-6 * np.abs(center) + 1e-30
        return cls(center, np.where(is_constant, np.inf, scale))

    def transform(
        self, matrix: Float[np.ndarray, "m P"], columns: Any = slice(None)
    ) -> Float[np.ndarray, "m p"]:
        """Return some standardised columns of a matrix, as float64."""
        scaled = np.array(matrix[:, columns], dtype=np.float64, order="C")
        scaled -= self.center[columns]
        scaled /= self.scale[columns]
        np.nan_to_num(scaled, copy=False)
        return np.clip(scaled, -_CLIP, _CLIP, out=scaled)


def _parts(count: int) -> Iterator[slice]:
    return (slice(k, min(k + _BLOCK, count)) for k in range(0, count, _BLOCK))


class LeftOut(NamedTuple):
    """What a model says of series that it was not fitted to."""

    places: Int[np.ndarray, "m"]  #: Their positions.
    outputs: Float[np.ndarray, "m K"]  #: Logits, or targets.


class _Fit(NamedTuple):
    """A linear map of columns, or of the kernel of landmarks, and its scores of series left out."""

    chosen: str
    strength: float
    coefficients: Float[np.ndarray, "P K"]
    intercept: Float[np.ndarray, "K"]
    places: Int[np.ndarray, "m"]
    left_out: Float[np.ndarray, "m K"]

    def loss(self, targets: Targets, places: Int[np.ndarray, "m"] | None = None) -> float:
        """Return the loss of series left out: all of them, or some."""
        places = self.places if places is None else places
        outputs = self.left_out[np.searchsorted(self.places, places)]
        return float(targets.take(places).losses(outputs[None])[0])


@dataclass
class LinearHead:
    """Ridge or logistic regression on families of columns, or on a Gaussian kernel of them.

    Args:
        families: Family of each column, numbered from 0.
        num_classes: Number of classes; 0 for regression.
        head: `ridge`; or, for classes, `logistic`, or `auto`: `ridge`, but of two classes whose
            features fit into memory that of the lower log loss.
        powers: For each family, the power of its columns' spread that they keep: 0 (all, if not
            given) for standardised columns; with more, columns that vary more count for more.
        groups: The group of each family; each is its own if not given.
        seed: Decides samples and folds.
    """

    families: Int[np.ndarray, "P"]
    num_classes: int = 0
    head: str = "auto"
    powers: Sequence[float] | None = None
    groups: Sequence[str] | None = None
    seed: int = 0
    chosen: str = field(init=False)  #: `ridge` or `logistic`.
    weights: Float[np.ndarray, "B"] = field(init=False)  #: Weight of each family.
    strength: float = field(init=False)  #: Strength of the penalty.
    loss: float = field(init=False)  #: Log loss or mean squared error of series left out.
    standardiser: Standardiser = field(init=False)  #: Of the columns.
    shares: Float[np.ndarray, "P"] = field(init=False)  #: Weight of each column in the kernel.
    gaussian: Gaussian | None = field(init=False, default=None)  #: The kernel, unless linear.
    #: Of standardised columns [P, K], or of the kernel with each landmark [m, K].
    coefficients: np.ndarray = field(init=False)
    intercept: Float[np.ndarray, "K"] = field(init=False)  #: Added to them.

    def __post_init__(self) -> None:
        check_choice("head", self.head, HEADS)
        if self.head == "logistic" and not self.num_classes:
            raise ValueError("head='logistic' is for classes; use head='ridge'")

    def choose(
        self, matrix: Float[np.ndarray, "m P"], labels: np.ndarray, weight: Any = None
    ) -> list[str]:
        """Return the groups of families that are worth their columns, judged by some series."""
        assert self.groups is not None
        self.standardiser = Standardiser.fit(matrix)
        weights, groups = self._weights(), np.asarray(self.groups)
        kernels = {}
        for name in dict.fromkeys(self.groups):
            own = weights * (groups == name)
            if own.any():
                self.shares = self._shares_of(own / own.sum())
                kernels[name] = self._kernel(matrix)
        names = list(kernels) or [self.groups[0]]
        if len(names) == 1:
            return names
        targets = Targets.of(labels, self.num_classes, weight)
        return [names[k] for k in choose_groups(np.stack(list(kernels.values())), targets)]

    def fit(self, rows: Rows, labels: np.ndarray, weight: Any = None) -> LeftOut:
        """Learn, and return what series get from the model of the others.

        Args:
            rows: The columns, in memory or computed part by part.
            labels: Class numbers [n], or targets [n, K].
            weight: Weight of each series [n].
        """
        count, generator = len(rows), np.random.default_rng(self.seed)
        if self.head == "logistic" and not isinstance(rows, MatrixRows):
            raise ValueError(
                "head='logistic' needs all features in memory, and those of "
                f"{count} series are too many; use head='ridge'"
            )
        targets = Targets.of(labels, self.num_classes, weight)
        places = np.sort(generator.permutation(count)[:JUDGE_SIZE])
        sample = rows.take(places)
        self.standardiser = Standardiser.fit(sample)
        few = np.sort(generator.permutation(len(places))[:SEARCH_SIZE])
        self.weights = self._weights()
        self.shares = self._shares_of(self.weights)
        kernel, part = self._kernel(sample[few]), targets.take(places[few])
        straight, curved = (Choice.of(kernel, part, is_gaussian=x) for x in (False, True))
        if len(few) == count:  # their losses are those of the final fits
            choices = [curved if curved.is_clearly_better(straight) else straight]
        else:
            least = min(straight.loss, curved.loss)
            choices = [choice for choice in (straight, curved) if choice.loss <= _CLOSE * least]
        loss = np.inf
        for choice in choices:
            self._use(choice, sample[few])
            fit = self._fit_ridge(rows, sample, places, targets, choice.strength)
            if is_better(fit.loss(targets), loss):
                best, found, loss = choice, fit, fit.loss(targets)
        self._use(best, sample[few])
        if self.head == "logistic" or (self.head == "auto" and self._may_be_logistic(rows)):
            other = self._fit_logistic(rows.take(slice(None)), targets, generator)
            # On the same series: a sample may be easier than all.
            if self.head == "logistic" or other.loss(targets, found.places) < loss:
                found = other
        return self._keep(found, targets)

    def _may_be_logistic(self, rows: Rows) -> bool:
        """Return whether logistic regression is worth its time: for two classes, in memory."""
        return self.num_classes == 2 and isinstance(rows, MatrixRows)

    def _use(self, choice: Choice, landmarks: Float[np.ndarray, "m P"]) -> None:
        """Set up the kernel of a choice."""
        self.gaussian = Gaussian.of(self._columns(landmarks)) if choice.is_gaussian else None

    def _keep(self, found: _Fit, targets: Targets) -> LeftOut:
        """Calibrate a fit, which changes the coefficients of a classifier, and remember it."""
        self.chosen, self.strength, self.coefficients, self.intercept, index, outputs = found
        part = targets.take(index)
        if part.classes is None:
            self.loss = float(part.losses(outputs[None])[0])
        else:
            calibration, self.loss = calibrate(outputs, part.classes, part.weight)
            self.coefficients = calibration.scale * self.coefficients
            self.intercept = calibration.logits(self.intercept)
            outputs = calibration.logits(outputs)
        # Files keep numbers, not their order in memory, on which products depend in the last bit.
        self.coefficients = np.ascontiguousarray(self.coefficients)
        return LeftOut(index, outputs)

    def outputs(self, matrix: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n K"]:
        """Return logits, or targets."""
        if self.gaussian is not None:
            found = self.gaussian(self._columns(matrix)) @ self.coefficients
            return found + self.intercept
        found = np.tile(self.intercept, (len(matrix), 1))
        for part in self._used():
            found += self.standardiser.transform(matrix, part) @ self.coefficients[part]
        return found

    def effects(
        self, matrix: Float[np.ndarray, "n P"] | None = None
    ) -> tuple[Float[np.ndarray, "P K"], Float[np.ndarray, "P K"]]:
        """Return the change of outputs with each standardised column, and the mean size of it.

        With a matrix, the size is that of the change times the column, over its rows. Under a
        Gaussian kernel the change is a mean over the rows, or over the landmarks.
        """
        width, num_outputs = len(self.shares), self.coefficients.shape[1]
        if self.gaussian is None:
            size: Any = 1.0
            if matrix is not None:
                size = np.abs(self.standardiser.transform(matrix)).mean(axis=0)[:, None]
            return self.coefficients, size * np.abs(self.coefficients)
        used = np.flatnonzero(self.shares)
        roots = np.sqrt(self.shares[used])
        columns = self.gaussian.landmarks if matrix is None else self._columns(matrix)
        factor = np.ones_like(roots) if matrix is None else np.abs(columns) / roots
        change, size = np.zeros((2, width, num_outputs))
        for k in range(num_outputs):
            slopes = self.gaussian.slopes(columns, self.coefficients[:, k]) * roots
            change[used, k] = slopes.mean(axis=0)
            size[used, k] = (np.abs(slopes) * factor).mean(axis=0)
        return change, size

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what was learned as plain values and as arrays."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        arrays = {name: getattr(self, name) for name in _ARRAYS} | self.standardiser._asdict()
        if self.gaussian is not None:
            plain["rate"], arrays["landmarks"] = self.gaussian.rate, self.gaussian.landmarks
        return plain, arrays

    @classmethod
    def from_state(cls, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> LinearHead:
        """Return the head that `state` described."""
        result = cls(arrays["families"], plain["num_classes"])
        for name in _PLAIN:
            setattr(result, name, plain[name])
        for name in _ARRAYS:
            setattr(result, name, arrays[name])
        result.standardiser = Standardiser(arrays["center"], arrays["scale"])
        if "landmarks" in arrays:
            result.gaussian = Gaussian(arrays["landmarks"], plain["rate"])
        return result

    def _weights(self) -> Float[np.ndarray, "B"]:
        """Return the weight of each family, 0 if none of its columns varies."""
        varied = self.families[np.isfinite(self.standardiser.scale)]
        roots = np.sqrt(np.bincount(varied, minlength=self.families.max() + 1))
        names = np.arange(len(roots)) if self.groups is None else np.asarray(self.groups)
        _, group = np.unique(names, return_inverse=True)
        total = np.bincount(group, weights=roots)
        weights: np.ndarray = roots / np.where(total > 0, total, 1.0)[group]
        return weights / max(1, np.count_nonzero(total))

    def _shares_of(self, weights: Float[np.ndarray, "B"]) -> Float[np.ndarray, "P"]:
        """Return the weight of each column: those of a family sum to its own."""
        scale = self.standardiser.scale
        kept = np.isfinite(scale)
        powers = np.zeros(len(weights)) if self.powers is None else np.asarray(self.powers)
        raw = np.where(kept, np.where(kept, scale, 1.0) ** (2.0 * powers[self.families]), 0.0)
        total = np.bincount(self.families, weights=raw, minlength=len(weights))
        shares: np.ndarray = raw * (weights / np.where(total > 0, total, 1.0))[self.families]
        return shares

    def _used(self) -> Iterator[Int[np.ndarray, "p"]]:
        """Yield positions of the columns that count, some at a time."""
        used = np.flatnonzero(self.shares)
        return (used[part] for part in _parts(len(used)))

    def _columns(self, matrix: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n p"]:
        """Return the columns that count, standardised, each times the root of its share."""
        used = np.flatnonzero(self.shares)
        return self.standardiser.transform(matrix, used) * np.sqrt(self.shares[used])

    def _kernel(self, matrix: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n n"]:
        """Return the products of all pairs of rows."""
        kernel = np.zeros((len(matrix), len(matrix)))
        for part in self._used():
            scaled = self.standardiser.transform(matrix, part) * np.sqrt(self.shares[part])
            kernel += scaled @ scaled.T
        return kernel

    def _fit_ridge(
        self, rows: Rows, sample: np.ndarray, index: np.ndarray, targets: Targets, strength: float
    ) -> _Fit:
        width = int(np.count_nonzero(self.shares))
        strengths = self._strengths(sample, targets.take(index), len(rows), strength)
        is_whole = len(rows) <= SEARCH_SIZE
        if not is_whole and (self.gaussian is not None or len(rows) > min(width, LARGEST_KERNEL)):
            return self._fit_primal(rows, sample, index, targets, strengths)
        matrix = sample if is_whole else rows.take(slice(None))
        if self.gaussian is not None:
            kernel = self.gaussian(self.gaussian.landmarks)
            mean = np.average(kernel, axis=0, weights=targets.weight)
        else:
            kernel = self._kernel(matrix)
        centered = center_kernel(kernel, targets.weight)
        strength, duals, left_out = fit_kernel(centered, targets, strengths)
        duals = np.sqrt(targets.weight)[:, None] * duals
        if self.gaussian is not None:
            coefficients, offset = duals, mean @ duals
        else:
            coefficients, offset = self._from_duals(matrix, duals, targets.weight)
        places = np.arange(len(matrix))
        return _Fit("ridge", strength, coefficients, targets.mean - offset, places, left_out)

    def _strengths(
        self, sample: np.ndarray, targets: Targets, count: int, strength: float
    ) -> Sequence[float]:
        """Return strengths to try on all series, given the best one of a search on a few."""
        if count <= SEARCH_SIZE:
            return [strength]
        if self.gaussian is not None:  # it has few columns, so that all are cheap
            return STRENGTHS.tolist()
        kernel = center_kernel(self._kernel(sample), targets.weight)
        losses = targets.losses(leave_out(kernel, targets, STRENGTHS))
        best = float(STRENGTHS[losses.argmin()])
        return [best] if count == len(sample) else around(best)

    def _fit_primal(
        self,
        rows: Rows,
        sample: np.ndarray,
        index: np.ndarray,
        targets: Targets,
        strengths: Sequence[float],
    ) -> _Fit:
        expand, unfold = self._expansion()
        columns = expand(sample)
        gram, start = Gram(columns.shape[1], targets.values.shape[1]), 0
        for block in rows.blocks():
            for part in _parts(len(block)):
                scaled = expand(block[part])
                gram.add(scaled, targets.take(slice(start, start + len(scaled))))
                start += len(scaled)
        strength, found, left_out = gram.fit(targets, columns, index, strengths)
        intercept = targets.mean - gram.sums / targets.weight.sum() @ found
        return _Fit("ridge", strength, unfold(found), intercept, index, left_out)

    def _fit_logistic(
        self, matrix: np.ndarray, targets: Targets, generator: np.random.Generator
    ) -> _Fit:
        index = np.arange(len(matrix))
        if self.gaussian is not None or len(matrix) > np.count_nonzero(self.shares):
            expand, unfold = self._expansion()
            strength, found, left_out = fit_logistic(expand(matrix), targets, generator)
            return _Fit("logistic", strength, unfold(found[:-1]), found[-1], index, left_out)
        # A factor of the kernel has as many columns as there are series, and the same penalty.
        kernel = center_kernel(self._kernel(matrix), np.ones(len(matrix)))
        kernel[index, index] += 1e-10 * max(np.trace(kernel) / len(kernel), 1e-300)
        factor = torch.linalg.cholesky(torch.from_numpy(kernel))
        strength, found, left_out = fit_logistic(factor.numpy(), targets, generator)
        inner = torch.from_numpy(found[:-1])
        duals = torch.linalg.solve_triangular(factor.T, inner, upper=True).numpy()
        coefficients, offset = self._from_duals(matrix, duals, None)
        return _Fit("logistic", strength, coefficients, found[-1] - offset, index, left_out)

    def _expansion(self) -> tuple[_Map, _Map]:
        """Return what gives columns whose products are the kernel, and takes coefficients back."""
        if self.gaussian is not None:
            kernel, fold = self.gaussian, self.gaussian.expansion()
            return (lambda x: kernel(self._columns(x)) @ fold), (lambda found: fold @ found)

        def unfold(found: np.ndarray) -> np.ndarray:
            used, whole = np.flatnonzero(self.shares), np.zeros((len(self.shares), found.shape[1]))
            whole[used] = np.sqrt(self.shares[used])[:, None] * found
            return whole

        return self._columns, unfold

    def _from_duals(
        self, matrix: Float[np.ndarray, "n P"], duals: Float[np.ndarray, "n K"], weight: Any
    ) -> tuple[Float[np.ndarray, "P K"], Float[np.ndarray, "K"]]:
        """Return coefficients of columns, and what a mean series gets from them."""
        coefficients, offset = np.zeros((matrix.shape[1], duals.shape[1])), np.zeros(duals.shape[1])
        for part in self._used():
            scaled = self.standardiser.transform(matrix, part)
            mean = np.average(scaled, axis=0, weights=weight)
            product = scaled.T @ duals - np.outer(mean, duals.sum(axis=0))
            coefficients[part] = self.shares[part, None] * product
            offset += mean @ coefficients[part]
        return coefficients, offset
