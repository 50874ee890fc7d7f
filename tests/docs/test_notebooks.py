"""The notebooks run, and show outputs of the code that they have."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
MOST_CELLS = 16

TOY_SIZES: dict[str, dict[str, Any]] = {
    "classify.ipynb": {"NUM_STAYS": 60},
    "events.ipynb": {"NUM_REGIONS": 12, "MAX_EPOCHS": 1, "NUM_FUTURES": 4},
    "forecast.ipynb": {"NUM_WELLS": 20, "MAX_EPOCHS": 1},
    "monitor.ipynb": {"STEPS": 2, "NUM_TEST": 4},
    "reading.ipynb": {"NUM_MACHINES": 24, "STEPS": 2},
}


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(NOTEBOOKS.with_name("run_notebooks.py")))


def test_every_notebook_has_a_toy_size() -> None:
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == set(TOY_SIZES)


@pytest.mark.parametrize("name", TOY_SIZES)
def test_notebook_runs_at_toy_size(
    name: str, run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = read(name)
    names = run["execute"](notebook, TOY_SIZES[name])
    shown = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in shown) >= 2
    if name == "monitor.ipynb":
        assert names["difference"] < 1e-5  # a stream is what the batch is


@pytest.mark.parametrize("name", TOY_SIZES)
def test_outputs_are_those_of_the_code(name: str, run: dict[str, Any]) -> None:
    notebook = read(name)
    kept, found = notebook["metadata"].get("code_sha256"), run["fingerprint"](notebook)
    assert kept == found, f"the code has changed: run python docs/run_notebooks.py {name}"


@pytest.mark.parametrize("name", TOY_SIZES)
def test_notebook_is_short_and_describes_its_pictures(name: str) -> None:
    cells = read(name)["cells"]
    assert len(cells) <= MOST_CELLS
    for cell in cells:
        pictures = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        assert not pictures or cell["metadata"]["alt"]


def test_code_that_fails_is_not_passed_over(run: dict[str, Any]) -> None:
    cell = {"cell_type": "code", "source": ["1 / 0"]}
    with pytest.raises(ZeroDivisionError):
        run["execute"]({"cells": [cell], "metadata": {}})
