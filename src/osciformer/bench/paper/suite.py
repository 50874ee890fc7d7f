"""What the paper's suites share: the small model, its training, and how they are drawn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from osciformer._types import Float, Mask, Tensor, Times, Values
from osciformer.bench.report import Row
from osciformer.math.spectrum import regime
from osciformer.nn import Spectrum, parameter_groups

#: Damping ratios within this of 1 are near-critical; the paper does not say, and its shares imply
#: about that.
NEAR = 0.02
NEAR_IN_WORDS = f"near-critical: zeta within {NEAR} of 1"

Decay = Literal["none", "decoupled", "l2"]
Batch = tuple[Tensor, ...]


class Reader(nn.Module):
    """The paper's small model: embedded values, one attention layer read at one time, an MLP.

    Args:
        attention: The layer, or what takes its place: it has a `dim` and can be read at any time.
        input_dim: Number of variables F.
        output_dim: Number of outputs.
        hidden_dim: Width of the MLP.
        sees_last: Whether the MLP is also given the last token.
    """

    def __init__(
        self,
        attention: nn.Module,
        input_dim: int,
        output_dim: int,
        *,
        hidden_dim: int = 64,
        sees_last: bool = False,
    ) -> None:
        super().__init__()
        self.attention: Any = attention
        dim: int = cast("Any", attention).dim
        self.sees_last = sees_last
        self.embedding = nn.Linear(input_dim, dim)
        first = nn.Linear(dim * (2 if sees_last else 1), hidden_dim)
        self.mlp = nn.Sequential(first, nn.ReLU(), nn.Linear(hidden_dim, output_dim))

    def forward(
        self, times: Times, values: Values, end: float, mask: Mask | None = None
    ) -> Float[Tensor, "B O"]:
        """Return the outputs at the time `end`; where `mask` is False nothing was observed."""
        tokens = self.embedding(values)
        reads = torch.full_like(times[:, :1], end)
        read = self.attention(tokens, times, mask, reads, validate=False)[:, 0]
        if self.sees_last:
            read = torch.cat((read, tokens[:, -1]), dim=-1)
        return self.mlp(read)  # type: ignore[no-any-return]


def spectra_of(model: nn.Module) -> list[Spectrum]:
    """Return all spectra of a model."""
    return [part for part in model.modules() if isinstance(part, Spectrum)]


def make_optimizer(
    model: nn.Module, *, lr: float, spectra_lr: float, weight_decay: float, spectra_decay: Decay
) -> torch.optim.Optimizer:
    """Return AdamW with a learning rate of its own, and decay of a chosen kind, for spectra.

    `decoupled` decays the raw values as AdamW does; `l2` adds the decay to the gradient, as Adam
    does with `weight_decay`, and there to all weights; `none` leaves spectra alone.
    """
    raw = [p for spectrum in spectra_of(model) for p in spectrum.parameters()]
    chosen = {id(p) for p in raw}
    groups: list[dict[str, Any]] = [
        {**group, "lr": lr, "params": [p for p in group["params"] if id(p) not in chosen]}
        for group in parameter_groups(model, weight_decay)
    ]
    decay = 0.0 if spectra_decay == "none" else weight_decay
    groups.append({"params": raw, "lr": spectra_lr, "weight_decay": decay})
    kind = torch.optim.Adam if spectra_decay == "l2" else torch.optim.AdamW
    return kind(groups)


def train(
    model: nn.Module,
    loss: Callable[[Batch], Tensor],
    data: Batch,
    *,
    epochs: int,
    seed: int,
    score: Callable[[], float],
    batch_size: int = 128,
    lr: float = 5e-3,
    spectra_lr: float = 5e-4,
    weight_decay: float = 0.01,
    spectra_decay: Decay = "none",
) -> Row:
    """Train a model with a learning rate that rises and falls, and return how it went.

    Args:
        model: What is trained.
        loss: The loss of a batch.
        data: Tensors with a row per series.
        epochs: Passes over the data.
        seed: Of the order of the batches.
        score: The score on validation series, asked after each epoch.
        batch_size: Series of a step; the last, smaller batch of an epoch is left out.
        lr: Highest learning rate.
        spectra_lr: That of the spectra.
        weight_decay: Weight decay.
        spectra_decay: Whether spectra decay, see `make_optimizer`.
    """
    order = torch.Generator().manual_seed(seed)
    rates = {"lr": lr, "spectra_lr": spectra_lr}
    optimizer = make_optimizer(
        model, **rates, weight_decay=weight_decay, spectra_decay=spectra_decay
    )
    per_epoch = len(data[0]) // batch_size
    highest = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, total_steps=epochs * per_epoch, pct_start=0.1, cycle_momentum=False
    )
    scores, seconds = [], []
    for _ in range(epochs):
        started = time.process_time()
        for rows in torch.randperm(len(data[0]), generator=order).split(batch_size)[:per_epoch]:
            optimizer.zero_grad()
            loss(tuple(part[rows] for part in data)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        seconds.append(time.process_time() - started)
        with torch.no_grad():
            scores.append(score())
    return {
        "scores": scores,
        "epoch_seconds": round(statistics.median(seconds), 3),
        "fit_seconds": round(sum(seconds), 2),
        "steps": epochs * per_epoch,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def regimes(zeta: Float[Tensor, " C"]) -> Row:
    """Return the shares of damping regimes, in per cent, and the median, as the paper has them."""
    found = regime(torch.ones(()), zeta, tolerance=NEAR)
    shares = {
        name: 100 * float((found == sign).double().mean())
        for sign, name in enumerate(("under", "near", "over"), start=-1)
    }
    return {**shares, "median_zeta": float(zeta.quantile(0.5))}


def zetas(model: nn.Module) -> Float[Tensor, " C"]:
    """Return the damping ratios of all channels of a model."""
    found = [spectrum.zeta.detach().flatten() for spectrum in spectra_of(model)]
    return torch.cat(found).double()


def band(axis: Any, x: Any, curves: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """Draw the mean of some curves, and their range."""
    values = np.array(curves)
    axis.fill_between(x, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, lw=0)
    axis.plot(x, values.mean(axis=0), "-o", color=colour, ms=3, lw=1.3, label=label)
