"""Published models to compare with, written anew, one file each."""

from osciformer.models.baselines.contiformer import ContiFormerAttention as ContiFormerAttention
from osciformer.models.baselines.contiformer import VectorField as VectorField
from osciformer.models.baselines.contiformer import contiformer_attention as contiformer_attention
from osciformer.models.baselines.gru_d import GRUD as GRUD
from osciformer.models.baselines.transformer import DotProductAttention as DotProductAttention
from osciformer.models.baselines.transformer import TimeTransformer as TimeTransformer
