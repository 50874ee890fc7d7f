"""From a configuration to its backbone."""

from __future__ import annotations

from typing import Any

from osciformer.models.backbones import Backbone, OsciFormerBackbone
from osciformer.models.baselines.contiformer_backbone import ContiFormerBackbone
from osciformer.models.baselines.gru_d import GRUD
from osciformer.models.baselines.transformer import TimeTransformer
from osciformer.models.config import OsciFormerConfig
from osciformer.models.task_config import TaskConfig


def make_backbone(config: TaskConfig, input_dim: int, **options: Any) -> Backbone:
    """Return the backbone of a task model.

    Args:
        config: Configuration of the task model.
        input_dim: Columns of the backbone's input, more than the features if values are carried.
        options: Options of the backbone besides `config.backbone_options`.
    """
    sizes: dict[str, Any] = {
        "input_dim": input_dim,
        "static_dim": config.static_dim,
        "dim": config.dim,
        "dropout": config.dropout,
    }
    options = {**config.backbone_options, **options}
    if config.backbone == "gru_d":
        return GRUD(**sizes, **options)
    sizes |= {"num_layers": config.num_layers, "num_heads": config.num_heads}
    if config.backbone == "transformer":
        return TimeTransformer(**sizes, **options)
    if config.backbone == "contiformer":
        return ContiFormerBackbone(**sizes, **options)
    preset = options.pop("preset", "default")
    return OsciFormerBackbone(OsciFormerConfig.from_preset(preset, **sizes, **options))
