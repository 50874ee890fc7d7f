"""Modules whose numbers keep their precision when a model changes its dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ExactBuffers(nn.Module):
    """A module whose own buffers move with the model to a device, but are never rounded."""

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> ExactBuffers:
        exact = dict(self._buffers)
        super()._apply(fn, *args, **kwargs)
        for name, before in exact.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


def at_least_float32(before: Tensor, after: Tensor) -> Tensor:
    """Return `after`, or `before` in float32 on its device where `after` has half precision."""
    if after.dtype in (torch.float16, torch.bfloat16):
        return before.to(device=after.device, dtype=torch.float32)
    return after
