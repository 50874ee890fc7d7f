"""Classes as numbers, class weights, and real targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from osciformer._text import name_some
from osciformer._types import Float, Int
from osciformer.data.ragged import as_plain_array


def check_targets(y: Any, count: int) -> np.ndarray:
    """Return labels as a plain array with one entry per series, none of them missing."""
    if y is None:
        raise ValueError(
            "y is not given and X has no labels; pass y, or X with labels (label='...' in the "
            "layout of a table)"
        )
    values = y.to_numpy() if hasattr(y, "to_numpy") else np.asarray(y)
    if values.dtype.kind == "O":
        missing = np.array([item is None or item != item for item in values.ravel()])
        _refuse_missing(missing)
        values = np.asarray(values.tolist())
    labels = as_plain_array("y", values)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim not in (1, 2) or len(labels) != count:
        raise ValueError(
            f"y must have {count} entries, one per series; got the shape {list(labels.shape)}"
        )
    if labels.dtype.kind == "f":
        _refuse_missing(~np.isfinite(labels.reshape(count, -1)).all(axis=1))
    return labels


def _refuse_missing(missing: np.ndarray) -> None:
    if missing.any():
        raise ValueError(
            f"y must not be missing or infinite; it is at {name_some(np.flatnonzero(missing))} "
            f"({int(missing.sum())} of {len(missing)}). Drop those series: X[mask], y[mask]"
        )


def find_classes(labels: np.ndarray) -> np.ndarray:
    """Return the classes that occur, sorted; refuse what is no class, and a single one."""
    if labels.ndim != 1:
        raise ValueError(
            f"a classifier takes one label per series; got y of shape {list(labels.shape)}"
        )
    if labels.dtype.kind == "f" and (labels != np.round(labels)).any():
        raise ValueError(
            f"y looks like a real target, not a class: it holds {labels[labels % 1 != 0][0]!s}. "
            "Use OsciFormerRegressor, or turn y into classes"
        )
    classes = np.unique(labels)
    if len(classes) < 2:
        raise ValueError(
            f"y has one class only, {classes[0]!r}; a classifier needs series of at least two"
        )
    return classes


def encode_classes(labels: np.ndarray, classes: np.ndarray) -> Int[np.ndarray, "n"]:
    """Return the position of each label among the classes, and refuse an unknown one."""
    unknown = ~np.isin(labels, classes)
    if unknown.any():
        raise ValueError(
            f"y has labels that were not there in fit: {name_some(np.unique(labels[unknown]))}; "
            f"the classes are {name_some(classes)}"
        )
    return np.searchsorted(classes, labels)


def weigh_classes(
    class_weight: str | Mapping[Any, float] | None,
    classes: np.ndarray,
    encoded: Int[np.ndarray, "n"],
) -> list[float] | None:
    """Return the weight of each class, or None for equal weights.

    Args:
        class_weight: None, `balanced` (inverse to the frequency, 1 on average over the series) or a
            dict from label to weight, 1 for labels that it lacks.
        classes: The classes, sorted.
        encoded: Classes of the training series as positions.

    Example:
        >>> weigh_classes("balanced", np.array(["a", "b"]), np.array([0, 0, 0, 1]))
        [0.6666666666666666, 2.0]
    """
    if class_weight is None:
        return None
    if isinstance(class_weight, Mapping):
        unknown = [label for label in class_weight if label not in classes]
        if unknown:
            raise ValueError(
                f"class_weight names {name_some(unknown)}, which y does not have; its classes are "
                f"{name_some(classes)}"
            )
        return [float(class_weight.get(label, 1.0)) for label in classes.tolist()]
    if class_weight != "balanced":
        raise ValueError(
            f"class_weight must be None, 'balanced' or a dict from label to weight; "
            f"got {class_weight!r}"
        )
    counts = np.bincount(encoded, minlength=len(classes))
    weights: list[float] = (len(encoded) / (len(classes) * np.maximum(counts, 1))).tolist()
    return weights


def find_scale(labels: np.ndarray) -> tuple[Float[np.ndarray, "K"], Float[np.ndarray, "K"]]:
    """Return mean and spread of each target; the spread of a constant one is 1.

    Example:
        >>> find_scale(np.array([1.0, 3.0]))
        (array([2.]), array([1.]))
    """
    if labels.dtype.kind not in "fiub":
        raise TypeError(
            f"a regressor takes numbers as y; got {labels.dtype}. Use OsciFormerClassifier for "
            "classes"
        )
    columns = labels.reshape(len(labels), -1).astype(np.float64)
    center, scale = columns.mean(axis=0), columns.std(axis=0)
    return center, np.where(scale > 1e-9 * np.abs(center) + 1e-30, scale, 1.0)
