"""Models built from the layers."""

from osciformer.models.backbones import Backbone as Backbone
from osciformer.models.carry import carry_forward as carry_forward
from osciformer.models.config import OsciFormerConfig as OsciFormerConfig
from osciformer.models.osciformer import OsciFormer as OsciFormer
from osciformer.models.query_model import QueryModel as QueryModel
from osciformer.models.series_model import SeriesModel as SeriesModel
from osciformer.models.task_batch import QueryBatch as QueryBatch
from osciformer.models.task_batch import SeriesBatch as SeriesBatch
from osciformer.models.task_config import QueryModelConfig as QueryModelConfig
from osciformer.models.task_config import SeriesModelConfig as SeriesModelConfig
