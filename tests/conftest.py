"""What every test shares: one seed, at most two threads."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

SEED = 0

# Figures are written to files, never to a screen.
os.environ.setdefault("MPLBACKEND", "Agg")

# Kernels run in Triton's interpreter where there is no GPU. It looks when it is first imported.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests of the GPU also run where there is little more than torch and pytest.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # A slow machine is not a failing test; the same examples are drawn in each run.
    settings.register_profile("osciformer", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("osciformer")


def pytest_configure() -> None:
    """Keep to two threads, so that a run on a small machine and on a large one agree.

    Several processes have one thread each: they wait for each other in vain otherwise.
    """
    most = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    torch.set_num_threads(min(most, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch before each test and return the seed, for generators of the test's own."""
    torch.manual_seed(SEED)
    return SEED


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """Return a CPU generator, for tests that draw from it alone."""
    return torch.Generator().manual_seed(seed)
