"""Which observations a network attends to, along the real time of series."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from osciformer._types import Float, Tensor
from osciformer.data.batches import collate
from osciformer.data.inputs import chunks
from osciformer.data.series import IrregularSeries, concatenate
from osciformer.estimators.labels import encode_classes, read_labels
from osciformer.math.integrals import modulated_averages
from osciformer.nn.attention import AttentionInternals
from osciformer.nn.encoder import Encoded, EncoderBlock

_PAIRS_AT_ONCE = 1_000_000  # of rows, whose weights are in memory together
_MOST_PAIRS = 30_000_000  # of rows of the series whose mean is taken


class LayerAttention(NamedTuple):
    """The attention of one layer within one series."""

    layer: int  #: Number of the block, from 1.
    times: Float[np.ndarray, "N"]  #: Times of its rows, in the unit of the data.
    weights: Float[np.ndarray, "H N N"]  #: Weight of each row (last axis) in each row's answer.
    #: What rows ask for, times the scale of logits; None unless it is constant over the gap.
    queries: Float[np.ndarray, "N H C"] | None
    internals: AttentionInternals  #: All of it, in the model's unit of time.
    scale: float  #: Times of the data per unit of the model.
    reference: float  #: Time of the data that is 0 in the model.
    unit: str | None  #: Unit of the times; None for plain numbers.

    def trajectories(
        self, role: Literal["key", "value"], grid: Float[np.ndarray, "T"]
    ) -> Float[np.ndarray, "T N H C"]:
        """Return keys or values on a grid of times of the data; NaN before a causal one starts."""
        asked = torch.from_numpy((np.asarray(grid, dtype=np.float64) - self.reference) / self.scale)
        follow = getattr(self.internals, f"{role}_trajectories")
        found: Tensor = follow(asked)[0]
        return found.numpy()

    def contributions(self, row: int) -> Float[np.ndarray, "N H C"]:
        """Return what each channel adds to the logits of one row, for each row that it sees.

        Each channel has its own period, so that this says at which periods a row listens.
        """
        if self.queries is None:
            raise ValueError("contributions are those of causal layers with query='hold'")
        inside, keys = self.internals, self.internals.keys
        gap = inside.times[0, row] - inside.times[0]
        parts = inside.key_omega.double(), inside.key_zeta.double()
        gap = gap.double().clamp(min=0.0)[:, None, None]
        of_position, of_velocity = modulated_averages(gap, torch.zeros_like(gap), *parts)
        position = keys.start[0].double()
        rest = torch.zeros_like(position) if keys.equilibrium is None else keys.equilibrium[0]
        mean = rest + of_position.real * (position - rest)
        if keys.velocity is not None:
            mean = mean + of_velocity.real * keys.velocity[0]
        is_seen = np.arange(len(self.times)) <= row % len(self.times)
        found: np.ndarray = self.queries[row] * mean.detach().numpy()
        return found * is_seen[:, None, None]


class ClassAttention(NamedTuple):
    """Mean attention of the last row of series, by class and by how long ago a row was."""

    classes: tuple[Any, ...]  #: The classes.
    edges: Float[np.ndarray, "A+1"]  #: Ages that bound the bins, in the unit of the data.
    weights: Float[np.ndarray, "L K A"]  #: Of each layer, mean over series and heads.
    layers: tuple[int, ...]  #: Numbers of the blocks, from 1.
    unit: str | None  #: Unit of the ages; None for plain numbers.


def attend_series(model: Any, X: Any) -> list[LayerAttention]:
    """Return the attention within one series, such as `X[3:4]`, layer by layer.

    It is empty for a model without oscillator attention, and for models of events, whose encoder
    never forms the weights of all pairs.
    """
    series = concatenate(list(chunks(model._validate(X)))).replace(labels=None)
    if len(series) != 1 or len(series.times) == 0:
        raise ValueError(f"X must be one series with rows, as X[k:k+1]; got {series!r}")
    found = []
    for encoded in _encode(model, series):
        network = model.model_.backbone.model
        scale, blocks = network.time_scale, list(network.encoder)
        for layer, internals in _attention_of(encoded):
            queries = _queries(blocks[layer - 1], encoded.layer_inputs[layer - 1])
            found.append(
                LayerAttention(
                    layer,
                    series.times,
                    internals.weights[0].numpy(),
                    queries,
                    internals,
                    float(scale.scale),
                    float(scale.reference),
                    series.time_axis.unit,
                )
            )
    return found


def attend_classes(model: Any, X: Any, y: Any = None, *, num_bins: int = 20) -> ClassAttention:
    """Return where the last row of series looks, in mean over the series of each class.

    Args:
        model: A fitted classifier.
        X: Series.
        y: Their classes; the labels of X if not given. Of many or long series the first ones count.
        num_bins: Number of equal bins of the time before the last row.
    """
    if getattr(model, "task", None) != "classification":
        raise TypeError(f"model must be a fitted classifier; got {type(model).__name__}")
    data = model._validate(X)
    numbers = encode_classes(read_labels(data, y), model.classes_)
    chosen = concatenate(list(chunks(data))).replace(labels=None)
    pairs = np.cumsum(chosen.lengths.astype(np.float64) ** 2)
    index = np.flatnonzero((chosen.spans > 0) & (pairs <= max(_MOST_PAIRS, pairs[:1].sum())))
    chosen, numbers = chosen[index], numbers[index]
    edges = np.linspace(0.0, float(chosen.spans.max(initial=1.0)), num_bins + 1)
    sums: dict[int, np.ndarray] = {}
    done = 0
    for encoded in _encode(model, chosen):
        for layer, internals in _attention_of(encoded):
            total = sums.setdefault(layer, np.zeros((len(model.classes_), num_bins)))
            for place, weights in enumerate(internals.weights.numpy()):
                one = chosen[done + place]
                last = weights[:, len(one) - 1, : len(one)].mean(axis=0)
                found, _ = np.histogram(one.times[-1] - one.times, edges, weights=last)
                total[numbers[done + place]] += found
        done += len(encoded.states)
    counts = np.maximum(np.bincount(numbers, minlength=len(model.classes_)), 1)[:, None]
    weights = np.array([total / counts for total in sums.values()])
    classes, unit = tuple(model.classes_.tolist()), chosen.time_axis.unit
    return ClassAttention(classes, edges, weights, tuple(sums), unit)


def _encode(model: Any, series: IrregularSeries) -> Iterator[Encoded]:
    """Yield what a backbone with internals makes of series, in order, a batch at a time."""
    backbone: Any = getattr(getattr(model, "model_", None), "backbone", None)
    if not hasattr(getattr(backbone, "model", None), "time_scale"):
        return
    scaled = model._scale(series)
    columns = getattr(model, "_columns", None)  # those who answer queries see some columns clipped
    if columns is not None:
        scaled = scaled.replace(values=columns.clipped(scaled.values))
    size = max(1, _PAIRS_AT_ONCE // max(1, int(series.lengths.max(initial=1))) ** 2)
    for start in range(0, len(series), size):
        batch = collate(scaled, np.arange(start, min(start + size, len(series))))
        with torch.no_grad():
            _, times, mask, static, values = model.model_.inputs.series(batch)
            yield backbone.encode(values, times, mask, static, return_internals=True)


def _attention_of(encoded: Encoded) -> Iterator[tuple[int, AttentionInternals]]:
    for number, internals in enumerate(encoded.internals, start=1):
        if isinstance(internals, AttentionInternals):
            yield number, internals


@torch.no_grad()
def _queries(block: EncoderBlock, x: Tensor) -> Float[np.ndarray, "N H C"] | None:
    """Return the queries of one series' rows if they are constant over gaps and logits are sums."""
    attention = block.attention
    if attention.query != "hold" or attention.direction != "causal" or attention.drive_bank:
        return None
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    found: Tensor = scale * attention.project_queries(block.attention_norm(x))[0].double()
    return found.numpy()
