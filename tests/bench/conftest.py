"""What several tests of benchmarks share."""

from __future__ import annotations

import pytest


@pytest.fixture
def toy_task(monkeypatch):
    """Two data sets in the place of the real ones: one in folds, one with seeds."""
    from osciformer.bench.events.datasets import TASKS, EventTask

    from .events_toy import random_parts

    for name, repeat in (("folds", "fold"), ("seeds", "seed")):
        task = EventTask(name, name, 2, repeat, lambda task, number: random_parts(number), 0.01)
        monkeypatch.setitem(TASKS, name, task)
