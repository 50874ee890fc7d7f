"""A classifier like InceptionTime (Ismail Fawaz et al. 2020): one network, where that has five."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

KERNELS = (39, 19, 9)
WIDTH = 32
NUM_BLOCKS = 6
BATCH = 64
LEARNING_RATE = 1e-3
#: Batches that a network is trained with, at least; and the fewest epochs.
FEWEST_STEPS = 1000
FEWEST_EPOCHS = 25


class Block(nn.Module):
    """Convolutions of several lengths beside each other: [B, I, T] to [B, 4 * WIDTH, T]."""

    def __init__(self, inputs: int, kernels: tuple[int, ...] = KERNELS) -> None:
        super().__init__()
        self.narrow = nn.Conv1d(inputs, WIDTH, 1, bias=False) if inputs > 1 else nn.Identity()
        narrow = WIDTH if inputs > 1 else 1
        self.branches = nn.ModuleList(
            nn.Conv1d(narrow, WIDTH, kernel, padding=kernel // 2, bias=False) for kernel in kernels
        )
        self.largest = nn.Sequential(nn.MaxPool1d(3, 1, 1), nn.Conv1d(inputs, WIDTH, 1, bias=False))
        self.norm = nn.BatchNorm1d((len(kernels) + 1) * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of x, without the nonlinearity."""
        narrow = self.narrow(x)
        found = [branch(narrow) for branch in self.branches]
        normed: Tensor = self.norm(torch.cat([*found, self.largest(x)], dim=1))
        return normed


class Inception(nn.Module):
    """Six blocks with a residual connection around each three: [B, F, T] to logits [B, C]."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        out = (len(KERNELS) + 1) * WIDTH
        sizes = [features, *[out] * (NUM_BLOCKS - 1)]
        self.blocks = nn.ModuleList(Block(size) for size in sizes)
        self.shortcuts = nn.ModuleList(
            nn.Sequential(nn.Conv1d(size, out, 1, bias=False), nn.BatchNorm1d(out))
            for size in sizes[::3]
        )
        self.head = nn.Linear(out, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        kept = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 3 == 2:
                x = x + self.shortcuts[number // 3](kept)
            x = torch.relu(x)
            kept = x if number % 3 == 2 else kept
        logits: Tensor = self.head(x.mean(dim=-1))
        return logits


def num_epochs(series: int) -> int:
    """Return how long to train: few series make few batches an epoch, so they get more of them.

    >>> num_epochs(30), num_epochs(640), num_epochs(10_000)
    (1000, 100, 25)
    """
    return max(FEWEST_EPOCHS, -(-FEWEST_STEPS // -(-series // BATCH)))


def fit_predict(
    train: np.ndarray,
    labels: np.ndarray,
    test: np.ndarray,
    *,
    seed: int,
    device: str = "cpu",
    epochs: int | None = None,
) -> np.ndarray:
    """Train with Adam and return the classes of the test series [m].

    Args:
        train: Training series [n, F, T] on a grid.
        labels: Their classes [n], from 0 on.
        test: Test series [m, F, T].
        seed: Of weights and the order of series.
        device: Where to compute.
        epochs: How long to train; `num_epochs` of the number of series if not given.
    """
    epochs = num_epochs(len(train)) if epochs is None else epochs
    center = train.mean(axis=(0, 2), keepdims=True)
    scale = np.maximum(train.std(axis=(0, 2), keepdims=True), 1e-8)
    x, z = (torch.from_numpy((part - center) / scale).float().to(device) for part in (train, test))
    y = torch.from_numpy(labels).long().to(device)
    torch.manual_seed(seed)
    model = Inception(train.shape[1], int(labels.max()) + 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        # Parts of about the same size: statistics of one last series would be useless.
        for index in torch.randperm(len(x)).to(device).tensor_split(-(-len(x) // BATCH)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        parts = [model.eval()(part).argmax(dim=1) for part in z.split(BATCH)]
    return torch.cat(parts).cpu().numpy()
