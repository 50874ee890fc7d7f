"""Padded batches of irregular series."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from osciformer._types import Bool, Float, Int, Tensor
from osciformer.data.series import IrregularSeries


@dataclass(frozen=True)
class Batch:
    """Series padded to the longest one; True in a mask means present.

    Attributes:
        times: Observation times, float64; padding repeats the last time.
        values: Values, float32; NaN is a missing one, and padding.
        mask: True where there is an observation.
        static: Static features, NaN is a missing one; or None.
        labels: Classes (int64) or real targets (float32), [B] or [B, K]; or None.
        weight: Weight of each series; or None.
        query_times: Times at which something is asked, float64; padding repeats the last; or None.
        targets: What was measured at the query times; NaN is not scored; or None.
        query_mask: True where there is a query; or None.
        index: Position of each series in its container.
    """

    times: Float[Tensor, "B N"]
    values: Float[Tensor, "B N F"]
    mask: Bool[Tensor, "B N"]
    static: Float[Tensor, "B S"] | None
    labels: Tensor | None
    weight: Float[Tensor, "B"] | None
    query_times: Float[Tensor, "B M"] | None
    targets: Float[Tensor, "B M F"] | None
    query_mask: Bool[Tensor, "B M"] | None
    index: Int[Tensor, "B"]

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which copies to a GPU are fast."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{name: change(item) for name, item in tensors.items() if item is not None}
        )


def collate(
    series: IrregularSeries,
    index: Sequence[int] | Int[np.ndarray, "B"] | None = None,
    *,
    labels: Any = None,
    weight: Any = None,
    queries: IrregularSeries | None = None,
) -> Batch:
    """Return the padded batch of the series at some positions.

    Args:
        series: The container.
        index: Positions [B], not negative; all series if not given.
        labels: Numeric labels of the whole container [n] or [n, K], such as encoded classes; those
            of the container if not given.
        weight: Weights of the whole container [n].
        queries: As many series as in `series`, whose times are query times and whose values are
            the targets (NaN is not scored).

    Returns:
        The batch; its width N is at least 1.

    Example:
        >>> series = IrregularSeries.from_arrays([[0.0, 1.0], [0.5]], [[1.0, 2.0], [3.0]])
        >>> batch = collate(series)
        >>> batch.times, batch.mask
        (tensor([[0.0000, 1.0000],
                [0.5000, 0.5000]], dtype=torch.float64), tensor([[ True,  True],
                [ True, False]]))
    """
    index = np.arange(len(series)) if index is None else np.asarray(index, dtype=np.int64)
    times, values, mask = _pad(series, index)
    asked: dict[str, Tensor | None] = dict.fromkeys(("query_times", "targets", "query_mask"))
    if queries is not None:
        if len(queries) != len(series):
            raise ValueError(
                f"queries must hold {len(series)} series, as series does; got {len(queries)}"
            )
        asked = dict(zip(asked, _pad(queries, index), strict=True))
    labels = series.labels if labels is None else np.asarray(labels)
    return Batch(
        times=times,
        values=values,
        mask=mask,
        static=None if series.static is None else torch.from_numpy(series.static[index]),
        labels=None if labels is None else _label_tensor(labels, index, len(series)),
        weight=None if weight is None else _weight_tensor(weight, index, len(series)),
        index=torch.from_numpy(index),
        **asked,
    )


def uncollate(batch: Batch) -> list[tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N F"]]]:
    """Return the times and values of each series of a batch, without padding."""
    mask = batch.mask.cpu().numpy()
    times, values = batch.times.cpu().numpy(), batch.values.cpu().numpy()
    return [(t[present], x[present]) for t, x, present in zip(times, values, mask, strict=True)]


def _pad(
    series: IrregularSeries, index: Int[np.ndarray, "B"]
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N F"], Bool[Tensor, "B N"]]:
    starts = series.offsets[index]
    lengths = series.offsets[index + 1] - starts
    steps = np.arange(max(1, int(lengths.max(initial=0))))
    mask = steps < lengths[:, None]  # [B, N]
    # Padding reads the last row of its series, or any row where a series has none.
    rows = starts[:, None] + np.minimum(steps, np.maximum(lengths, 1)[:, None] - 1)
    if len(series.times) == 0:
        times = np.zeros(mask.shape)
        values = np.full((*mask.shape, series.num_features), np.nan, dtype=np.float32)
    else:
        rows = np.minimum(rows, len(series.times) - 1)
        times = series.times[rows]
        times[lengths == 0] = 0.0
        values = series.values[rows]
        values[~mask] = np.nan
    return torch.from_numpy(times), torch.from_numpy(values), torch.from_numpy(mask)


def _label_tensor(labels: np.ndarray, index: Int[np.ndarray, "B"], count: int) -> Tensor:
    if len(labels) != count:
        raise ValueError(f"labels must have {count} entries, one per series; got {len(labels)}")
    if labels.dtype.kind not in "biuf":
        raise TypeError(
            f"labels must be numbers in a batch; got {labels.dtype}. Encode classes as 0, 1, ... "
            "with np.unique(series.labels, return_inverse=True) and pass them as labels"
        )
    dtype = np.float32 if labels.dtype.kind == "f" else np.int64
    return torch.from_numpy(labels[index].astype(dtype))


def _weight_tensor(weight: Any, index: Int[np.ndarray, "B"], count: int) -> Float[Tensor, "B"]:
    weight = np.asarray(weight, dtype=np.float32)
    if weight.shape != (count,):
        raise ValueError(f"weight must be [{count}]; got {list(weight.shape)}")
    if not (np.isfinite(weight) & (weight >= 0)).all():
        raise ValueError("weight must be finite and not negative")
    return torch.from_numpy(weight[index])
