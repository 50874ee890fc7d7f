"""Published models to compare with, written anew, one file each."""

from osciformer.models.baselines.contiformer import ContiFormerAttention as ContiFormerAttention
from osciformer.models.baselines.contiformer import VectorField as VectorField
from osciformer.models.baselines.contiformer import contiformer_attention as contiformer_attention
