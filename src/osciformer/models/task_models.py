"""Models of the tasks on series: one output per series, or quantiles at any time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Bool, Float, Mask, QueryTimes, Static, Tensor, Times, Values
from osciformer.config import QueryModelConfig, SeriesModelConfig, TaskConfig
from osciformer.models.backbones import Backbone, make_backbone
from osciformer.models.forward_fill import (
    AgeScale,
    BaselinePrediction,
    baseline_prediction,
    deviations,
    forward_fill,
)
from osciformer.models.variables import VariableEncoder
from osciformer.nn.encoder import last_state, mean_state, with_indicators
from osciformer.nn.timeline import check_reads, check_tokens
from osciformer.ops.padding import clean_times

# The statistic `age` of what was never measured: e^8 typical gaps old.
_AGE_OF_UNKNOWN = 2.0
# Two gates and a shift of each feature; its spreads come after them.
_NUM_MOVES = 3
# The first spread of an untrained model, in standard deviations of a scaled feature.
_FIRST_SPREAD = 0.5
# Standard deviation of the last map's first weights: an untrained model predicts its baseline.
_FIRST_WEIGHTS = 1e-3


class SeriesBatch(Protocol):
    """Padded series, True in a mask means present, NaN is a missing value."""

    @property
    def times(self) -> Times:
        """Observation times, not decreasing among the present ones of a series."""

    @property
    def values(self) -> Values:
        """Scaled values; NaN is a missing one."""

    @property
    def mask(self) -> Mask:
        """True where there is an observation."""

    @property
    def static(self) -> Static | None:
        """Static features; NaN is a missing one."""


class QueryBatch(SeriesBatch, Protocol):
    """Padded series and the times at which something is asked."""

    @property
    def query_times(self) -> QueryTimes | None:
        """Query times, in any order."""

    @property
    def query_mask(self) -> Tensor | None:
        """True where there is a query `[B, M]`."""

    @property
    def targets(self) -> Tensor | None:
        """Values that training asks for `[B, M, F]`; NaN is not asked."""


class _Series(NamedTuple):
    values: Values
    times: Times
    mask: Mask
    static: Static | None
    columns: Float[Tensor, "B N G"]  # what a backbone gets for values


class SeriesInputs(nn.Module):
    """Columns for a backbone: values and, with forward fill, last known values and their ages."""

    def __init__(self, config: TaskConfig) -> None:
        super().__init__()
        self.input_dim, self.static_dim = config.input_dim, config.static_dim
        self.carry, self.observation_dropout = config.carry, config.observation_dropout
        self.num_columns = config.input_dim * (3 if config.carry else 1)
        self.age_scale = AgeScale()

    def series(self, batch: SeriesBatch) -> _Series:
        """Return a batch that was checked; in training some values are hidden (NaN)."""
        values, times, mask = batch.values, batch.times, batch.mask
        check_tokens(values, times, mask, name="values", dim=self.input_dim)
        if values.shape[1] == 0:  # one absent row, so that nothing after this meets an empty axis
            values, times, mask = (
                functional.pad(x, (0, 0) * (x.ndim - 2) + (0, 1)) for x in (values, times, mask)
            )
        values = values.masked_fill(~mask[..., None], torch.nan)
        if self.training and self.observation_dropout:
            is_hidden = torch.rand_like(values) < self.observation_dropout
            values = values.masked_fill(is_hidden, torch.nan)
        columns = values
        if self.carry:
            last, age = forward_fill(values, times, mask)
            columns = torch.cat((values, last, self.age_scale(age)), dim=-1)
        return _Series(values, times, mask, self._static(batch), columns)

    def _static(self, batch: SeriesBatch) -> Static | None:
        """Return the static features; all missing if the model has some and the batch none."""
        if batch.static is None and self.static_dim:
            return batch.values.new_full((len(batch.values), self.static_dim), torch.nan)
        got = 0 if batch.static is None else batch.static.shape[-1]
        if got != self.static_dim:
            raise ValueError(f"static must be [B, {self.static_dim}] as configured; got [B, {got}]")
        return batch.static if self.static_dim else None


class TaskModel(nn.Module):
    """A model with columns as inputs and a backbone that encodes them."""

    def __init__(self, config: TaskConfig, **options: Any) -> None:
        super().__init__()
        self.inputs = SeriesInputs(config)
        self.backbone: Backbone = make_backbone(config, self.inputs.num_columns, **options)

    def fit_time_scale(
        self, times: Times, mask: Mask | None = None, generator: torch.Generator | None = None
    ) -> Self:
        """Set the units of time and ages, and frequencies that come from the data.

        Arguments are those of `OsciFormer.fit_time_scale`. If no series has two distinct times,
        nothing is changed.
        """
        self.inputs.age_scale.fit(times, mask)
        self.backbone.fit_time_scale(times, mask, generator)
        return self


class SeriesModel(TaskModel):
    """Class logits or real outputs of whole series.

    A backbone encodes values, last known values and their ages, its states are pooled, and a small
    network maps them, the static features and, if asked for, statistics of the series and what a
    `VariableEncoder` says of its variables to the outputs. Values and static features should be
    scaled to zero mean. Call `fit_time_scale` once with the training times, before the optimizer is
    built.

    Example:
        >>> from types import SimpleNamespace
        >>> times, mask = 48 * torch.rand(4, 20).sort().values, torch.ones(4, 20).bool()
        >>> values = torch.randn(4, 20, 3)
        >>> batch = SimpleNamespace(times=times, values=values, mask=mask, static=None)
        >>> model = SeriesModel(SeriesModelConfig(input_dim=3, output_dim=2))
        >>> model.fit_time_scale(times, mask)(batch).shape
        torch.Size([4, 2])
    """

    def __init__(self, config: SeriesModelConfig) -> None:
        super().__init__(config)
        self.config = config
        width = config.dim * len(config.pool) + 2 * config.static_dim
        num_statistics = len(config.statistics) if config.skip else 0
        width += num_statistics * config.input_dim
        self.variables: VariableEncoder | None = None
        if config.variables:
            self.variables = VariableEncoder(
                config.input_dim,
                static_dim=config.static_dim,
                num_statistics=num_statistics,
                dim=config.dim,
                num_heads=math.gcd(4, config.dim),  # whatever the width
                dropout=config.dropout,
            )
            width += self.variables.output_dim
        self.head = nn.Sequential(
            nn.Dropout(config.dropout),
            nn.Linear(width, config.dim),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.dim, config.output_dim),
        )

    def fit_time_scale(
        self, times: Times, mask: Mask | None = None, generator: torch.Generator | None = None
    ) -> Self:
        """Set the units of time and ages, and frequencies; see `TaskModel.fit_time_scale`."""
        if self.variables is not None:
            self.variables.fit_time_scale(times, mask)
        return super().fit_time_scale(times, mask, generator)

    def forward(self, batch: SeriesBatch) -> Float[Tensor, "B O"]:
        """Return the outputs; a series without observations has only its static features."""
        values, times, mask, static, columns = self.inputs.series(batch)
        states = self.backbone.encode(columns, times, mask, static).states
        features = [pool_states(states, mask, self.config.pool)]
        if static is not None:
            features.append(with_indicators(static).to(states.dtype))
        statistics = None
        if self.config.skip:
            kinds, age_scale = self.config.statistics, self.inputs.age_scale
            statistics = summarise_series(values, times, mask, kinds, age_scale)
            features.append(statistics.to(states.dtype))
            statistics = statistics.unflatten(1, (len(kinds), -1)).transpose(1, 2)
        if self.variables is not None:
            found = self.variables(values, times, mask, static, statistics)
            features.append(found.to(states.dtype))
        return cast("Tensor", self.head(torch.cat(features, dim=-1)))


def pool_states(states: Tensor, mask: Tensor, kinds: Sequence[str]) -> Tensor:
    """Return `last, mean, max` states of the present rows side by side; zeros if there are none."""
    pools = {"last": last_state, "mean": mean_state, "max": _max_state}
    return torch.cat([pools[kind](states, mask) for kind in kinds], dim=-1)


def _max_state(states: Tensor, mask: Mask) -> Tensor:
    found = states.masked_fill(~mask[..., None], -torch.inf).amax(dim=1)
    return found.masked_fill(~mask.any(dim=1, keepdim=True), 0.0)


def summarise_series(
    values: Tensor, times: Tensor, mask: Tensor, kinds: Sequence[str], age_scale: AgeScale
) -> Tensor:
    """Return statistics of each feature over the measured values of a series, P = F per kind.

    They are `last`, `first`, `mean`, `min` and `max` of the values; `rise`, last minus first;
    `std` (of n, not n - 1); `count`, log(1 + n) / 3, about 1 for twenty values; and `age`, a
    quarter of the scaled time from the last measurement to the last row. Of a feature that was
    never measured they are zero, but for the age, which is 2, as if measured very long ago.
    """
    measured = ~values.isnan() & mask[..., None]
    count = measured.sum(dim=1)
    rows = torch.arange(values.shape[1], device=values.device)[:, None]
    latest = torch.where(measured, rows, 0).amax(dim=1)
    last = values.gather(1, latest[:, None])[:, 0]
    times = clean_times(times, mask)
    age = (times[:, -1:] - times.gather(1, latest)).to(values.dtype)
    first = values.gather(1, measured.to(torch.uint8).argmax(dim=1, keepdim=True))[:, 0]
    mean = torch.where(measured, values, 0.0).sum(dim=1) / count.clamp(min=1)

    def deviation() -> Tensor:
        apart = torch.where(measured, values - mean[:, None], 0.0)
        variance = apart.square().sum(dim=1) / count.clamp(min=1)
        # The square root has an infinite slope at 0, and infinity times 0 would be NaN.
        return torch.where(variance > 0, variance, 1.0).sqrt().masked_fill(variance == 0, 0.0)

    makers: dict[str, Callable[[], Tensor]] = {
        "last": lambda: last,
        "mean": lambda: mean,
        "min": lambda: torch.where(measured, values, torch.inf).amin(dim=1),
        "max": lambda: torch.where(measured, values, -torch.inf).amax(dim=1),
        "rise": lambda: last - first,
        "count": lambda: count.to(values.dtype).log1p() / 3.0,
        "std": deviation,
        "age": lambda: age_scale(age) / 4.0,
        "first": lambda: first,
    }
    unknown = {"age": _AGE_OF_UNKNOWN}
    found = [torch.where(count > 0, makers[kind](), unknown.get(kind, 0.0)) for kind in kinds]
    return torch.cat(found, dim=-1)


class FeatureHead(nn.Module):
    """What the history of each feature adds to the outputs of the head, in the light of the rest.

    What is known of a feature goes through weights of its own, what all share through gates of its
    own; a network that all features have in common turns their sum into outputs.
    """

    def __init__(
        self, input_dim: int, known_dim: int, shared_dim: int, dim: int, output_dim: int, p: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(input_dim, known_dim, dim) / known_dim**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(input_dim, dim))
        self.gate = nn.Parameter(1.0 + 0.1 * torch.randn(input_dim, dim))
        self.shared = nn.Linear(shared_dim, dim)
        first, second = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.inner = nn.Sequential(nn.LayerNorm(dim), first, nn.GELU(), nn.Dropout(p), second)
        last = nn.Linear(dim, output_dim)
        nn.init.normal_(last.weight, std=_FIRST_WEIGHTS)
        nn.init.zeros_(last.bias)
        self.last = nn.Sequential(nn.LayerNorm(dim), last)

    def forward(
        self,
        known: Float[Tensor, "B M F K"],
        shared: Float[Tensor, "B M S"],
        asked: Bool[Tensor, "B M F"] | None,
    ) -> Float[Tensor, "*A P"]:
        """Return outputs `[B, M, F, P]`, or `[A, P]` of the A pairs that are asked."""
        states = torch.einsum("bmfk,fkd->bmfd", known, self.weight) + self.bias
        states = states + self.shared(shared)[:, :, None] * self.gate
        states = _pick(states, asked)
        return cast("Tensor", self.last(states + self.inner(states)))


def _pick(x: Float[Tensor, "B M F *S"], asked: Bool[Tensor, "B M F"] | None) -> Tensor:
    return x if asked is None else x[asked]


class QueryModel(TaskModel):
    r"""Quantiles of every feature at any time, as corrections of a baseline prediction.

    From a read of the backbone and from all that is known at its time a network gives, per feature,
    two gates, a shift and the distances between the quantiles:

    $$\mathrm{median} = \mathrm{base} + \tanh(g_1)\,(\mathrm{level} - \mathrm{base})
    - \tanh(g_2)\,\mathrm{base} + \mathrm{shift}$$

    The base is the last known value (`causal`) or the linear interpolation (`bidirectional`), the
    level is the mean of the series. Each gate also has a slope in the time to the nearest known
    value. An untrained model predicts the base. Other quantiles add or subtract sums of positive
    steps, so they never cross. With `feature_dim` a `FeatureHead` adds to the network's outputs; in
    training it runs for the pairs of query and feature that have a target, and the quantiles of
    others are 0. In both directions the network then also gets the `deviations` of what is measured
    at the query time, and a linear map of them adds to the shift. Call `fit_time_scale` once,
    before the optimizer is built.
    """

    def __init__(self, config: QueryModelConfig) -> None:
        super().__init__(config, direction=config.direction)
        self.config = config
        if not self.backbone.can_read:
            name = config.backbone
            raise ValueError(f"{name} cannot be read at other times; choose another backbone")
        known = BaselinePrediction.num_columns(config.input_dim, config.direction)
        width = config.dim + known + 2 * config.static_dim
        per_feature = _NUM_MOVES + len(config.quantiles) - 1
        hidden = (4 if config.feature_dim else 2) * config.dim
        # What features measured at the query time say of each other, and a linear map of it.
        self.relations: nn.Linear | None = None
        if config.feature_dim and config.direction == "bidirectional":
            self.relations = nn.Linear(2 * config.input_dim, config.input_dim, bias=False)
            nn.init.zeros_(self.relations.weight)
            width += 2 * config.input_dim
        # Noise on the hidden layer would blur exact relations, such as of blood pressures.
        dropout = config.dropout if self.relations is None else 0.0
        last = nn.Linear(hidden, config.input_dim * per_feature)
        first = nn.Linear(width, hidden)
        self.head = nn.Sequential(first, nn.GELU(), nn.Dropout(dropout), last)
        # Both gates and the spreads depend on the distance to the nearest known value.
        self.distance_slopes = nn.Parameter(torch.zeros(3, config.input_dim))
        nn.init.normal_(last.weight, std=_FIRST_WEIGHTS)
        # Distances between the quantiles of a normal distribution.
        levels = torch.tensor(config.quantiles, dtype=torch.float64)
        spreads = (_FIRST_SPREAD * torch.special.ndtri(levels).diff()).float()
        bias = torch.cat((torch.zeros(_NUM_MOVES), spreads.expm1().log()))  # inverse of softplus
        with torch.no_grad():
            last.bias.copy_(bias.repeat(config.input_dim))
        self.feature_head: FeatureHead | None = None
        if config.feature_dim:
            sizes = known // config.input_dim, hidden, config.feature_dim, per_feature
            self.feature_head = FeatureHead(config.input_dim, *sizes, config.dropout)
        self._middle = config.quantiles.index(min(config.quantiles, key=lambda q: abs(q - 0.5)))

    def forward(self, batch: QueryBatch) -> Float[Tensor, "B M F Q"]:
        """Return quantiles at `batch.query_times`, not decreasing in Q; padding means nothing."""
        if batch.query_times is None:
            raise ValueError("batch.query_times must be given: the times at which values are asked")
        check_reads(batch.query_times, batch=len(batch.values), dim=self.config.dim)
        query_times = clean_times(batch.query_times, batch.query_mask)
        values, times, mask, static, columns = self.inputs.series(batch)
        reads = self.backbone.read_series(columns, times, mask, static, query_times)
        settings: Any = {"direction": self.config.direction, "age_scale": self.inputs.age_scale}
        baseline = baseline_prediction(values, times, query_times, mask, **settings)
        features = [reads, baseline.columns.to(reads.dtype)]
        if static is not None:
            fixed = with_indicators(static).to(reads.dtype)
            features.append(fixed[:, None].expand(-1, reads.shape[1], -1))
        if self.relations is not None:
            apart, measured = deviations(values, times, query_times, mask)
            together = torch.cat((apart, measured), dim=-1).to(reads.dtype)
            features.append(together)
        shared = self.head[:-1](torch.cat(features, dim=-1))
        raw = self.head[-1](shared).unflatten(-1, (self.config.input_dim, -1))
        if self.relations is not None:  # they add to the shift
            shift = self.relations(together)[..., None]
            raw = raw + functional.pad(shift, (_NUM_MOVES - 1, raw.shape[-1] - _NUM_MOVES))
        asked = self._asked(batch)
        raw = _pick(raw, asked)
        if self.feature_head is not None:
            known = baseline.columns.to(reads.dtype).unflatten(-1, (-1, self.config.input_dim))
            raw = raw + self.feature_head(known.transpose(-1, -2), shared, asked)
        found = self._quantiles(raw, baseline, asked)
        if asked is None:
            return found
        return found.new_zeros(*asked.shape, found.shape[-1]).index_put((asked,), found)

    def _asked(self, batch: QueryBatch) -> Bool[Tensor, "B M F"] | None:
        """Return which pairs of query and feature are worth the work; None is all."""
        if not self.training or self.feature_head is None or batch.targets is None:
            return None
        asked = ~batch.targets.isnan()
        return asked if batch.query_mask is None else asked & batch.query_mask[..., None]

    def _quantiles(
        self,
        raw: Float[Tensor, "*A P"],
        baseline: BaselinePrediction,
        asked: Bool[Tensor, "B M F"] | None,
    ) -> Float[Tensor, "*A Q"]:
        """Return the quantiles from the outputs of the head, `[B, M, F, 3 + Q - 1]` or fewer."""
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        slopes = baseline.distance[..., None] * self.distance_slopes.T  # [B, M, F, 3]
        base, level, slopes = (_pick(x, asked) for x in (baseline.base, baseline.level, slopes))
        to_level, to_mean = torch.tanh(raw[..., :2] + slopes[..., :2]).unbind(-1)
        median = base + to_level * (level - base) - to_mean * base + raw[..., 2]
        median = median[..., None]
        steps = functional.softplus(raw[..., _NUM_MOVES:] + slopes[..., 2:])
        below, above = steps[..., : self._middle], steps[..., self._middle :]
        below = below.flip(-1).cumsum(dim=-1).flip(-1)
        return torch.cat((median - below, median, median + above.cumsum(dim=-1)), dim=-1)
