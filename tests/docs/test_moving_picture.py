"""The moving picture is small and calm, and its script runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
MOST_BYTES = 700_000
# Of full brightness, in the mean over the picture: far below what general flashes take (0.1).
MOST_CHANGE = 0.02


def read_frames(path: Path) -> tuple[np.ndarray, list[int]]:
    """Return frames [n, height, width] from 0, black, to 1, and milliseconds of each."""
    frames, durations = [], []
    with pytest.importorskip("PIL.Image").open(path) as image:
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(np.asarray(image.convert("L"), dtype=np.float32) / 255)
            durations.append(image.info["duration"])
    return np.stack(frames), durations


def test_moving_picture_is_small_and_calm() -> None:
    path = PICTURES / "resonating.gif"
    frames, durations = read_frames(path)
    assert path.stat().st_size < MOST_BYTES
    assert 6_000 <= sum(durations) <= 10_000
    change = np.abs(np.diff(frames, axis=0, append=frames[:1])).mean(axis=(1, 2))
    assert change.max() < MOST_CHANGE


def test_first_frame_is_a_whole_picture() -> None:
    frames, durations = read_frames(PICTURES / "resonating.gif")
    ink = (1 - frames).mean(axis=(1, 2))
    assert ink[0] > 0.98 * ink.max()
    assert durations[0] >= 1_000


def test_script_runs(tmp_path: Path) -> None:
    to = tmp_path / "small.gif"
    runpy.run_path(str(PICTURES / "resonating.py"))["main"](num_stays=60, num_frames=4, to=to)
    assert len(read_frames(to)[0]) > 4
