"""The script that asks what decides the likelihood of Taobao, where the answer is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip("pytorch_lightning")
pytest.importorskip("pyarrow")

from osciformer.bench.events.datasets import TASKS, EventTask
from osciformer.events import EventSequences, HawkesProcess, PoissonProcess, log_likelihood

from .events_toy import random_parts
from .scripts import load

(script,) = load("taobao_protocol")

EVENTS = EventSequences.from_arrays([[0.0, 0.5, 0.75], [1.0, 1.2], [3.0]])


def test_constant_rates_are_integrated_exactly_by_all_rules() -> None:
    found = script.score_ways(PoissonProcess([2.0]), EVENTS)
    expected = log_likelihood(PoissonProcess([2.0]), EVENTS).micro
    for way in ("exact", "trapezoid", "mean"):
        assert found[way] == pytest.approx(expected)
    # Each of the waits is one below 1 with probability 1 - exp(-2).
    assert found["given_short"] == pytest.approx(expected - math.log(1 - math.exp(-2.0)), abs=1e-3)


def test_rules_of_even_nodes_are_what_they_say() -> None:
    process = HawkesProcess(base=[0.5], branching=[[0.5]], decay=8.0)
    batch = EVENTS[:1].batch()
    trapezoid, mean = script.even_compensators(process, batch, 5)
    for i, wait in enumerate((0.5, 0.25)):
        nodes = np.linspace(0.0, wait, 5)
        # Just after event i, and what earlier ones left of it.
        past = [float(batch.times[0, i] - batch.times[0, j]) for j in range(i + 1)]
        rates = 0.5 + sum(4.0 * np.exp(-8.0 * (age + nodes)) for age in past)
        assert float(trapezoid[0, i]) == pytest.approx(np.trapezoid(rates, nodes))
        assert float(mean[0, i]) == pytest.approx(wait * rates.mean())
    assert torch.equal(trapezoid[:, -1], torch.zeros(1, dtype=torch.float64))


def test_a_toy_run_has_a_row_for_each_network(tmp_path, monkeypatch) -> None:
    task = EventTask("toy", "toy", 2, "seed", lambda task, number: random_parts(number), 0.01)
    monkeypatch.setitem(TASKS, "toy", task)
    path = tmp_path / "out.json"
    arguments = ["--output", str(path), "--table", str(tmp_path / "t.md"), "--commit", "abc"]
    arguments += ["--datasets", "toy", "--models", "rmtpp", "--steps", "2"]
    assert script.main(arguments) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["dataset"], row["model"]) == ("toy", "rmtpp")
    # Given less, what came was likelier.
    assert row["given_short"] > row["exact"]
    assert row["long_gaps"]["test"] > 0.1
    assert (
        f"| toy | rmtpp | {row['dev']:.3f} | {row['exact']:.3f} |"
        in (tmp_path / "t.md").read_text()
    )
