"""ContiFormer as a backbone of the task models."""

from __future__ import annotations

from typing import Any, cast

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.models.backbones import Backbone
from osciformer.models.baselines.contiformer import ContiFormerAttention
from osciformer.nn.embedding import SeriesEmbedding
from osciformer.nn.encoder import Encoded, Encoder, EncoderBlock
from osciformer.nn.timeline import TimeScale


class ContiFormerBackbone(Backbone):
    """Encoder blocks with ContiFormer attention. It cannot be read between observations.

    Args:
        input_dim: Number of input columns.
        static_dim: Number of static features S.
        dim: Width D.
        num_layers: Number of blocks.
        num_heads: Number of heads H.
        feedforward_dim: Hidden width of the feed-forward; None is 4 D.
        dropout: Dropout of attention and feed-forward.
        options: Settings of `ContiFormerAttention`.

    Example:
        >>> backbone = ContiFormerBackbone(3, dim=8, num_heads=2)
        >>> times, mask = torch.rand(2, 5).sort().values, torch.ones(2, 5, dtype=torch.bool)
        >>> backbone.encode(torch.randn(2, 5, 3), times, mask).states.shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        num_layers: int = 1,
        num_heads: int = 2,
        feedforward_dim: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.time_scale = TimeScale()
        self.embedding = SeriesEmbedding(input_dim, dim, static_dim=static_dim)
        self.encoder = Encoder(
            EncoderBlock(
                # It has the part of OscillatorAttention's interface that a block uses to encode.
                cast("Any", ContiFormerAttention(dim, num_heads, dropout=dropout, **options)),
                feedforward_dim=feedforward_dim,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )

    def encode(
        self,
        values: Float[Tensor, "B N F"],
        times: Float[Tensor, "B N"],
        mask: Bool[Tensor, "B N"],
        static: Float[Tensor, "B S"] | None = None,
    ) -> Encoded:
        """Return the encoded series, see `Backbone.encode`."""
        tokens = self.embedding(values, static=static)
        encoded: Encoded = self.encoder(tokens, self.time_scale(times), mask)
        return encoded

    def read(self, encoded: Any, query_times: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Refuse: the attention has rows at the observations only."""
        raise NotImplementedError("contiformer has states at the observations only")

    def _fit_time_scale(
        self, times: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> None:
        self.time_scale.fit(times, mask)
