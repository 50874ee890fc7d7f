"""`fit --calibration-fraction` and `predict --coverage`: intervals and sets in the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import osciformer

from .conftest import COLUMNS, TINY

Call = Callable[..., Any]
KEPT = "--calibration-fraction=0.25"
QUICK = ["--model=resonator", "--families=summary", "--progress=none"]


def fit_and_predict(cli: Call, tables: Path, folder: Path, *flags: str) -> pd.DataFrame:
    common = ["--id=who", "--time=hour", "--features=a,b", KEPT]
    done = cli("fit", tables / "wide.csv", *common, *flags, "-o", folder / "run")
    assert done.code == 0, done.err
    assert "10 series are kept for calibration, enough for --coverage up to 0.909" in done.err
    path = folder / "p.csv"
    done = cli("predict", folder / "run", tables / "wide.csv", "--coverage=0.9", "-o", path)
    assert done.code == 0, done.err
    return pd.read_csv(path)


def test_classes_have_sets(cli: Call, tables: Path, tmp_path: Path) -> None:
    flags = ["--task=classification", "--target=ill", *QUICK]
    found = fit_and_predict(cli, tables, tmp_path, *flags)
    assert list(found)[-2:] == ["in_set_0", "in_set_1"]
    assert found.in_set_0.dtype == bool
    assert np.where(found.prediction == 1, found.in_set_1, found.in_set_0).all()
    too_much = ["predict", tmp_path / "run", tables / "wide.csv", "-o", tmp_path / "q.csv"]
    done = cli(*too_much, "--coverage=0.95")
    assert done.code != 0
    assert "needs at least 19 calibration series; calibrate had 10" in done.err
    assert not (tmp_path / "q.csv").exists()


def test_kept_series_are_not_trained_on(cli: Call, tables: Path, tmp_path: Path) -> None:
    fit_and_predict(cli, tables, tmp_path, "--task=regression", "--target=score", *QUICK)
    model: Any = osciformer.load(tmp_path / "run/model.safetensors")
    scores = pd.read_csv(tables / "wide.csv").groupby("who").score.first()
    # The center is the mean of thirty of forty targets, whichever they are.
    assert model.conformal_[0].count == 10
    assert not np.isclose(model.target_center_[0], scores.mean(), rtol=1e-9)


def test_values_lie_in_the_middle(cli: Call, tables: Path, tmp_path: Path) -> None:
    flags = ["--task=regression", "--target=score,age", *QUICK]
    found = fit_and_predict(cli, tables, tmp_path, *flags)
    names = ["prediction", "lower", "upper"]
    assert list(found)[1:] == [f"{name}_{of}" for name in names for of in ("score", "age")]
    np.testing.assert_allclose((found.lower_age + found.upper_age) / 2, found.prediction_age)


def test_forecasts_have_ends(cli: Call, tables: Path, tmp_path: Path) -> None:
    found = fit_and_predict(cli, tables, tmp_path, "--task=forecasting", "--horizon=4", *TINY)
    assert list(found) == ["who", "hour", "variable", "prediction", "lower", "upper"]
    assert (found.lower < found.prediction).all()
    assert (found.prediction < found.upper).all()


def test_a_model_without_calibration_says_what_it_lacks(
    cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    rest = [tables / "wide.csv", "--coverage=0.9", "-o", tmp_path / "p.csv"]
    done = cli("predict", runs / "imputation", *rest)
    assert done.code != 0
    assert "fitted with --calibration-fraction" in done.err


@pytest.mark.parametrize("fraction", ["0.001", "1", "-0.1"])
def test_a_fraction_must_leave_series_on_both_sides(
    fraction: str, cli: Call, tables: Path, tmp_path: Path
) -> None:
    flags = [*COLUMNS, "--features=a,b", "--task=regression", "--target=score", *QUICK]
    more = [f"--calibration-fraction={fraction}", "-o", tmp_path / "run"]
    done = cli("fit", tables / "wide.csv", *flags, *more)
    assert done.code != 0
    assert "calibration-fraction" in done.err
    assert not (tmp_path / "run").exists()
