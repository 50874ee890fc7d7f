"""Every example runs at toy size, so that none can rot."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 120

TOY_SIZES: dict[str, dict[str, Any]] = {
    "01_irregular_signal.py": {"steps": 2, "batch_size": 4, "num_test": 8, "dim": 16},
    "02_classify_data_frame.py": {"num_valves": 40, "max_epochs": 1, "dim": 8},
    "03_fill_gaps.py": {"num_days": 16, "num_test": 4, "max_epochs": 1, "dim": 8},
    "04_resonators.py": {"num_train": 24, "num_test": 12},
    "05_certified_attention.py": {"num_keys": 3, "tolerances": (1e-1, 1e-3)},
    "06_grid_search.py": {"num_tanks": 32, "max_epochs": 1, "dims": (4, 8)},
    "07_service.py": {"steps": 2, "num_motors": 4, "dim": 8},
}
WITH_PICTURE = (
    "01_irregular_signal.py",
    "03_fill_gaps.py",
    "04_resonators.py",
)


def test_every_example_has_a_toy_size() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TOY_SIZES)


@pytest.mark.parametrize("name", TOY_SIZES)
def test_example_stays_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < MAX_LINES


@pytest.mark.parametrize("name", TOY_SIZES)
def test_example_runs_and_returns_numbers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    settings = dict(TOY_SIZES[name])
    picture = tmp_path / "picture.png"
    if name in WITH_PICTURE:
        settings["picture"] = picture
    numbers = runpy.run_path(str(EXAMPLES / name))["main"](**settings)
    assert numbers
    assert all(0.0 <= number < float("inf") for number in numbers.values())
    if name in WITH_PICTURE:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert str(picture) in capsys.readouterr().out


def test_service_agrees_with_the_batch() -> None:
    numbers = runpy.run_path(str(EXAMPLES / "07_service.py"))["main"](**TOY_SIZES["07_service.py"])
    assert numbers["difference"] < 1e-5


def test_threads_of_the_service_share_streams_without_loss() -> None:
    """Four threads begin one stream at once, at one time, where order does not matter."""
    parts = runpy.run_path(str(EXAMPLES / "07_service.py"))
    model = parts["train"](1, 8, torch.Generator().manual_seed(0))
    with parts["Service"](model) as service, ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda _: service.score("one", 1.0, [0.5]), range(40)))
        list(clients.map(lambda k: service.score(f"other {k % 4}", 1.0, [0.5]), range(40)))
        counts = [session.num_observations for session in service.sessions.values()]
    assert counts == [[40]] + [[10]] * 4
