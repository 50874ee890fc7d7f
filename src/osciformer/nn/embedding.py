"""Tokens from values, missingness and static features."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Bool, Float, Tensor


class SeriesEmbedding(nn.Module):
    """Tokens from the values at each time, which of them were measured, and static features.

    A missing feature counts as zero and switches its own learned vector off, so the model can
    tell a measured zero from nothing. Values should therefore be scaled to zero mean.

    Args:
        input_dim: Number of features F.
        dim: Width D of the tokens.
        static_dim: Number of static features S; 0 for none.

    Example:
        >>> embed = SeriesEmbedding(3, 8, static_dim=2)
        >>> values = torch.tensor([[[1.0, float("nan"), 0.5]]])
        >>> embed(values, static=torch.zeros(1, 2)).shape
        torch.Size([1, 1, 8])
    """

    def __init__(self, input_dim: int, dim: int, *, static_dim: int = 0) -> None:
        super().__init__()
        if input_dim < 1 or static_dim < 0:
            raise ValueError(
                f"input_dim must be at least 1 and static_dim at least 0; "
                f"got input_dim={input_dim}, static_dim={static_dim}"
            )
        self.input_dim, self.static_dim = input_dim, static_dim
        self.values = nn.Linear(2 * input_dim, dim)
        self.static = nn.Linear(2 * static_dim, dim, bias=False) if static_dim else None

    def forward(
        self,
        values: Float[Tensor, "B N F"],
        observed: Bool[Tensor, "B N F"] | None = None,
        *,
        static: Float[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Return one token per time.

        Args:
            values: Values; NaN is a missing one.
            observed: True where a value was measured; None takes all that are not NaN.
            static: Static features; NaN is a missing one. None if the embedding has none.
        """
        if values.ndim != 3 or values.shape[2] != self.input_dim:
            raise ValueError(f"values must be [B, N, {self.input_dim}]; got {list(values.shape)}")
        if observed is not None and observed.shape != values.shape:
            raise ValueError(
                f"observed must have the shape of values {list(values.shape)}; "
                f"got {list(observed.shape)}"
            )
        tokens = self.values(_with_indicators(values, observed, self.values.weight.dtype))
        if self.static is None:
            if static is not None:
                raise ValueError("static is given, but the embedding has static_dim=0")
            return tokens
        if static is None or static.shape != (values.shape[0], self.static_dim):
            got = None if static is None else list(static.shape)
            raise ValueError(f"static must be {[values.shape[0], self.static_dim]}; got {got}")
        features = _with_indicators(static, None, self.static.weight.dtype)
        return tokens + self.static(features)[:, None]


def _with_indicators(values: Tensor, observed: Tensor | None, dtype: torch.dtype) -> Tensor:
    measured = ~values.isnan()
    if observed is not None:
        measured = measured & observed
    filled = torch.where(measured, values, 0.0).to(dtype)
    return torch.cat((filled, measured.to(dtype)), dim=-1)
