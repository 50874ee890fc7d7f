"""The benchmark of dropped rows, on toy series."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from osciformer.bench.documents import Document
from osciformer.data import IrregularSeries

from .scripts import load

shared, script, inception, aeon_models = load("shared", "uea_dropping", "inception", "aeon_models")


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


def job_of(model: str, **entries) -> dict:
    return {"dataset": "BasicMotions", "percentage": 50, "model": model, "seed": 1, **entries}


@pytest.fixture
def toy_data(monkeypatch):
    """Two classes that are far apart, in the place of the archive."""
    parts = {"train": series_of([10] * 24), "test": series_of([10] * 11, seed=1)}
    monkeypatch.setattr(script, "get_dataset", lambda name, split: parts[split])
    estimator = {"dim": 8, "num_layers": 1, "num_heads": 1, "max_epochs": 8, "learning_rate": 0.02}
    return {"estimator": estimator, "device": "cpu", "checkpoints": None}


@pytest.mark.parametrize("model", ["gru_d", "resonator"])
def test_a_job_trains_on_what_is_left_and_scores_all_test_series(toy_data, model):
    row = script.work(job_of(model), toy_data)
    assert row["accuracy"] > 0.9
    assert (row["train_size"], row["test_size"], row["classes"]) == (24, 11, 2)
    assert row["median_rows"] == 5.0
    assert script.work(job_of(model), toy_data)["accuracy"] == row["accuracy"]


def test_the_joined_classifier_has_the_accuracies_of_its_parts(toy_data):
    toy_data["estimator"]["max_epochs"] = 1
    row = script.work(job_of("osciformer"), toy_data)
    assert 0 <= row["network_weight"] <= 1
    assert row["resonator_accuracy"] == 1.0
    from osciformer.estimators import OsciFormerClassifier

    series = script.get_dataset("", "train"), script.get_dataset("", "test")
    train, test = (
        script.drop_rows(part, 50, np.random.default_rng([1, 50, number]))
        for number, part in enumerate(series)
    )
    settings = toy_data["estimator"] | {"resonators": False, "random_state": 1}
    alone = OsciFormerClassifier(**settings, accelerator="cpu").fit(train)
    assert row["network_accuracy"] == alone.score(test)


def test_interpolated_rows_are_constant_outside_and_repeat_the_end():
    series = IrregularSeries.from_arrays([[1, 3], [0, 11]], [[[2.0], [6.0]], [[0.0], [11.0]]])
    found = script.interpolate(series, np.array([5, 12]), 12)
    assert found.shape == (2, 1, 12)
    assert found.dtype == np.float32
    assert found[0, 0].tolist() == [2, 2, 4, 6, 6, *[6] * 7]
    assert found[1, 0].tolist() == list(range(12))


def test_few_steps_become_ten_points():
    series = IrregularSeries.from_arrays([[0, 3]], [[[0.0, 3.0], [9.0, 3.0]]])
    found = script.interpolate(series, np.array([4]), 4)
    np.testing.assert_allclose(found[0], [np.arange(10), np.full(10, 3.0)], atol=1e-6)


def test_a_network_like_inceptiontime_learns(toy_data):
    toy_data["estimator"] = {"toy": 1}  # a single epoch
    row = script.work(job_of("inception"), toy_data)
    assert row["epochs"] == 1
    generator = np.random.default_rng(0)
    labels = np.arange(24) % 3
    series = labels[:, None, None] + generator.normal(0, 0.1, (24, 2, 12))
    found = inception.fit_predict(series[:18], labels[:18], series[18:], seed=0, epochs=20)
    assert (found == labels[18:]).all()
    again = inception.fit_predict(series[:18], labels[:18], series[18:], seed=0, epochs=20)
    assert (found == again).all()


AEON = """
import numpy as np
class RocketClassifier:
    def __init__(self, random_state, n_jobs):
        print("noise of a package")
        self.seed = random_state
    def fit(self, X, y):
        if self.seed == 9:
            raise ValueError("no luck")
        if self.seed == 8:
            raise SystemExit
        self.means = np.array([X[y == c].mean() for c in np.unique(y)])
    def predict(self, X):
        return np.abs(X.mean(axis=(1, 2))[:, None] - self.means).argmin(axis=1)
