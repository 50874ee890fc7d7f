"""The benchmark of imputation and forecasts, on toy series with known script."""

from __future__ import annotations

import numpy as np
import pytest

from osciformer.bench.documents import Document
from osciformer.data import IrregularSeries
from osciformer.data.transforms import SeriesTransform

from .scripts import load

shared, script = load("shared", "forecast_imputation")

MIDDLE = script.LEVELS.index(0.5)


def stays(count: int, seed: int = 0) -> IrregularSeries:
    """Return stays of 48 hours: a level with noise, a straight line, and a constant."""
    generator = np.random.default_rng(seed)
    times, values = [], []
    for _ in range(count):
        t = np.sort(generator.uniform(0, 2880, 40))
        level = generator.normal() + 0.1 * generator.normal(size=len(t))
        line = generator.normal() + generator.normal() * t / 1000.0
        table = np.stack([level, line, np.ones(len(t))], axis=1)
        table[generator.random(table.shape) < 0.2] = np.nan
        times.append(t)
        values.append(table)
    return IrregularSeries.from_arrays(times, values, empty="keep")


def test_scores_are_those_computed_by_hand():
    # Mean 0 and spread 1 in the first column; the second is constant and is not scored.
    train = IrregularSeries.from_arrays([[0.0, 1.0]], [[[-1.0, 5.0], [1.0, 5.0]]])
    asked = IrregularSeries.from_arrays([[2.0, 3.0]], [[[0.5, 5.0], [-2.0, np.nan]]])
    transform = SeriesTransform("standard").fit(train)
    found = np.zeros((2, 2, len(script.LEVELS)))
    found[:, 0] = [-3.0, -1.5, -1.0, 0.0, 0.25, 1.5, 3.0]
    found[:, 1] = 99.0
    row = script.score(found, transform, asked)
    assert row["values"] == 2
    assert row["mae"] == pytest.approx(1.25)
    assert row["rmse"] == pytest.approx(np.sqrt((0.5**2 + 2.0**2) / 2))
    assert row["mae_by_variable"] == pytest.approx(1.25)
    assert row["coverage_50"] == 0.0  # 0.5 lies above 0.25, -2 below -1
    assert row["coverage_80"] == 0.5
    assert row["coverage_90"] == 1.0
    levels = np.array(script.LEVELS)
    wanted = [
        np.where(y > q, levels * (y - q), (1 - levels) * (q - y)).mean()
        for y, q in ((0.5, found[0, 0]), (-2.0, found[1, 0]))
    ]
    assert row["pinball"] == pytest.approx(np.mean(wanted))
    assert row["values_of"] == {"feature_0": 2, "feature_1": 0}


def test_forecasts_are_asked_after_the_cut_and_up_to_the_horizon():
    series = IrregularSeries.from_arrays([[0.0, 24.0, 25.0, 48.0, 49.0]], [np.arange(5.0)])
    seen, asked = script.ask_after(series, 24.0, 24.0)
    assert seen.times.tolist() == [0.0, 24.0]
    assert asked.times.tolist() == [25.0, 48.0]


def test_a_fifth_of_the_values_is_hidden_and_none_is_seen():
    series = stays(100)
    seen, asked = script.ask("imputation", series, seed=0, part=1)
    counts = [np.count_nonzero(~np.isnan(found.values)) for found in (series, seen, asked)]
    assert counts[0] == counts[1] + counts[2]
    assert counts[2] / counts[0] == pytest.approx(0.2, abs=0.02)
    again = script.ask("imputation", series, seed=0, part=1)
    assert np.array_equal(again.asked.values, asked.values, equal_nan=True)
    other = script.ask("imputation", series, seed=1, part=1)
    assert len(other.asked.times) != len(asked.times) or not np.array_equal(
        other.asked.values, asked.values, equal_nan=True
    )


def test_stays_are_split_into_four_fifths_and_a_fifth():
    series = stays(50).replace(ids=np.arange(50))
    train, test = script.split_stays(series, seed=0)
    assert (len(train), len(test)) == (40, 10)
    assert set(train.ids) | set(test.ids) == set(range(50))
    assert set(script.split_stays(series, seed=1)[1].ids) != set(test.ids)


