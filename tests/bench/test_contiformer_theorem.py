"""The benchmark that puts a ContiFormer on a bank of oscillators, at toy size."""

from __future__ import annotations

import json

import pytest
import torch
from scipy.integrate import solve_ivp

from .scripts import load

(script,) = load("contiformer_theorem")


def test_trajectories_solve_the_equation(monkeypatch):
    monkeypatch.setattr(script, "SOLVER_STEPS", 100)
    mix = torch.randn(3, 3, dtype=torch.float64)

    def field(t, y):
        return torch.tanh(y @ mix + t[:, None])

    times = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    start = torch.randn(3, 3, dtype=torch.float64)
    paths = script.solve(field, start, times)
    for token in (0, 1):
        begin, end = float(times[token]), 0.83

        def slope(t, y):
            t, y = torch.tensor([t], dtype=torch.float64), torch.from_numpy(y)[None]
            return field(t, y)[0].numpy()

        found = solve_ivp(slope, (begin, end), start[token].numpy(), rtol=1e-11, atol=1e-11)
        at = paths[token](torch.tensor([begin, end], dtype=torch.float64))
        torch.testing.assert_close(at[0], start[token])
        torch.testing.assert_close(at[1], torch.from_numpy(found.y[:, -1]), rtol=0, atol=1e-8)
    torch.testing.assert_close(paths[2](times[2:])[0], start[2])


@pytest.mark.slow
def test_a_toy_run_reproduces_the_attention(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert script.main(["--output", str(path), "--quick", "--commit", "abc"]) == 0
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 4  # two heads, two tolerances
    for row in found["rows"]:
        assert row["holds"]
        assert row["measured"] <= row["proved"] <= row["tol"]
        # The layer steps coarsely through time, but it means the same matrix.
        assert row["layer"] <= row["proved"] + 1e-3
        assert row["fejer_modes" if "fejer_modes" in row else "modes"] >= row["modes"]
    assert "| tolerance | modes M | proved | measured |" in capsys.readouterr().out
