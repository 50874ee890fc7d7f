"""Models built from the layers."""

from osciformer.models.config import OsciFormerConfig as OsciFormerConfig
from osciformer.models.osciformer import OsciFormer as OsciFormer
