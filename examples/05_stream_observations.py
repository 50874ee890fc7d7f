"""Raise an alarm while observations arrive, one at a time.

A motor hums. When a bearing breaks, at a random moment, it hums faster. A sensor reads it at
random times. After each reading the model says how likely it is that the bearing has broken.

The trap: a model that is trained on whole series may use the future, and then looks better in a
test than it can be in service. A causal model does not, and it gives the same numbers when it is
fed one reading at a time: `OnlineSession` does that, and refuses a model that looks ahead.

Run `python examples/05_stream_observations.py`. Expect about a minute on a CPU, a table of delays,
and a difference between streaming and batch at the level of rounding.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from osciformer import OnlineSession, OsciFormer
from osciformer.nn import parameter_groups

SEED = 0
HUM = (1.0, 3.0)  # radians per second, before and after
SPAN = 40.0  # seconds
NUM_READINGS = 50
NOISE = 0.1
ALARM = 0.9  # probability
LEARNING_RATE = 1e-2


def run_motors(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return times and readings [B, N] and the moment [B, 1] at which the bearing breaks."""
    times = SPAN * torch.rand(batch, NUM_READINGS, generator=generator).sort(dim=1).values
    breaks = SPAN * (0.3 + 0.4 * torch.rand(batch, 1, generator=generator))
    phase = 2 * torch.pi * torch.rand(batch, 1, generator=generator)
    after = (times - breaks).clamp(min=0)
    angle = phase + HUM[0] * (times - after) + HUM[1] * after
    noise = NOISE * torch.randn(times.shape, generator=generator)
    return times, torch.sin(angle) + noise, breaks


def train(steps: int, batch_size: int, dim: int, generator: torch.Generator) -> nn.ModuleDict:
    """Return a backbone and a head that gives a logit for the state at each reading."""
    # Causal is the default. Frequencies come from the times: readings are under a second apart.
    backbone = OsciFormer(1, dim=dim, num_heads=2).fit_time_scale(run_motors(256, generator)[0])
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(dim, 1)})
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=1e-2), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    start = time.time()
    for step in range(1, steps + 1):
        times, readings, breaks = run_motors(batch_size, generator)
        states = model["backbone"](readings[..., None], times).states
        is_broken = (times > breaks).float()
        loss = functional.binary_cross_entropy_with_logits(model["head"](states)[..., 0], is_broken)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress = f"step {step}/{steps}  loss {loss.item():.4f}  {time.time() - start:.0f} s "
        print(f"\r{progress}", end="", flush=True)
    print()
    return model.eval()


def stream(model: nn.ModuleDict, times: Tensor, readings: Tensor) -> Tensor:
    """Return the probability after each reading of one motor [N], fed one by one."""
    session = OnlineSession(model["backbone"])
    chances = []
    for t, x in zip(times.tolist(), readings, strict=True):
        state = session.observe(t, x.reshape(1, 1))
        with torch.no_grad():
            chances.append(model["head"](state).sigmoid()[0, 0])
    return torch.stack(chances)


def main(steps=200, batch_size=32, num_test=20, dim=16) -> dict[str, float]:
    torch.manual_seed(SEED)
    model = train(steps, batch_size, dim, torch.Generator().manual_seed(SEED + 1))

    times, readings, breaks = run_motors(num_test, torch.Generator().manual_seed(SEED + 2))
    with torch.no_grad():
        states = model["backbone"](readings[..., None], times).states
        whole = model["head"](states).sigmoid()[..., 0]
    delays, num_false, num_missed, difference = [], 0, 0, 0.0
    for motor in range(num_test):
        chances = stream(model, times[motor], readings[motor])
        difference = max(difference, float((chances - whole[motor]).abs().max()))
        alarms = times[motor][chances > ALARM]
        if len(alarms) == 0:
            num_missed += 1
        elif alarms[0] < breaks[motor]:
            num_false += 1
        else:
            delays.append(float(alarms[0] - breaks[motor]))
    print(f"{num_test} motors that the model has not seen, alarm above {ALARM:.0%}:")
    print(f"  in time {len(delays)}, too early {num_false}, never {num_missed}")
    if delays:
        print(f"  median delay {sorted(delays)[len(delays) // 2]:.1f} s")
    print(f"  largest difference between streaming and batch: {difference:.1e}")
    return {"difference": difference, "in time": float(len(delays))}


if __name__ == "__main__":
    main()
