"""Every example runs at toy size, so that none can rot."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 120

TOY_SIZES: dict[str, dict[str, Any]] = {
    "01_irregular_signal.py": {"steps": 2, "batch_size": 4, "num_test": 8, "dim": 16},
}


def test_every_example_has_a_toy_size() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TOY_SIZES)


@pytest.mark.parametrize("name", TOY_SIZES)
def test_example_stays_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < MAX_LINES


@pytest.mark.parametrize("name", TOY_SIZES)
def test_example_runs_and_saves_a_picture(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    errors = runpy.run_path(str(EXAMPLES / name))["main"](picture=picture, **TOY_SIZES[name])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(0.0 < error < float("inf") for error in errors.values())
    assert str(picture) in capsys.readouterr().out
