"""What a layer refuses before it computes anything. Values are checked by the operator."""

from __future__ import annotations

from typing import Any

import torch

from osciformer._types import Tensor


def check_choice(name: str, got: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a setting that is none of the allowed ones."""
    if got not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {got!r}")


def check_tokens(x: Tensor, times: Tensor, mask: Tensor | None, *, name: str, dim: int) -> None:
    """Refuse tokens `[B, N, dim]`, times `[B, N]` and a mask `[B, N]` that do not fit."""
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"{name} must be [B, N, {dim}]; got {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor; got {x.dtype}")
    shape = x.shape[:2]
    if times.shape != shape:
        raise ValueError(
            f"times must be [B, N] = {list(shape)} like {name}; got {list(times.shape)}"
        )
    if not times.is_floating_point():
        raise ValueError(f"times must be a floating-point tensor; got {times.dtype}")
    if mask is None:
        return
    if mask.shape != shape:
        raise ValueError(f"mask must be [B, N] = {list(shape)} like {name}; got {list(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a token is present; got {mask.dtype}")


def check_reads(
    query_times: Tensor | None, query_x: Tensor | None, *, batch: int, dim: int
) -> None:
    """Refuse query times and query tokens that do not fit a batch."""
    if query_times is None:
        if query_x is not None:
            raise ValueError("query_x is given without query_times; a read needs both")
        return
    if query_times.ndim != 2 or query_times.shape[0] != batch:
        raise ValueError(
            f"query_times must be [B, M] with B = {batch}; got {list(query_times.shape)}"
        )
    if not query_times.is_floating_point():
        raise ValueError(f"query_times must be a floating-point tensor; got {query_times.dtype}")
    if query_x is not None and query_x.shape != (*query_times.shape, dim):
        raise ValueError(
            f"query_x must be [B, M, D] = {[*query_times.shape, dim]}; got {list(query_x.shape)}"
        )
