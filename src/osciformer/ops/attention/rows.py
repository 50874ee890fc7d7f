"""Rows of a padded batch by index, one list of indices a series."""

from __future__ import annotations

import torch
from torch import Tensor


def _flat_index(index: Tensor, length: int) -> Tensor:
    offset = torch.arange(index.shape[0], device=index.device).unsqueeze(-1) * length
    return (index + offset).flatten()


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[b, index[b, i]]`` for ``[B, N, ...]`` and ``[B, I]``."""
    rows = _flat_index(index, x.shape[1])
    return x.flatten(0, 1).index_select(0, rows).unflatten(0, index.shape)


def add_rows(x: Tensor, index: Tensor, value: Tensor) -> None:
    """Add ``value[b, i]`` to ``x[b, index[b, i]]``, in place; the adjoint of `take_rows`."""
    x.flatten(0, 1).index_add_(0, _flat_index(index, x.shape[1]), value.flatten(0, 1))
