"""A part of the training series for early stopping."""

from __future__ import annotations

import numpy as np

from osciformer._types import Int


def random_split(
    count: int, fraction: float, generator: np.random.Generator
) -> tuple[Int[np.ndarray, "t"], Int[np.ndarray, "v"]]:
    """Return rising positions of training and of validation series.

    Example:
        >>> train, validation = random_split(10, 0.2, np.random.default_rng(0))
        >>> len(train), len(validation)
        (8, 2)
    """
    return stratified_split(np.zeros(count, dtype=np.int64), fraction, generator)


def stratified_split(
    classes: Int[np.ndarray, "n"], fraction: float, generator: np.random.Generator
) -> tuple[Int[np.ndarray, "t"], Int[np.ndarray, "v"]]:
    """Return rising positions of training and of validation series, class by class.

    Each class gives `round(fraction * n)` of its n members to validation, but keeps one for
    training.

    Args:
        classes: Class of each series.
        fraction: Part for validation.
        generator: Source of randomness.

    Example:
        >>> classes = np.array([0] * 8 + [1] * 4)
        >>> train, validation = stratified_split(classes, 0.25, np.random.default_rng(0))
        >>> np.bincount(classes[validation])
        array([2, 1])
    """
    is_validation = np.zeros(len(classes), dtype=bool)
    for number in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == number))
        size = min(round(fraction * len(members)), len(members) - 1)
        is_validation[members[:size]] = True
    return np.flatnonzero(~is_validation), np.flatnonzero(is_validation)
