"""Models built from the layers."""

import warnings
from typing import Any

from osciformer.config import OsciFormerConfig as OsciFormerConfig
from osciformer.config import QueryModelConfig as QueryModelConfig
from osciformer.config import SeriesModelConfig as SeriesModelConfig
from osciformer.models.backbones import Backbone as Backbone
from osciformer.models.backbones import register_backbone as register_backbone
from osciformer.models.forward_fill import forward_fill as forward_fill
from osciformer.models.osciformer import OsciFormer as OsciFormer
from osciformer.models.task_models import QueryBatch as QueryBatch
from osciformer.models.task_models import QueryModel as QueryModel
from osciformer.models.task_models import SeriesBatch as SeriesBatch
from osciformer.models.task_models import SeriesModel as SeriesModel


def __getattr__(name: str) -> Any:
    if name == "carry_forward":
        message = "osciformer.models.carry_forward is called forward_fill"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return forward_fill
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
