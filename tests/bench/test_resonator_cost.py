"""The benchmark of what the resonator classifier costs, at toy size."""

from __future__ import annotations

import json
import math

import numpy as np

from .scripts import load

(script,) = load("resonator_cost")


def test_series_have_the_size_that_is_asked_for():
    series = script.make_series(4, 30)
    assert series.lengths.tolist() == [30] * 4
    assert series.num_features == 6
    assert np.unique(np.diff(series[0].times)).size > 20  # irregular


def test_a_toy_run_measures_time_and_memory(tmp_path, capsys, monkeypatch):
    # In this process, which has imported everything, in place of one of its own.
    monkeypatch.setattr(
        script, "run_jobs", lambda jobs, work, *_, **__: [(jobs[0], work(*jobs, {}))]
    )
    path = tmp_path / "cost.json"
    assert script.main(["--output", str(path), "--quick", "--commit", "abc"]) == 0
    found = json.loads(path.read_text())
    assert [(row["series"], row["rows"]) for row in found["rows"]] == [(20, 30), (20, 60)]
    for row in found["rows"]:
        assert row["fit_s"] > 0
        assert row["added_mib"] >= 0
        microseconds = 1e6 * row["fit_s"] / (row["series"] * row["rows"])
        assert math.isclose(row["fit_us_a_row"], microseconds, rel_tol=0.1)
    assert "| series | rows | features | fit, processor s |" in capsys.readouterr().out


def test_a_case_that_failed_is_told():
    lines = script.tables([{"series": 20, "rows": 30, "error": "killed"}])
    assert "| 20 | 30 | - | - | - | - | - | - |" in lines
    assert "- failed: killed" in lines
