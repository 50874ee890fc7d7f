"""Reconstruct a ringing signal from a few noisy readings at random times.

A struck bar rings at three frequencies, of which the model is told only a wide range. Each blow
gives other amplitudes, phases and decay rates, and a sensor reads it at random times, with noise.
The model sees the readings and gives the signal in between, for blows not seen in training.

Run `python examples/01_irregular_signal.py`. Expect less than two minutes on a CPU, an error well
below that of linear interpolation of the same readings, and a picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from osciformer._optional import need
from osciformer.models import OsciFormer
from osciformer.nn import parameter_groups

SEED = 0
FREQUENCIES = (1.2, 2.2, 3.6)  # of the bar, in radians per second
SPAN = 10.0  # seconds
NUM_READINGS = 24
NUM_TARGETS = 16  # random times a blow at which training compares
NOISE = 0.1
# Frequencies start in a wide range, in radians per span; the bar's are 12 to 36.
SETTINGS = {"direction": "bidirectional", "value": "point", "num_heads": 2, "omega_range": (5, 60)}
LEARNING_RATE = 1e-2
PICTURE = Path("outputs/irregular_signal.png")


def strike(batch: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Return the signals of `batch` random blows, as a function of times [B, M]."""
    amplitude, phase, decay = torch.rand(3, batch, 1, len(FREQUENCIES), generator=generator)

    def signal(times: Tensor) -> Tensor:
        t = times[..., None]
        wave = torch.sin(torch.tensor(FREQUENCIES) * t + 2 * torch.pi * phase)
        return (2 * amplitude * torch.exp(-0.2 * decay * t) * wave).sum(dim=-1)

    return signal


def read_sensor(signal: Callable, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sorted random times and noisy readings, both [B, N]."""
    times = SPAN * torch.rand(batch, NUM_READINGS, generator=generator).sort(dim=1).values
    return times, signal(times) + NOISE * torch.randn(times.shape, generator=generator)


def interpolate(times: Tensor, readings: Tensor, query_times: Tensor) -> Tensor:
    """Return straight lines through the readings, constant outside them."""
    right = torch.searchsorted(times, query_times).clamp(1, times.shape[1] - 1)
    t0, t1 = times.gather(1, right - 1), times.gather(1, right)
    y0, y1 = readings.gather(1, right - 1), readings.gather(1, right)
    return y0 + ((query_times - t0) / (t1 - t0)).clamp(0, 1) * (y1 - y0)


def reconstruct(model: nn.ModuleDict, times: Tensor, readings: Tensor, at: Tensor) -> Tensor:
    """Return the signal at the times `at` [B, M]: the backbone is read there."""
    encoded = model["backbone"](readings[..., None], times, query_times=at)
    return model["head"](encoded.reads)[..., 0]


def main(steps=200, batch_size=16, num_test=100, dim=16, picture=PICTURE) -> dict[str, float]:
    pyplot = need("matplotlib.pyplot", extra="plot")  # asked for here, not after the training
    torch.manual_seed(SEED)
    train, test = torch.Generator().manual_seed(SEED + 1), torch.Generator().manual_seed(SEED + 3)

    # Both directions, since readings before and after count; point values keep the phase.
    backbone = OsciFormer(1, dim=dim, **SETTINGS)
    backbone.fit_time_scale(read_sensor(strike(256, train), 256, train)[0])
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(dim, 1)})
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=1e-2), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    start = time.time()
    for step in range(1, steps + 1):
        signal = strike(batch_size, train)
        query_times = SPAN * torch.rand(batch_size, NUM_TARGETS, generator=train)
        prediction = reconstruct(model, *read_sensor(signal, batch_size, train), query_times)
        loss = (prediction - signal(query_times)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress = f"step {step}/{steps}  loss {loss.item():.4f}  {time.time() - start:.0f} s "
        print(f"\r{progress}", end="", flush=True)

    signal = strike(num_test, test)
    times, readings = read_sensor(signal, num_test, test)
    grid = torch.linspace(0.0, SPAN, 201).repeat(num_test, 1)
    truth, curves = signal(grid), {"linear interpolation": interpolate(times, readings, grid)}
    with torch.no_grad():
        curves["OsciFormer"] = reconstruct(model, times, readings, grid)
    errors = {name: (c - truth).square().mean().sqrt().item() for name, c in curves.items()}
    print(f"\nroot mean square error on {num_test} new blows (noise {NOISE}):")
    print("\n".join(f"  {name:<22}{error:.3f}" for name, error in errors.items()))

    figure, axes = pyplot.subplots(3, figsize=(9, 8), sharex=True, layout="constrained")
    for row, axis in enumerate(axes):
        axis.plot(grid[row], truth[row], color="0.75", linewidth=5, label="truth")
        for color, (name, curve) in zip(("C1", "C0"), curves.items(), strict=True):
            axis.plot(grid[row], curve[row], color=color, label=name)
        axis.plot(times[row], readings[row], "ko", markersize=4, label="readings")
    axes[0].set_title("Three blows that the model has not seen")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    axes[-1].set_xlabel("time (s)")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")
    return errors


if __name__ == "__main__":
    main()