"""


@pytest.fixture
def fake_venv(tmp_path, monkeypatch):
    """A folder whose Python is this one, with a package in the place of aeon."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    package = tmp_path / "aeon" / "classification"
    package.mkdir(parents=True)
    (package / "convolution_based.py").write_text(AEON)
    (tmp_path / "aeon-1.0.dist-info").mkdir()
    (tmp_path / "aeon-1.0.dist-info" / "METADATA").write_text("Name: aeon\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    aeon_models._worker(tmp_path).communicate()  # ends it
    aeon_models._worker.cache_clear()


def test_classifiers_of_aeon_run_in_an_environment_of_their_own(toy_data, fake_venv):
    aeon_models.prepare(fake_venv)  # nothing to do
    settings = toy_data | {"aeon_venv": fake_venv}
    row = script.work(job_of("rocket"), settings)
    assert (row["accuracy"], row["aeon"], row["test_size"]) == (1.0, "1.0", 11)
    with pytest.raises(RuntimeError, match="rocket: ValueError: no luck"):
        script.work(job_of("rocket", seed=9), settings)
    with pytest.raises(RuntimeError, match="the process of rocket ended with status 0"):
        script.work(job_of("rocket", seed=8), settings)
    assert script.work(job_of("rocket"), settings)["accuracy"] == 1.0  # by a new process


def test_an_environment_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "venv"
    with pytest.raises(SystemExit, match=r"pip install -q torch.* aeon.*--aeon-venv.*--models"):
        aeon_models.prepare(folder)


def test_small_sets_and_quick_models_come_first():
    names = ["MotorImagery", "LSST", "Libras"]
    jobs = script.make_jobs(names, ["osciformer", "resonator"], [0, 70], range(2))
    assert len(jobs) == 24
    first = {"dataset": "Libras", "percentage": 0, "model": "resonator", "seed": 0}
    assert jobs[0] == first
    order = [(job["dataset"], job["seed"]) for job in jobs]
    assert order.index(("LSST", 1)) < order.index(("MotorImagery", 0))
    assert order.index(("LSST", 0)) < order.index(("Libras", 1))


def document_of(tmp_path, cells: list[tuple]) -> object:
    found = Document(tmp_path / "out.json", {"estimator": {}})
    found.runs.append(shared.describe("x.py", [], commit="abc"))
    for dataset, model, percentage, seed, accuracy in cells:
        job = {"dataset": dataset, "percentage": percentage, "model": model, "seed": seed}
        row = {"accuracy": accuracy, "classes": 4, "train_size": 40, "test_size": 40}
        found.add(job, row | ({"network_accuracy": 0.25} if model == "osciformer" else {}))
    return found


def test_the_table_has_means_and_says_where_seeds_are_missing(tmp_path):
    cells = [("BasicMotions", "osciformer", *rest) for rest in ((0, 0, 0.9), (0, 1, 1.0))]
    found = document_of(tmp_path, [*cells, ("BasicMotions", "osciformer", 70, 0, 0.5)])
    lines = script.tables(found)
    titles = "data set | classes | training / test series | model | 0 % dropped | 70 % dropped"
    assert f"| {titles} |" in lines
    assert "| BasicMotions | 4 | 40 / 40 | osciformer | 0.950 ± 0.071 | 0.500 (1) |" in lines
    assert "| BasicMotions | 4 | 40 / 40 | network | 0.250 ± 0.000 | 0.250 (1) |" in lines
    assert any("commit abc" in line for line in lines)
    assert not any("Toy size" in line for line in lines)


def test_ranks_are_those_of_means_over_seeds_and_ties_share(tmp_path):
    cells = [
        *(("Libras", "resonator", 0, seed, accuracy) for seed, accuracy in enumerate((0.6, 0.8))),
        *(("Libras", "rocket", 0, seed, 0.7) for seed in range(2)),
        ("ERing", "resonator", 0, 0, 0.9),
        ("ERing", "rocket", 0, 0, 0.5),
    ]
    lines = script.tables(document_of(tmp_path, cells))
    assert "Mean accuracy and mean rank over 2 sets, all." in lines
    assert "| resonator | 0.8000 | 1.25 |" in lines
    assert "| rocket | 0.6000 | 1.75 |" in lines


def test_means_are_over_the_sets_that_all_models_have_and_say_so(tmp_path):
    cells = [
        *((name, "resonator", 0, 0, 0.9) for name in ("Libras", "ERing")),
        *((name, "rocket", 0, 0, 0.7) for name in ("Libras", "ERing")),
        ("Libras", "inception", 0, 0, 0.8),
    ]
    lines = script.tables(document_of(tmp_path, cells))
    assert any(line.endswith("over 1 sets, those that all models have: Libras.") for line in lines)
    assert "| inception | 0.8000 | 2.00 |" in lines
    assert "The same over all 2 sets, without inception." in lines
    assert "| rocket | 0.7000 | 2.00 |" in lines


def test_resonators_of_the_joined_classifier_count_where_they_were_not_run_alone():
    """One accuracy a seed: that of the row of its own, if there is one."""
    shared = {"dataset": "Libras", "percentage": 30}
    joined = {"model": "osciformer", "network_accuracy": 0.2, "resonator_accuracy": 0.7}
    rows = [
        {**shared, **joined, "seed": 0, "accuracy": 0.8},
        {**shared, **joined, "seed": 1, "accuracy": 0.9},
        {**shared, "model": "resonator", "seed": 1, "accuracy": 0.75},
    ]
    scores = script.gather(rows)
    assert scores["Libras", "resonator", 30] == [0.7, 0.75]
    assert scores["Libras", "osciformer", 30] == [0.8, 0.9]
