"""Values at any time, with quantiles: forecasting and imputation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Float, Tensor
from osciformer.models.anchors import Anchors, find_anchors, num_anchor_columns
from osciformer.models.factory import make_backbone
from osciformer.models.inputs import SeriesInputs, static_columns
from osciformer.models.task_batch import QueryBatch
from osciformer.models.task_config import QueryModelConfig
from osciformer.models.task_model import TaskModel
from osciformer.nn.checks import check_reads
from osciformer.ops.padding import clean_times

# Two gates and a shift of each feature; its spreads come after them.
_NUM_MOVES = 3
# The first spread of an untrained model, in standard deviations of a scaled feature.
_FIRST_SPREAD = 0.5
# Standard deviation of the last map's first weights: an untrained model says about its anchor.
_FIRST_WEIGHTS = 1e-3


class QueryModel(TaskModel):
    r"""Quantiles of every feature at any time, as corrections of what a simple method says.

    A backbone encodes the series and is read at the query times. From a read and from all that is
    known at its time (see `find_anchors`) a network gives, per feature, two gates, a shift and the
    distances between the quantiles:

    $$\mathrm{median} = \mathrm{base} + \tanh(g_1)\,(\mathrm{level} - \mathrm{base})
    - \tanh(g_2)\,\mathrm{base} + \mathrm{shift}$$

    The base is the last known value (`causal`) or the linear interpolation (`bidirectional`), the
    level is the mean of the series, and zero is the mean of all series, since values are scaled.
    Each gate also has a slope in the time to the nearest known value. Untrained, the model says the
    base. Other quantiles are the median plus or minus sums of positive steps, so they never cross.

    Call `fit_time_scale` once with the training times, before the optimizer is built.

    Args:
        config: The configuration.

    Example:
        >>> from types import SimpleNamespace
        >>> times = 48 * torch.rand(4, 20).sort().values
        >>> mask = torch.ones(4, 20, dtype=torch.bool)
        >>> batch = SimpleNamespace(
        ...     times=times, values=torch.randn(4, 20, 3), mask=mask, static=None
        ... )
        >>> batch.query_times, batch.query_mask = torch.full((4, 5), 50.0), None
        >>> model = QueryModel(QueryModelConfig(input_dim=3)).fit_time_scale(times, mask)
        >>> model(batch).shape
        torch.Size([4, 5, 3, 3])
    """

    def __init__(self, config: QueryModelConfig) -> None:
        super().__init__()
        self.config = config
        self.inputs = SeriesInputs(config)
        self.backbone = make_backbone(config, self.inputs.num_columns, direction=config.direction)
        known = num_anchor_columns(config.input_dim, config.direction)
        width = config.dim + known + 2 * config.static_dim
        per_feature = _NUM_MOVES + len(config.quantiles) - 1
        last = nn.Linear(2 * config.dim, config.input_dim * per_feature)
        self.head = nn.Sequential(
            nn.Linear(width, 2 * config.dim),
            nn.GELU(),
            nn.Dropout(config.dropout),
            last,
        )
        # Both gates and the spreads depend on the distance to the nearest known value.
        self.distance_slopes = nn.Parameter(torch.zeros(3, config.input_dim))
        nn.init.normal_(last.weight, std=_FIRST_WEIGHTS)
        spreads = _first_spreads(config.quantiles)
        bias = torch.cat((torch.zeros(_NUM_MOVES), spreads.expm1().log()))  # inverse of softplus
        with torch.no_grad():
            last.bias.copy_(bias.repeat(config.input_dim))
        self._middle = min(
            range(len(config.quantiles)), key=lambda n: abs(config.quantiles[n] - 0.5)
        )

    def forward(self, batch: QueryBatch) -> Float[Tensor, "B M F Q"]:
        """Return the quantiles of each feature at `batch.query_times`, not decreasing in Q.

        Where `batch.query_mask` is False the result means nothing.
        """
        if batch.query_times is None:
            raise ValueError("batch.query_times must be given: the times at which values are asked")
        check_reads(batch.query_times, None, batch=len(batch.values), dim=self.config.dim)
        query_times = clean_times(batch.query_times, batch.query_mask)
        values, times, mask = self.inputs.rows(batch)
        static = self.inputs.static(batch)
        columns = self.inputs(values, times, mask)
        reads = self.backbone.read_series(columns, times, mask, static, query_times)
        anchors = find_anchors(
            values,
            times,
            query_times,
            mask,
            direction=self.config.direction,
            age_scale=self.inputs.age_scale,
        )
        features = [reads, anchors.columns.to(reads.dtype)]
        if static is not None:
            fixed = static_columns(static).to(reads.dtype)
            features.append(fixed[:, None].expand(-1, reads.shape[1], -1))
        return self._quantiles(self.head(torch.cat(features, dim=-1)), anchors)

    def _quantiles(self, raw: Float[Tensor, "B M P"], anchors: Anchors) -> Tensor:
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        raw = raw.unflatten(-1, (self.config.input_dim, -1))  # [B, M, F, 3 + Q - 1]
        slopes = anchors.distance[..., None] * self.distance_slopes.T  # [B, M, F, 3]
        gates = torch.tanh(raw[..., :2] + slopes[..., :2])
        median = (
            anchors.base
            + gates[..., 0] * (anchors.level - anchors.base)
            - gates[..., 1] * anchors.base
            + raw[..., 2]
        )[..., None]
        steps = functional.softplus(raw[..., _NUM_MOVES:] + slopes[..., 2:])
        below, above = steps[..., : self._middle], steps[..., self._middle :]
        below = below.flip(-1).cumsum(dim=-1).flip(-1)
        return torch.cat((median - below, median, median + above.cumsum(dim=-1)), dim=-1)


def _first_spreads(levels: tuple[float, ...]) -> Float[Tensor, "P"]:
    """Return the distances between the quantiles of a normal distribution."""
    normal = torch.special.ndtri(torch.tensor(levels, dtype=torch.float64))
    return (_FIRST_SPREAD * normal.diff()).float()
