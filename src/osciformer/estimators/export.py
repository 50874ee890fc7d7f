"""Trained networks as programs of `torch.export`, which need the operators of this package only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from osciformer._files import replacing
from osciformer._types import Bool, Float, Tensor
from osciformer.data.transforms import SeriesTransform

#: The largest difference of scaled outputs between a program and the network it comes from.
TOLERANCE = 1e-4


class ServedNetwork(nn.Module):
    """A network from values in the units of the data to probabilities or targets."""

    def __init__(self, network: nn.Module, transform: SeriesTransform, last: nn.Module) -> None:
        super().__init__()
        self.network, self.transform, self.last = network, transform, last

    def forward(
        self,
        times: Float[Tensor, "B N"],
        values: Float[Tensor, "B N F"],
        mask: Bool[Tensor, "B N"],
        static: Float[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B O"]:
        """Return probabilities, or targets, of padded series."""
        if static is not None and self.transform.static_scaler is not None:
            static = self.transform.static_scaler.transform(static)
        scaled = self.transform.value_scaler.transform(values)
        batch = SimpleNamespace(times=times, values=scaled, mask=mask, static=static)
        found: Tensor = self.last(self.network(batch).double())
        return found


class MeanNetwork(nn.Module):
    """Several networks, whose outputs it averages."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, batch: SimpleNamespace) -> Float[Tensor, "B O"]:
        """Return the mean of what the networks say of padded series."""
        return torch.stack([network(batch) for network in self.networks]).mean(dim=0)


class Probabilities(nn.Module):
    """Logits as probabilities."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, logits: Tensor) -> Tensor:
        """Return the probability of each class."""
        return (logits / self.temperature).softmax(dim=-1)


class Targets(nn.Module):
    """Scaled targets in their own unit."""

    center: Tensor
    scale: Tensor

    def __init__(self, center: np.ndarray, scale: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("center", torch.from_numpy(center))
        self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, outputs: Tensor) -> Tensor:
        """Return the targets."""
        return outputs * self.scale + self.center


def write_program(path: str | Path, served: ServedNetwork, length: int, num_features: int) -> Path:
    """Trace a network for any number of series of `length` rows, check it, and write it.

    Raises:
        RuntimeError: If the program and the network differ by more than `TOLERANCE`, for other
            series, and another number of them, than it was traced with.
    """
    if Path(path).suffix != ".pt2":
        raise ValueError(f"path must end in .pt2, the ending of torch.export; got {path}")
    served = served.eval()
    static = served.transform.static_scaler
    num_static = 0 if static is None else len(static.center)
    traced = _example(2, length, num_features, num_static, seed=0)
    sizes = tuple({0: torch.export.Dim("batch", min=1)} for _ in traced)
    with torch.no_grad():
        program = torch.export.export(served, traced, dynamic_shapes=sizes, strict=False)
        for count in (1, 5):
            given = _example(count, length, num_features, num_static, seed=count)
            _compare(program.module()(*given), served(*given), served.last)
    with replacing(path) as part, part.open("wb") as file:
        torch.export.save(program, file)
    return Path(path)


def _compare(found: Tensor, expected: Tensor, last: nn.Module) -> None:
    unit = last.scale if isinstance(last, Targets) else 1.0
    error = float(((found - expected) / unit).abs().max())
    if not error <= TOLERANCE:
        raise RuntimeError(
            f"the exported program differs from the network by {error:.1e}, so that it is not "
            "written; another version of torch may trace it better"
        )


def _example(batch: int, length: int, features: int, static: int, seed: int) -> tuple[Tensor, ...]:
    """Return series of random lengths, with gaps."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.rand(batch, length, generator=generator, dtype=torch.float64).cumsum(dim=1)
    values = torch.randn(batch, length, features, generator=generator)
    values[torch.rand(values.shape, generator=generator) < 0.2] = torch.nan
    counts = torch.randint(1, length + 1, (batch, 1), generator=generator)
    series = times, values, torch.arange(length) < counts
    return (*series, torch.randn(batch, static, generator=generator)) if static else series
