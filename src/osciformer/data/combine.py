"""Several containers as one, and further static features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from osciformer._types import Float
from osciformer.data.ragged import offsets_of
from osciformer.data.series import IrregularSeries


def concatenate(parts: Sequence[IrregularSeries]) -> IrregularSeries:
    """Return one container with the series of several, in order.

    Args:
        parts: At least one; features, static features, labels and time axis must agree.

    Example:
        >>> one = IrregularSeries.from_arrays([[0.0, 1.0]], [[1.0, 2.0]], ids=["a"])
        >>> concatenate([one, one.replace(ids=["b"])]).ids
        array(['a', 'b'], dtype='<U1')
    """
    if not parts:
        raise ValueError("parts must hold at least one IrregularSeries")
    first = parts[0]
    for number, part in enumerate(parts):
        for name in ("feature_names", "static_names", "time_axis"):
            if getattr(part, name) != getattr(first, name):
                raise ValueError(
                    f"all parts must have the same {name}; part 0 has {getattr(first, name)}, "
                    f"part {number} has {getattr(part, name)}"
                )
        for name in ("labels", "static"):
            if (getattr(part, name) is None) != (getattr(first, name) is None):
                raise ValueError(f"part 0 and part {number} must both have {name}, or neither")

    def join(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    lengths = np.concatenate([part.lengths for part in parts])
    names = ("ids", "static", "labels", "origins")
    return first.replace(
        times=join("times"),
        values=join("values"),
        offsets=offsets_of(lengths),
        static_names=first.static_names if first.static is not None else None,
        **{name: join(name) for name in names},
    )


def add_static(
    series: IrregularSeries, static: Float[np.ndarray, "n S"], names: Sequence[str]
) -> IrregularSeries:
    """Return the series with further static features behind those that they have.

    Args:
        series: The series.
        static: The further features, NaN is a missing one.
        names: Their names; a name that a static feature has already is an error.

    Example:
        >>> one = IrregularSeries.from_arrays([[0.0, 1.0]], [[1.0, 2.0]])
        >>> add_static(one, np.array([[63.0]]), ["age"]).static_names
        ('age',)
    """
    if series.static is not None:
        static = np.concatenate((series.static, static), axis=1)
    return series.replace(static=static, static_names=(*series.static_names, *names))
