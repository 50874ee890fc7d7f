"""The scripts in `benchmarks`, which a distribution may lack."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(*names: str) -> list[Any]:
    """Return modules of `benchmarks`, or skip the tests of the module that asks for them."""
    folder = ROOT / "benchmarks"
    if not folder.exists():
        pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return [importlib.import_module(name) for name in names]
