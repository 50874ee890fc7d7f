"""The benchmark of dropped rows, on toy series."""

from __future__ import annotations

import numpy as np
import pytest

from osciformer.data import IrregularSeries

from .scripts import load

shared, script = load("shared", "uea_dropping")


def series_of(lengths: list[int], seed: int = 0) -> IrregularSeries:
    generator = np.random.default_rng(seed)
    labels = np.arange(len(lengths)) % 2
    values = [
        generator.normal(3.0 * label, 0.1, (length, 2))
        for label, length in zip(labels, lengths, strict=True)
    ]
    return IrregularSeries.from_arrays([np.arange(n) for n in lengths], values, labels=labels)


@pytest.mark.parametrize(("percentage", "stay"), [(0, 10), (30, 7), (50, 5), (70, 3), (99, 2)])
def test_exactly_the_given_part_of_the_rows_goes(percentage, stay):
    series = series_of([10, 10, 2, 1])
    found = script.drop_rows(series, percentage, np.random.default_rng(0))
    assert found.lengths.tolist() == [stay, stay, 2, 1]
    for whole, part in zip(series, found, strict=True):
        assert np.isin(part.times, whole.times).all()
        assert (np.diff(part.times) > 0).all()
        # Rows keep their times and values.
        assert (part.values == whole.values[part.times.astype(int)]).all()
    if 0 < percentage < 99:
        assert (found[0].times != found[1].times).any()


def test_a_job_trains_on_what_is_left_and_scores_all_test_series(monkeypatch):
    parts = {"train": series_of([10] * 24), "test": series_of([10] * 11, seed=1)}
    monkeypatch.setattr(script, "get_dataset", lambda name, split: parts[split])
    job = {"dataset": "BasicMotions", "percentage": 50, "backbone": "gru_d", "seed": 1}
    estimator = {"dim": 8, "num_layers": 1, "num_heads": 1, "max_epochs": 8, "learning_rate": 0.02}
    settings = {"estimator": estimator, "device": "cpu", "checkpoints": None}
    row = script.work(job, settings)
    assert row["accuracy"] > 0.9  # the classes are far apart
    assert (row["train_size"], row["test_size"], row["classes"]) == (24, 11, 2)
    assert row["median_rows"] == 5.0
    assert script.work(job, settings)["accuracy"] == row["accuracy"]


def test_the_table_has_means_and_says_where_seeds_are_missing(tmp_path):
    found = shared.Document(tmp_path / "out.json", {"estimator": {}})
    found.runs.append(shared.describe("x.py", [], commit="abc"))
    for seed, percentage, accuracy in ((0, 0, 0.9), (1, 0, 1.0), (0, 70, 0.5)):
        job = {
            "dataset": "BasicMotions",
            "percentage": percentage,
            "backbone": "osciformer",
            "seed": seed,
        }
        sizes = {"classes": 4, "train_size": 40, "test_size": 40}
        found.add(job, {"accuracy": accuracy, **sizes})
    lines = script.tables(found)
    titles = "data set | classes | training / test series | backbone | 0 % dropped | 70 % dropped"
    assert f"| {titles} |" in lines
    assert "| BasicMotions | 4 | 40 / 40 | osciformer | 0.950 ± 0.071 | 0.500 (1) |" in lines
    assert any("commit abc" in line for line in lines)
    assert not any("Toy size" in line for line in lines)
