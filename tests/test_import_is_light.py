"""`import osciformer` costs next to nothing; all but the estimators need torch and numpy alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = [
    "e3nn",
    "lightning",
    "matplotlib",
    "pandas",
    "polars",
    "pyarrow",
    "pytorch_lightning",
    "scipy",
    "sklearn",
    "triton",
]

# What torch imports for itself is not this package's doing, so only the difference counts.
PROGRAM = """
import json, sys
import numpy, torch
before = set(sys.modules)
import osciformer
from osciformer import IrregularSeries, OnlineSession, OsciFormer, OscillatorAttention
from osciformer import OsciFormerConfig, choose_backend, from_frame, oscillator_attention
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def added_modules() -> list[str]:
    """Names that osciformer and its public names add to `sys.modules` in a fresh interpreter."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_fresh_interpreter_imports_the_package(added_modules: list[str]) -> None:
    assert {"osciformer", "osciformer.nn", "osciformer.ops"} <= set(added_modules)


@pytest.mark.parametrize("package", HEAVY)
def test_import_leaves_out(package: str, added_modules: list[str]) -> None:
    assert [m for m in added_modules if m == package or m.startswith(package + ".")] == []


def test_import_prints_nothing_and_keeps_the_random_state() -> None:
    program = (
        "import torch; torch.manual_seed(3); before = torch.get_rng_state();"
        "from osciformer import *; assert torch.equal(before, torch.get_rng_state())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_torch_waits_for_the_first_name() -> None:
    program = (
        "import sys, osciformer\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])\n"
        "print(osciformer.math.__name__, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split("\n")[:2] == ["[]", "osciformer.math True"], result.stderr


def test_unknown_names_are_refused_and_known_ones_listed() -> None:
    import osciformer

    with pytest.raises(AttributeError, match="'osciformer' has no attribute 'Nonsense'"):
        _ = osciformer.Nonsense
    assert {*osciformer.__all__, "math", "nn", "ops"} <= set(dir(osciformer))


# None in sys.modules is a package that cannot be imported.
WITHOUT_TRITON = """
import sys
import torch
sys.modules["triton"] = None
import osciformer
from osciformer.ops import choose_backend, oscillator_attention
times = torch.tensor([[0.0, 0.4, 1.7]])
q, k, v = torch.randn(3, 1, 3, 2, 16).unbind(0)
names = ("key_omega", "key_zeta", "value_omega", "value_zeta")
spectra = {name: torch.ones(2, 16) for name in names}
out = oscillator_attention(q, k, v, times, times, **spectra)
assert out.isfinite().all()
try:
    oscillator_attention(q, k, v, times, times, **spectra, backend="triton")
except RuntimeError as error:
    assert "not installed" in str(error), error
else:
    raise AssertionError("no error")
"""


def test_import_and_attention_without_triton() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
