"""How long to train, where that is left to the number of series."""

from __future__ import annotations

from typing import Literal, NamedTuple

Auto = Literal["auto"]

#: Series per step in prediction, and the most in training, where it is left open.
LARGEST_BATCH = 64
_SMALLEST_BATCH = 8
# A step counts for more than a pass: forty series are no reason to stop after fifteen steps.
_STEPS = 600
_FEWEST_EPOCHS, _MOST_EPOCHS = 15, 200
_LEAST_PATIENCE = 5


class Length(NamedTuple):
    """How long to train: series per step, passes, and passes without improvement."""

    batch_size: int
    max_epochs: int
    patience: int | None


def training_length(
    num_series: int,
    batch_size: int | Auto = "auto",
    max_epochs: int | Auto = "auto",
    patience: int | Auto | None = "auto",
) -> Length:
    """Return the settings with numbers in place of `auto`.

    Batches hold about an eighth of the series, 8 to 64. There are 15 passes, or as many (at most
    200) as give 600 steps. Training stops after a quarter of them without improvement, at least 5.

    Args:
        num_series: Number of training series.
        batch_size: Series per step.
        max_epochs: Most passes over the training series.
        patience: Passes without improvement after which training stops; None for no stopping.

    Example:
        >>> training_length(3600)
        Length(batch_size=64, max_epochs=15, patience=5)
        >>> training_length(40)
        Length(batch_size=8, max_epochs=120, patience=30)
    """
    for name, given in (
        ("batch_size", batch_size),
        ("max_epochs", max_epochs),
        ("patience", patience),
    ):
        if isinstance(given, str) and given != "auto":
            raise ValueError(f"{name} must be a number or 'auto'; got {given!r}")
    if isinstance(batch_size, str):
        eighth = max(1, num_series // 8)
        size = min(LARGEST_BATCH, max(_SMALLEST_BATCH, 1 << (eighth.bit_length() - 1)))
    else:
        size = batch_size
    if isinstance(max_epochs, str):
        steps = max(1, -(-num_series // max(1, size)))
        epochs = min(_MOST_EPOCHS, max(_FEWEST_EPOCHS, -(-_STEPS // steps)))
    else:
        epochs = max_epochs
    if isinstance(patience, str):
        return Length(size, epochs, max(_LEAST_PATIENCE, epochs // 4))
    return Length(size, epochs, patience)
