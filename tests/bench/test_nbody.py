"""The benchmark of charged bodies: its physics, its observations, its models, a quick run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scipy.integrate import solve_ivp

from .scripts import load

(script,) = load("nbody")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.NETWORK, "channels", 4)


def test_paths_are_those_of_the_equations_of_motion() -> None:
    charges, places, speeds = (x.numpy() for x in script.simulate(2, 5))

    def slope(_: float, state: torch.Tensor) -> list[float]:
        x, v = torch.tensor(state).view(2, 5, 3)
        force = torch.zeros(5, 3, dtype=torch.float64)
        for i in range(5):
            for j in range(5):
                if i != j:
                    away = x[i] - x[j]
                    size = away.dot(away) + script.SOFTENING**2
                    force[i] += charges[1, i] * charges[1, j] * away / size**1.5
        return torch.stack([v, force]).flatten().tolist()

    start = torch.stack([torch.tensor(x[0, 1]) for x in (places, speeds)]).flatten()
    solved = solve_ivp(slope, (0, 1.0), start.tolist(), rtol=1e-8, atol=1e-8)
    found = places[round(1.0 / script.STEP), 1].ravel()
    assert abs(found - solved.y[:15, -1]).max() < 1e-3


def test_forecast_starts_at_the_last_sighting_and_systems_do_not_depend_on_their_number() -> None:
    systems = script.make_systems(30, 0)
    fewer = script.make_systems(20, 0)
    assert all(torch.equal(a[:20], b) for a, b in zip(systems, fewer, strict=True))
    last = torch.where(systems.mask, systems.times, -1.0).unflatten(1, (5, -1)).max(dim=-1)
    elapsed = systems.asked_times - last.values.repeat_interleave(script.READS, dim=1)
    assert torch.allclose(elapsed, systems.elapsed, atol=1e-5)
    start = (systems.forecast - systems.velocity * systems.elapsed[..., None])[:, :: script.READS]
    places = systems.positions.unflatten(1, (5, -1)).take_along_dim(
        last.indices[..., None, None], 2
    )
    assert torch.allclose(start, places[:, :, 0], atol=1e-5)
    near = systems.elapsed < 0.1
    assert (systems.forecast - systems.target).norm(dim=-1)[near].max() < 0.1


@pytest.mark.parametrize(
    ("name", "turns"), [("equivariant", True), ("egnn", True), ("plain", False)]
)
def test_only_the_plain_network_fails_to_turn(name: str, turns: bool) -> None:
    model, systems = script.make_model(name), script.make_systems(10, 1)
    for parameter in (p for p in model.parameters() if not bool(p.any())):
        torch.nn.init.normal_(parameter, std=0.1)
    assert (script.score(model, systems)["turn_error"] < 1e-4) == turns


def test_quick_run_is_continued_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["--output", str(path), "--quick", "--seeds", "0"]
    assert script.main([*arguments, "--models", "equivariant,constant_velocity"]) == 0
    assert script.main([*arguments, "--models", "equivariant,plain_turned"]) == 0
    assert script.main([*arguments, "--cost"]) == 0
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    errors = [row for row in rows if row["kind"] == "error"]
    assert [r["model"] for r in errors] == ["equivariant", "constant_velocity", "plain_turned"]
    assert abs(errors[0]["mse_turned"] - errors[0]["mse"]) < 1e-5 * errors[0]["mse"]
    capsys.readouterr()
    assert script.main(["--table", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "| equivariant | " in shown
    assert "| points | sightings | plain (auto), ms | equivariant, ms |" in shown
