"""The benchmark of the response runs, and its oracle agrees with a formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .scripts import load

(script,) = load("response")


def test_oracle_of_a_ramp() -> None:
    # Critical damping: a ramp is followed at a distance of 2 / omega, from rest on its path.
    times = torch.linspace(0.0, 3.0, 7, dtype=torch.float64)
    omega = torch.tensor([2.0], dtype=torch.float64)
    x, v = script.oracle(times, times, omega, torch.ones_like(omega))
    decay = torch.exp(-2.0 * times)
    assert x[:, 0].tolist() == pytest.approx((times - 1.0 + decay * (1.0 + times)).tolist())
    assert v[:, 0].tolist() == pytest.approx((1.0 - decay * (1.0 + 2.0 * times)).tolist())


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    path = tmp_path / "response.json"
    assert script.main(["--output", str(path), "--quick"]) == 0
    torch.set_num_threads(threads)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [row["rows"] for row in found["length"]] == [100, 300]
    for row in found["error"]:
        assert row["error"] < (1e-10 if row["dtype"] == "float64" else 1e-5)
    assert "irregular | forward + backward" in capsys.readouterr().out
