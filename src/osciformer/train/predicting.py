"""Outputs of a trained model, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from osciformer._types import Tensor
from osciformer.data.batches import Batch
from osciformer.train.config import Precision


def predict(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    device: torch.device | str = "cpu",
    precision: Precision = "32-true",
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield each batch with the model's output for it, in float32 on the CPU.

    Args:
        model: The model; it stays on the device, in evaluation mode.
        batches: Batches on the CPU; `batch.index` says which series they hold.
        device: Where to compute.
        precision: With a mixed one, computed under autocast.
    """
    device = torch.device(device)
    model = model.to(device).eval()
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    for batch in batches:
        with (
            torch.inference_mode(),
            torch.autocast(device.type, dtype, enabled=precision != "32-true"),
        ):
            output = model(batch.to(device))
        yield batch, output.float().cpu()
