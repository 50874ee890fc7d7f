"""What the models of all tasks share."""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor
from osciformer.models.backbones import Backbone
from osciformer.models.inputs import SeriesInputs


class TaskModel(nn.Module):
    """A model with columns as inputs and a backbone that encodes them.

    Attributes:
        inputs: From values, last known values and ages to columns.
        backbone: From columns to states.
    """

    inputs: SeriesInputs
    backbone: Backbone

    def fit_time_scale(
        self,
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Set the unit of time, the unit of ages, and frequencies that come from the data.

        Args:
            times: Times of the training set, or of a fair sample. Where no series has two distinct
                times, nothing is changed.
            mask: True where an observation is present.
            generator: Source of randomness of the spectra.

        Returns:
            This model.
        """
        self.inputs.age_scale.fit(times, mask)
        self.backbone.fit_time_scale(times, mask, generator)
        return self
