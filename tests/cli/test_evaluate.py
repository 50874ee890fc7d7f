"""`osciformer evaluate`: scores with intervals, as a table, JSON or a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics as judge

from osciformer.cli.evaluate import (
    answer_scores,
    bootstrap,
    class_scores,
    sum_answers,
    value_scores,
)
from osciformer.estimators.forecasting import Hidden

Call = Callable[..., Any]

METRICS = {
    "classification": {"auroc", "auprc", "accuracy", "log_loss", "brier", "calibration_error"},
    "regression": {"rmse", "mae", "r2"},
    "forecasting": {"pinball", "mae", "rmse", "coverage", "skill"},
    "imputation": {"pinball", "mae", "rmse", "coverage", "skill"},
}


@pytest.mark.parametrize("task", METRICS)
def test_scores_with_intervals_and_picture(
    task: str, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    table = tables / ("narrow.csv" if task == "forecasting" else "wide.parquet")
    picture, output = tmp_path / "p.png", tmp_path / "scores.json"
    flags = ["--json", "--bootstrap=50", "--picture", picture, "-o", output]
    outcome = cli("evaluate", runs / task, table, *flags)
    assert outcome.code == 0, outcome.err
    content = json.loads(outcome.out)
    assert content == json.loads(output.read_text())
    assert set(content["metrics"]) == METRICS[task]
    assert content["series"] == 40
    for name, found in content["metrics"].items():
        assert found["low"] <= found["high"], name
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_scores_are_those_of_the_predictions(
    cli: Call, runs: Path, tables: Path, frame: Any, tmp_path: Path
) -> None:
    run, table = runs / "classification", tables / "wide.parquet"
    assert cli("predict", run, table, "-o", tmp_path / "p.csv").code == 0
    chance = pd.read_csv(tmp_path / "p.csv").probability_1
    truth = frame.groupby("who").ill.first()
    found = json.loads(cli("evaluate", run, table, "--json", "--bootstrap=0").out)["metrics"]
    assert found["auroc"]["value"] == pytest.approx(judge.roc_auc_score(truth, chance))
    assert found["auprc"]["value"] == pytest.approx(judge.average_precision_score(truth, chance))
    assert found["log_loss"]["value"] == pytest.approx(judge.log_loss(truth, chance), rel=1e-5)
    assert found["auroc"]["low"] is None


def test_forecast_skill_is_the_score_of_the_estimator(cli: Call, runs: Path, tables: Path) -> None:
    from osciformer.data import read_csv
    from osciformer.estimators import load_estimator

    estimator = load_estimator(runs / "forecasting/model.safetensors")
    layout: Any = dict(estimator.layout)
    series = read_csv(tables / "narrow.csv", **layout)
    outcome = cli("evaluate", runs / "forecasting", tables / "narrow.csv", "--json")
    skill = json.loads(outcome.out)["metrics"]["skill"]["value"]
    assert skill == pytest.approx(estimator.score(series), abs=1e-4)


def test_table_is_printed(cli: Call, runs: Path, tables: Path) -> None:
    outcome = cli("evaluate", runs / "regression", tables / "wide.csv", "--bootstrap=10")
    assert "95 % interval" in outcome.out
    assert "rmse" in outcome.out


def test_model_file_alone_needs_the_target(cli: Call, runs: Path, tables: Path) -> None:
    model = runs / "classification/model.safetensors"
    refused = cli("evaluate", model, tables / "wide.csv")
    assert refused.code == 2
    assert "--target is needed" in refused.err
    assert cli("evaluate", model, tables / "wide.csv", "--target=ill", "--bootstrap=0").code == 0


def test_unknown_classes_are_named(cli: Call, runs: Path, frame: Any, tmp_path: Path) -> None:
    frame.assign(ill=frame.ill + 1).to_parquet(tmp_path / "t.parquet")
    outcome = cli("evaluate", runs / "classification", tmp_path / "t.parquet")
    assert outcome.code == 1
    assert "not there in fit" in outcome.err


def test_picture_ending_is_checked_first(cli: Call, runs: Path, tables: Path) -> None:
    outcome = cli("evaluate", runs / "regression", tables / "wide.csv", "--picture=p.bmp")
    assert outcome.code == 2


def test_calibrated_chances_have_a_small_error() -> None:
    generator = np.random.default_rng(0)
    chance = generator.random(20000)
    labels = (generator.random(20000) < chance).astype(int)
    good = class_scores(np.stack((1 - chance, chance), axis=1), labels)
    bad = class_scores(np.stack((1 - chance**3, chance**3), axis=1), labels)
    assert good["calibration_error"] < 0.02 < 0.2 < bad["calibration_error"]
    assert good["auroc"] == pytest.approx(bad["auroc"])


def test_several_classes_are_scored() -> None:
    scores = class_scores(np.eye(3) * 0.7 + 0.1, np.arange(3))
    assert (scores["auroc"], scores["accuracy"]) == (1.0, 1.0)
    assert scores["calibration_error"] == pytest.approx(0.2)


def test_constant_truth_has_no_r2() -> None:
    assert np.isnan(value_scores(np.zeros((3, 1)), np.ones((3, 1)))["r2"])


@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_scores_of_values_do_not_depend_on_their_unit(unit: float) -> None:
    truth, found = np.random.default_rng(0).normal(size=(2, 20, 1))
    want, got = value_scores(found, truth), value_scores(found * unit, truth * unit)
    assert got["r2"] == pytest.approx(want["r2"])
    assert got["rmse"] / unit == pytest.approx(want["rmse"])
    assert want["rmse"] == np.sqrt(np.square(found - truth).mean())


def test_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(100):
        values = generator.standard_normal(60)
        found = bootstrap(lambda i, v=values: {"m": v[i].mean()}, 60, rounds=200, seed=seed)["m"]
        hits += found.low <= 0.0 <= found.high
    assert 88 <= hits <= 99


def test_answers_are_summed_per_series() -> None:
    found = np.array([[[-1.0, 0.0, 1.0]], [[-1.0, 0.0, 1.0]], [[-1.0, 0.0, 1.0]]])
    truth = np.array([[0.5], [2.0], [np.nan]])
    hidden = Hidden(found, truth, np.zeros((3, 1)), np.array([0, 1, 3]))
    sums = sum_answers(hidden, (0.1, 0.5, 0.9))
    assert sums[:, 0].tolist() == [1.0, 1.0]
    scores = answer_scores(sums)
    assert scores["mae"] == pytest.approx(1.25)
    assert scores["coverage"] == pytest.approx(0.5)
    assert scores["skill"] == pytest.approx(0.0)
    assert sums[:, -3:].tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert np.isnan(answer_scores(sums[:0])["mae"])


def test_undefined_scores_are_named_with_the_reason(
    cli: Call, runs: Path, frame: Any, tmp_path: Path
) -> None:
    frame[frame.ill == 1].to_parquet(tmp_path / "ill.parquet")
    call = ["evaluate", runs / "classification", tmp_path / "ill.parquet"]
    content = json.loads(cli(*call, "--json", "--bootstrap=9").out)
    nulls = [name for name, found in content["metrics"].items() if found["value"] is None]
    assert set(content["undefined"]) == set(nulls) == {"auroc", "auprc"}
    printed = cli(*call, "--bootstrap=0").out
    assert "nan" not in printed
    assert "auroc is undefined: it needs series of a class and series of others" in printed
    assert "--bootstrap 0 draws no samples" in printed


def test_undefined_validation_scores_are_named_with_the_reason(
    cli: Call, tables: Path, frame: Any, tmp_path: Path
) -> None:
    frame[frame.ill == 1].to_parquet(tmp_path / "ill.parquet")
    call = ["fit", tables / "wide.parquet", "--task=classification", "--id=who", "--time=hour"]
    call += ["--features=a,b", "--target=ill", "--validation", tmp_path / "ill.parquet"]
    call += ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=1", "--no-resonators"]
    outcome = cli(*call, "--monitor=loss", "--progress=none", "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert "auprc is undefined" in outcome.out
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    nulls = {name for name, value in metrics["validation"].items() if value is None}
    assert set(metrics["undefined"]) == nulls == {"auroc", "auprc"}
