"""Tokens, vector fields and layers that the tests of ContiFormer share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from osciformer.baselines import ContiFormerAttention, VectorField

HEADS, CHANNELS = 2, 2
WIDTH = HEADS * CHANNELS
QUERIES = ("hermite", "linear")
DIRECTIONS = ("causal", "bidirectional")
QUADRATURES = ("gauss", "trapezoid")


def make_tokens(length: int = 4, batch: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
    """Return q, k, v [B, N, H, C] and times [B, N], float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(
        3, batch, length, HEADS, CHANNELS, generator=generator, dtype=torch.float64
    )
    gaps = 0.2 + torch.rand(batch, length, generator=generator, dtype=torch.float64)
    return q, k, v, gaps.cumsum(dim=1)


def make_fields(**settings) -> dict[str, VectorField]:
    """Return fields in which every parameter matters."""
    fields = {name: VectorField(WIDTH, **settings).double() for name in ("key", "value")}
    for parameter in (p for field in fields.values() for p in field.parameters()):
        nn.init.normal_(parameter, std=0.7)
    return {f"{name}_field": field for name, field in fields.items()}


def make_layer(**settings) -> ContiFormerAttention:
    return ContiFormerAttention(8, 2, **{"num_nodes": 2, "step": 0.5, **settings}).double()


def linear_field(matrix: Tensor):
    return lambda t, y: y @ matrix.T


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), inputs)
