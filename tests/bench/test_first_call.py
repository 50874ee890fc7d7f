"""The benchmarks of first calls and of the phases of trainings, at toy size on the CPU."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from osciformer.data import IrregularSeries

from .scripts import load

first_call, phases = load("first_call", "training_phases")


def test_a_first_call_is_slower_than_the_second(tmp_path):
    output = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--part", "first", "--head-size", "16", "--dtype", "float32"]
    assert first_call.main([*arguments, "--n", "40", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    (row,) = document["rows"]
    assert row["how"] == "together"
    assert 1e3 * row["seconds"] > row["second_ms"] > 0
    assert row["kernels"] == 0  # the CPU has none
    assert document["meta"]["cores"] >= 1


def test_a_failing_case_is_a_row(tmp_path):
    case = {"dtype": "float31", "channels": 16, "how": "together", "n": 8, "device": "cpu"}
    assert first_call.in_process("first_call", case, tmp_path) == {"error": "exit status 1"}


def test_phases_have_times_of_their_own():
    clock = phases.Clock("cpu", synchronize=False)

    def work(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    with clock.phase("outer"):
        work(0.02)
        clock.timed("inner", work)(0.05)
    assert clock.seconds["inner"] >= 0.05
    assert 0.02 <= clock.seconds["outer"] < 0.05
    assert clock.calls == {"outer": 1, "inner": 1}


@pytest.fixture
def toy(monkeypatch):
    """Forty short series in place of the stays."""
    generator = np.random.default_rng(0)
    times = [np.sort(generator.uniform(0, 48, 6)) for _ in range(40)]
    values = [generator.normal(size=(6, 2)) for _ in range(40)]
    series = IrregularSeries.from_arrays(times, values, labels=[0, 1] * 20)
    monkeypatch.setattr(phases, "get_dataset", lambda *_: series)


@pytest.mark.usefixtures("toy")
def test_phases_of_a_training(tmp_path):
    output, profile = tmp_path / "out.json", tmp_path / "profile.txt"
    settings = json.dumps({"dim": 8, "num_heads": 1})
    arguments = ["--models", "osciformer", "--epochs", "1", "--settings", settings]
    phases.main([*arguments, "--output", str(output), "--profile", str(profile)])
    (row,) = json.loads(output.read_text())["rows"]
    assert {"resonators", "batches", "network", "attention", "backward"} <= row["phases"].keys()
    assert row["epochs"] == 1
    assert sum(row["phases"].values()) == pytest.approx(row["cpu_seconds"], abs=0.5)
    assert "tottime" in profile.read_text()
