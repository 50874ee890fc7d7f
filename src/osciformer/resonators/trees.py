"""Boosted trees on columns, beside a linear model whose outputs they are mixed with.

A linear model sees the sum of columns, and a kernel their distances; trees see thresholds of single
columns and what was not measured at all. Where there are many series of two classes the mean of
both is better than either. scikit-learn grows the trees; they are kept as arrays, so that a saved
model holds no code. Each of five ensembles is fitted to four fifths of the series, and outputs are
their mean; the fifth that an ensemble did not see tells how much trees count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from osciformer._optional import need
from osciformer._types import Bool, Float, Int
from osciformer.resonators.calibration import (
    Calibration,
    calibrate,
    smooth_hits,
    temperature_losses,
)
from osciformer.resonators.linear import LeftOut, Standardiser

#: Fewer series, or fewer of the rarer class, and trees are not tried.
FEWEST_SERIES = 1000
FEWEST_OF_CLASS = 50
#: Shares of the trees that are compared.
SHARES = np.linspace(0.0, 1.0, 11)
_NUM_FOLDS = 5
# Few columns a split, large leaves and shrunken values: columns are many and alike.
_BOOSTING: Mapping[str, Any] = {
    "learning_rate": 0.05,
    "max_leaf_nodes": 8,
    "min_samples_leaf": 60,
    "max_features": 0.1,
    "l2_regularization": 10.0,
    "max_iter": 250,
}
# Series times trees that are walked at a time.
_BLOCK = 1 << 20
# Series from which effects are learned.
_SAMPLE = 300


class Trees(NamedTuple):
    """Nodes of all trees, one after the other; a leaf is its own child."""

    roots: Int[np.ndarray, "T"]  #: Where each tree begins.
    column: Int[np.ndarray, "m"]  #: Whose value is compared.
    threshold: Float[np.ndarray, "m"]  #: Values up to it go to the left.
    unknown_left: Bool[np.ndarray, "m"]  #: Whether NaN does.
    left: Int[np.ndarray, "m"]
    right: Int[np.ndarray, "m"]
    value: Float[np.ndarray, "m"]  #: Of a leaf; of another node the mean of its training series.
    intercept: Float[np.ndarray, "1"]  #: Added to the sum of the leaves.

    @classmethod
    def of(cls, ensembles: list[Any]) -> Trees:
        """Return the mean of fitted `HistGradientBoostingClassifier`s of two classes."""
        parts, roots, start = [], [], 0
        for ensemble in ensembles:
            for (tree,) in ensemble._predictors:
                nodes, own = tree.nodes, np.arange(len(tree.nodes))
                is_leaf = nodes["is_leaf"].astype(bool)
                left, right = (np.where(is_leaf, own, nodes[x]) for x in ("left", "right"))
                value = np.where(is_leaf, nodes["value"], 0.0)
                for k in own[::-1]:  # children come after their parents
                    if not is_leaf[k]:
                        pair = [left[k], right[k]]
                        value[k] = np.average(value[pair], weights=nodes["count"][pair])
                threshold = np.where(is_leaf, 0.0, nodes["num_threshold"])
                split = (nodes["feature_idx"], threshold, nodes["missing_go_to_left"].astype(bool))
                parts.append((*split, start + left, start + right, value / len(ensembles)))
                roots.append(start)
                start += len(nodes)
        kinds = (np.int64, np.float64, bool, np.int64, np.int64, np.float64)
        nodes_of_all = [
            np.concatenate(arrays).astype(kind)
            for arrays, kind in zip(zip(*parts, strict=True), kinds, strict=True)
        ]
        first = [float(ensemble._baseline_prediction.item()) for ensemble in ensembles]
        return cls._make((np.array(roots), *nodes_of_all, np.array([np.mean(first)])))

    def logits(self, matrix: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "n"]:
        """Return the logit of the second class."""
        size = max(1, _BLOCK // len(self.roots))
        found = np.empty(len(matrix))
        for start in range(0, len(matrix), size):
            *_, last = self._walk(matrix[start : start + size])
            found[start : start + size] = self.value[last].sum(axis=1)
        return found + self.intercept

    def additions(self, matrix: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "n p"]:
        """Return what each column adds to the logit: the changes of the mean at its splits."""
        count, width = matrix.shape
        found = np.zeros(count * width)
        place = np.arange(count)[:, None] * width
        before = None
        for node in self._walk(matrix):
            if before is not None:
                change = self.value[node] - self.value[before]
                where = (place + self.column[before]).ravel()
                found += np.bincount(where, change.ravel(), minlength=count * width)
            before = node
        return found.reshape(count, width)

    def _walk(self, matrix: Float[np.ndarray, "n p"]) -> Iterator[Int[np.ndarray, "n T"]]:
        """Yield where each series is in each tree: the roots first, the leaves in the end."""
        row = np.arange(len(matrix))[:, None]
        node = np.broadcast_to(self.roots, (len(matrix), len(self.roots)))
        while True:
            yield node
            seen = matrix[row, self.column[node]]
            goes_left = np.where(
                np.isnan(seen), self.unknown_left[node], seen <= self.threshold[node]
            )
            child = np.where(goes_left, self.left[node], self.right[node])
            if (child == node).all():
                return
            node = child


@dataclass(frozen=True)
class TreeShare:
    """Trees that are mixed with the logits of another model.

    Attributes:
        trees: The trees.
        columns: Columns that they see.
        share: Of the trees in the mixed logits, from 0 to 1.
        calibration: Of the mixed logits.
        effects: Change of the trees' logit with each standardised column, and its mean size [2, p].
    """

    trees: Trees
    columns: Int[np.ndarray, "p"]
    share: float
    calibration: Calibration
    effects: Float[np.ndarray, "2 p"]

    @classmethod
    def fit(
        cls,
        matrix: Float[np.ndarray, "n P"],
        columns: Int[np.ndarray, "p"],
        classes: Int[np.ndarray, "n"],
        weight: Float[np.ndarray, "n"] | None,
        other: LeftOut,
        seed: int,
        has_bar: bool = False,
    ) -> tuple[Self | None, LeftOut]:
        """Return trees and the mixed logits of series left out; None where trees do not help.

        Args:
            matrix: All columns.
            columns: Those that trees see.
            classes: 0 or 1.
            weight: Of each series.
            other: Logits of the other model for series that it was not fitted to.
            seed: Decides the folds and the columns that each split considers.
            has_bar: Whether to show a progress bar.
        """
        if min(np.bincount(classes, minlength=2)) < FEWEST_OF_CLASS or len(classes) < FEWEST_SERIES:
            return None, other
        seen, ensembles, logit = matrix[:, columns], [], np.empty(len(classes))
        splitter = need("sklearn.model_selection", extra="train").StratifiedKFold
        boosting = need("sklearn.ensemble", extra="train").HistGradientBoostingClassifier
        folds = splitter(_NUM_FOLDS, shuffle=True, random_state=seed)
        # Threads that wait for each other stall on a busy machine; as many as torch has.
        limits = need("threadpoolctl", extra="train").threadpool_limits
        tqdm = need("tqdm", extra="train").tqdm
        told = {"total": _NUM_FOLDS, "unit": "fold", "desc": "trees", "disable": not has_bar}
        with limits(torch.get_num_threads(), user_api="openmp"):
            for train, held in tqdm(folds.split(seen, classes), **told):
                one = boosting(**_BOOSTING, early_stopping=False, random_state=seed)
                given = seen[train]
                # scikit-learn fails on a column without a number; a constant one is never split.
                given[:, np.isnan(given).all(axis=0)] = 0.0
                one.fit(given, classes[train], None if weight is None else weight[train])
                logit[held] = one.decision_function(seen[held])
                ensembles.append(one)
        found = _two(logit[other.places])
        judges = classes[other.places]
        weight = np.ones(len(judges)) if weight is None else weight[other.places]
        mixed = np.stack([share * found + (1.0 - share) * other.outputs for share in SHARES])
        _, losses = temperature_losses(mixed, smooth_hits(judges, 2), weight)
        best = int(np.argmin(losses @ weight))
        if best == 0:
            return None, other
        calibration, _ = calibrate(mixed[best], judges, weight)
        trees = Trees.of(ensembles)
        some = seen[np.random.default_rng(seed).permutation(len(seen))[:_SAMPLE]]
        result = cls(trees, columns, float(SHARES[best]), calibration, _effects(trees, some))
        return result, LeftOut(other.places, calibration.logits(mixed[best]))

    def mix(
        self, matrix: Float[np.ndarray, "n P"], other: Float[np.ndarray, "n 2"]
    ) -> Float[np.ndarray, "n 2"]:
        """Return mixed logits, given those of the other model."""
        own = _two(self.trees.logits(matrix[:, self.columns]))
        return self.calibration.logits(self.share * own + (1.0 - self.share) * other)

    def mix_effects(
        self, matrix: Float[np.ndarray, "n P"] | None, other: tuple[np.ndarray, np.ndarray]
    ) -> tuple[Float[np.ndarray, "P 2"], Float[np.ndarray, "P 2"]]:
        """Return the effects of columns on mixed logits, as `LinearHead.effects` has them.

        Sizes are added up, an upper bound where both models use a column.
        """
        own = self.effects if matrix is None else _effects(self.trees, matrix[:, self.columns])
        factors = self.calibration.scale * np.array([self.share, 1.0 - self.share])
        change, size = factors[1] * other[0], factors[1] * other[1]
        change[self.columns] += factors[0] * _two(own[0])
        size[self.columns] += factors[0] * np.abs(_two(own[1]))
        return change, size

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what was learned as plain values and as arrays."""
        plain = {"share": self.share, "scale": self.calibration.scale}
        more = {"columns": self.columns, "bias": self.calibration.bias, "effects": self.effects}
        return plain, self.trees._asdict() | more

    @classmethod
    def from_state(cls, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Self:
        """Return what `state` described; trees that lead nowhere are refused."""
        trees = Trees(*(arrays[name] for name in Trees._fields))
        order = np.arange(len(trees.left))
        is_leaf = (trees.left == order) & (trees.right == order)
        # Then every walk goes forward and ends.
        is_forward = (np.minimum(trees.left, trees.right) > order) | is_leaf
        nodes = np.concatenate((trees.roots, trees.left, trees.right))
        limits = ((trees.column, len(arrays["columns"])), (nodes, len(order)))
        if not is_forward.all() or any(x.min() < 0 or x.max() >= most for x, most in limits):
            raise ValueError("the file's trees are damaged: a node has no such child or column")
        calibration = Calibration(plain["scale"], arrays["bias"])
        return cls(trees, arrays["columns"], plain["share"], calibration, arrays["effects"])


def _two(logit: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n 2"]:
    """Return the logits of both classes from that of the second."""
    return np.stack((-0.5 * logit, 0.5 * logit), axis=1)


def _effects(trees: Trees, matrix: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "2 p"]:
    """Return slopes of what columns add against standardised columns, and mean sizes."""
    added = trees.additions(matrix)
    scaled = Standardiser.fit(matrix).transform(matrix)
    spread = np.maximum(np.square(scaled).mean(axis=0), 1e-12)
    return np.stack(((added * scaled).mean(axis=0) / spread, np.abs(added).mean(axis=0)))
