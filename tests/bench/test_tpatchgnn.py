"""The benchmark in t-PatchGNN's protocol, on toy stays."""

from __future__ import annotations

import numpy as np
import pytest

from osciformer.bench.documents import Document
from osciformer.data import IrregularSeries

from .scripts import load

shared, script = load("shared", "tpatchgnn")

SETTINGS = {"estimator": shared.TINY, "device": "cpu", "checkpoints": None, "stays": None}


def stays(count: int) -> IrregularSeries:
    """Return stays of 48 hours: a level of each, and a constant; the first has no row."""
    generator = np.random.default_rng(0)
    times, values = [np.empty(0)], [np.empty((0, 2))]
    for _ in range(count - 1):
        times.append(np.sort(generator.choice(2880, 20, replace=False)).astype(float))
        level = generator.normal() + 0.1 * generator.normal(size=20)
        values.append(np.stack((level, np.ones(20)), axis=1))
    series = IrregularSeries.from_arrays(times, values, empty="keep")
    return series.replace(ids=np.arange(count))


def test_the_split_is_that_of_the_paper():
    parts = script.split_stays(stays(20))
    assert [len(part) for part in parts] == [12, 4, 4]
    # As scikit-learn draws them: the last quarter of what is not tested validates.
    assert parts.test.ids.tolist() == [0, 17, 15, 1]
    assert parts.validation.ids.tolist() == [7, 10, 14, 6]
    assert [len(part) for part in script.split_stays(stays(20), 10)] == [6, 2, 2]


def test_hour_24_is_asked_and_not_seen():
    series = IrregularSeries.from_arrays([[0.0, 1439.0, 1440.0, 2880.0]], [np.arange(4.0)])
    seen, asked = script.ask_after(series, script.CUT, script.HORIZON)
    assert seen.times.tolist() == [0.0, 1439.0]
    assert asked.times.tolist() == [1440.0, 2880.0]


def test_errors_are_means_over_values_then_over_variables():
    nan = np.nan
    values = [[[1.0, 10.0, nan], [3.0, nan, nan]], [[5.0, 30.0, nan]]]
    asked = IrregularSeries.from_arrays([[0.0, 1.0], [0.0]], values)
    scale = script.Scale(np.zeros(3), np.array([4.0, 100.0, 1.0]))
    row = script.score(np.full((3, 3), 3.0), np.full((3, 3), 5.0), scale, asked)
    first = ((2 / 4) ** 2 + 0 + (2 / 4) ** 2) / 3
    second = ((7 / 100) ** 2 + (27 / 100) ** 2) / 2
    assert row["mse"] == pytest.approx((first + second) / 2)
    assert list(row["mse_of"].values()) == pytest.approx([first, second])
    assert row["mae"] == pytest.approx(((1 + 0.5 + 0) / 3 + (0.05 + 0.25) / 2) / 2)
    assert row["values"] == 5
    mine = (0.25 / 3 + 0.0049 / 2) / 2, (0.25 / 3 + 0.0729 / 2) / 2
    assert row["by_stay"] == pytest.approx(mine)


def test_values_are_scaled_by_training_and_validation_stays():
    one, two, three = (IrregularSeries.from_arrays([[0.0]], [[[x, 7.0]]]) for x in (1.0, 5.0, 99.0))
    scale = script.learn_scale(script.Parts(one, two, three))
    assert scale.low.tolist() == [1.0, 7.0]
    assert scale.span.tolist() == [4.0, 1.0]


def test_the_mean_of_even_quantiles_is_their_middle():
    assert script.mean_of_quantiles(np.array(script.LEVELS)) == pytest.approx(0.5)
    assert script.mean_of_quantiles(np.ones((2, len(script.LEVELS)))) == pytest.approx([1.0, 1.0])


@pytest.fixture(scope="module")
def rows():
    """The rows of simple methods and of a tiny network on sixty stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "load_stays", lambda: stays(60))
        jobs = [{"method": m, "seed": 0} for m in ("constant", "last_value", "osciformer")]
        return [job | script.work(job, SETTINGS) for job in jobs]


def test_simple_methods_and_networks_answer_the_same_questions(rows):
    constant, last, network = rows
    assert constant["values"] == last["values"] == network["values"]
    parts = script.split_stays(stays(60))
    mean = np.nanmean(parts.train.values[:, 0])
    _, asked = script.ask_after(parts.test, script.CUT, script.HORIZON)
    error = (asked.values[:, 0] - mean) / script.learn_scale(parts).span[0]
    assert constant["mse_of"]["feature_0"] == pytest.approx(np.square(error).mean(), rel=1e-5)
    assert constant["mse_of"]["feature_1"] == 0.0
    # Levels stay, and an untrained network says the last value.
    assert last["mse"] < 0.1 * constant["mse"]
    assert network["mse"] < 0.2 * constant["mse"]
    assert len(network["by_stay"]) == 12
    assert sum(network["by_stay"]) == pytest.approx(network["mse"], rel=1e-4)
    assert network["device"] == "cpu"


def test_differences_are_those_of_the_errors(rows):
    found = script.differences(rows, rounds=100)
    assert set(found) == {"constant", "last_value"}
    entry = found["constant"]
    assert entry["difference"] == pytest.approx(rows[0]["mse"] - rows[2]["mse"], rel=1e-3)
    assert entry["low"] < entry["difference"] < entry["high"]
    assert script.differences(rows[:2]) == {}


def test_the_table_has_methods_and_published_numbers_apart(rows, tmp_path):
    found = Document(tmp_path / "out.json", {"estimator": {}, "stays": None})
    found.runs.append(shared.describe("tpatchgnn.py", [], commit="abc"))
    for row in rows:
        found.add({"method": row["method"], "seed": 0}, row)
    lines = script.tables(found)
    mse = f"{1e3 * rows[0]['mse']:.2f}"
    assert any(line.startswith(f"| `constant` | {mse} | ") for line in lines)
    assert "| t-PatchGNN | - | - | - | - | 4.98 |" in lines
    assert any(line.startswith("- last_value: ") for line in lines)
