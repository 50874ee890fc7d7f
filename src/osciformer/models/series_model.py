"""One prediction per series: classification and regression."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.models.factory import make_backbone
from osciformer.models.foresight import Foresight, SideLoss
from osciformer.models.inputs import SeriesInputs, static_columns
from osciformer.models.pooling import pool_states, summarise_series
from osciformer.models.task_batch import SeriesBatch
from osciformer.models.task_config import SeriesModelConfig
from osciformer.models.task_model import TaskModel


class SeriesModel(TaskModel):
    """Class logits or real outputs of whole series.

    Values, last known values and their ages become tokens, a backbone encodes them, their states
    are pooled, and a small network maps the pooled states, the static features and, if asked for,
    statistics of the series to the outputs. Values and static features should be scaled to zero
    mean. Call `fit_time_scale` once with the training times, before the optimizer is built.
    Training is by `learn`, which besides the outputs gives the loss of `Foresight`.

    Args:
        config: The configuration.

    Example:
        >>> from types import SimpleNamespace
        >>> times = 48 * torch.rand(4, 20).sort().values
        >>> mask = torch.ones(4, 20, dtype=torch.bool)
        >>> model = SeriesModel(SeriesModelConfig(input_dim=3, output_dim=2))
        >>> batch = SimpleNamespace(
        ...     times=times, values=torch.randn(4, 20, 3), mask=mask, static=None
        ... )
        >>> model.fit_time_scale(times, mask)(batch).shape
        torch.Size([4, 2])
    """

    def __init__(self, config: SeriesModelConfig) -> None:
        super().__init__()
        self.config = config
        self.inputs = SeriesInputs(config)
        self.backbone = make_backbone(config, self.inputs.num_columns)
        width = config.dim * len(config.pool) + 2 * config.static_dim
        width += len(config.statistics) * config.input_dim if config.skip else 0
        self.head = nn.Sequential(
            nn.Dropout(config.dropout),
            nn.Linear(width, config.dim),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.dim, config.output_dim),
        )
        self.foresight: Foresight | None = None
        if config.foresight > 0:
            self.foresight = Foresight(config.dim, config.input_dim, dropout=config.dropout)

    def forward(self, batch: SeriesBatch) -> Float[Tensor, "B O"]:
        """Return the outputs; a series without observations has only its static features."""
        return self._encode(batch)[0]

    def learn(self, batch: SeriesBatch) -> tuple[Float[Tensor, "B O"], SideLoss | None]:
        """Return the outputs and, if it is configured, how well the states foresee what follows.

        The targets are all that was measured, also what is hidden from the states in training.
        """
        outputs, states = self._encode(batch)
        if self.foresight is None:
            return outputs, None
        side = self.foresight(
            states,
            batch.values,
            batch.times,
            batch.mask,
            self.inputs.age_scale,
            weight=self.config.foresight,
        )
        return outputs, side

    def _encode(self, batch: SeriesBatch) -> tuple[Float[Tensor, "B O"], Float[Tensor, "B N D"]]:
        values, times, mask = self.inputs.rows(batch)
        static = self.inputs.static(batch)
        states = self.backbone.encode(self.inputs(values, times, mask), times, mask, static).states
        features = [pool_states(states, mask, self.config.pool)]
        if static is not None:
            features.append(static_columns(static).to(states.dtype))
        if self.config.skip:
            statistics = summarise_series(
                values, times, mask, self.config.statistics, self.inputs.age_scale
            )
            features.append(statistics.to(states.dtype))
        return self.head(torch.cat(features, dim=-1)), states
