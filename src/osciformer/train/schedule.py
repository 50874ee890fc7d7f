"""The learning rate over a run."""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, num_steps: int, warmup_fraction: float) -> float:
    r"""Return the factor of the learning rate at a step.

    $$\min\left(\frac{s + 1}{w},\ \tfrac12 (1 + \cos \pi s / S)\right)$$

    Args:
        step: Step s, from 0.
        num_steps: Number of steps S of the run.
        warmup_fraction: Part of the steps in which the factor rises, $w / S$.

    Example:
        >>> [round(warmup_cosine(s, num_steps=8, warmup_fraction=0.25), 2) for s in (0, 2, 4, 8)]
        [0.5, 0.85, 0.5, 0.0]
    """
    ramp = (step + 1) / max(warmup_fraction * num_steps, 1.0)
    return min(ramp, 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(num_steps, 1)))))
