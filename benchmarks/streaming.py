"""Cost of a step of `OnlineSession` along a stream, with a window and without.

Run: `python benchmarks/streaming.py --observations 2000 40000`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from osciformer import OnlineSession, OsciFormer

SPACING = 1.0  # units of time between observations, on average
SPAN = 48.0  # of the series that the model knows, which holds as many observations
WINDOW = 100.0


def main() -> None:
    """Print milliseconds a step, and how many observations are held, at some points of a stream."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--observations", type=int, nargs="+", default=[2000, 10000])
    parser.add_argument("--window", type=float, default=WINDOW, help="0 for none")
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed at each point")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = OsciFormer(4, dim=16, num_heads=2, num_layers=1).eval()
    model.fit_time_scale(SPAN * torch.rand(16, 48, dtype=torch.float64).sort(dim=1).values)
    session = OnlineSession(model, window=given.window or None)
    now, seconds = 0.0, []
    for step in range(max(given.observations)):
        now += 2.0 * SPACING * float(torch.rand(()))
        values = torch.randn(1, 4)
        started = time.process_time()
        session.observe(now, values)
        seconds.append(time.process_time() - started)
        if step + 1 in given.observations:
            held = session.num_held
            typical = 1000.0 * statistics.median(seconds[-given.steps :])
            print(f"after {step + 1}: {typical:.2f} ms of CPU a step, {held} observations held")


if __name__ == "__main__":
    main()