def test_simple_methods_answer_as_their_names_say_and_know_their_errors():
    train, test = stays(150), stays(150, seed=1)
    transform = SeriesTransform("standard").fit(train)
    practice, question = (
        script.ask("imputation", x, 0, part) for part, x in enumerate((train, test))
    )
    rows = {}
    for method in ("linear", "last_value", "mean"):
        found = script.answer_simply(method, transform, question, practice)
        rows[method] = script.score(found, transform, question.asked)
        assert rows[method]["coverage_80"] == pytest.approx(0.8, abs=0.03)
        assert rows[method]["coverage_50"] == pytest.approx(0.5, abs=0.04)
    assert (found[..., MIDDLE] == 0).all()
    names = ["feature_0", "feature_1"]
    by_name = {method: [row["mae_of"][name] for name in names] for method, row in rows.items()}
    assert (
        by_name["linear"][1] < 0.2 * by_name["last_value"][1]
    )  # a line is a line but for its ends
    assert by_name["last_value"][0] < 0.3 * by_name["mean"][0]
    assert set(rows["mean"]["mae_of"]) == {"feature_0", "feature_1"}  # the third is constant


@pytest.mark.parametrize("task", script.TASKS)
def test_a_job_trains_answers_and_scores(task, monkeypatch):
    monkeypatch.setattr(script, "load_stays", lambda: stays(60))
    estimator = {"dim": 8, "num_layers": 1, "num_heads": 1, "max_epochs": 3}
    settings = {"estimator": estimator, "device": "cpu", "checkpoints": None, "stays": None}
    rows = {
        method: script.work({"task": task, "method": method, "seed": 0}, settings)
        for method in ("gru_d", "last_value", "mean")
    }
    # All methods are asked the same.
    assert len({row["values"] for row in rows.values()}) == 1
    assert rows["gru_d"]["epochs"] == 3
    # An untrained model says the last value, or the line, and training does not make that bad.
    assert rows["gru_d"]["mae"] < 1.1 * rows["last_value"]["mae"]
    assert rows["gru_d"]["mae"] < rows["mean"]["mae"]
    assert 0.0 < rows["gru_d"]["coverage_50"] < rows["gru_d"]["coverage_90"] <= 1.0


def test_the_table_has_both_tasks_and_their_methods(tmp_path):
    found = Document(tmp_path / "out.json", {"estimator": {}, "stays": None})
    found.runs.append(shared.describe("x.py", [], commit="abc"))
    scores = {
        "rmse": 1.0,
        "mae_by_variable": 0.5,
        "pinball": 0.1,
        "mse_of_range": 0.005,
        **dict.fromkeys(script.COVERAGES, 0.7),
        "values": 1234,
        "train_size": 80,
        "test_size": 20,
    }
    for seed in (0, 1):
        for method, extra in (("osciformer", {"fit_seconds": 9.0}), ("mean", {})):
            job = {"task": "forecasting", "method": method, "seed": seed}
            found.add(job, {"mae": 0.25 + 0.5 * seed, **scores, **extra})
    lines = script.tables(found)
    assert "## Forecasting" in lines
    assert "## Imputation" not in lines
    assert "1,234 scored values of 20 test stays a split, 80 training stays." in lines
    means = ("1.000", "0.500", "0.100", "5.000", *["0.700"] * 3)
    spread = " | ".join(f"{mean} ± 0.000" for mean in means)
    assert f"| `osciformer` | 0.500 ± 0.354 | {spread} | - | 9 ± 0 |" in lines
    assert f"| mean | 0.500 ± 0.354 | {spread} | - | - |" in lines


def test_a_shuffled_history_keeps_its_last_values_and_what_they_are():
    series = stays(20)
    found = script.shuffle_history(series, np.random.default_rng(0))
    assert not np.array_equal(found.values, series.values, equal_nan=True)
    for before, after in zip(series, found, strict=True):
        for old, new in zip(before.values.T, after.values.T, strict=True):
            known = ~np.isnan(old)
            assert np.array_equal(known, ~np.isnan(new))
            assert sorted(old[known]) == sorted(new[known])
            assert (old[known][-1:] == new[known][-1:]).all()
