"""The shapes in the signatures of `osciformer.math` are true.

In a process of its own: `torch.compile`, which other tests call, cannot trace checked functions.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jaxtyping")
pytest.importorskip("beartype")

ROOT = Path(__file__).parents[2]
CALLS = (
    "src/osciformer/math",
    *(f"tests/math/test_{name}.py" for name in ("banks", "basis", "integrals", "spectrum")),
)


def test_calls_fit_the_annotated_shapes():
    check = "--jaxtyping-packages=osciformer.math,beartype.beartype"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", check, *CALLS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
