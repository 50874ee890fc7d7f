"""`osciformer predict`: one table in, one table out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

Call = Callable[..., Any]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_classes_and_their_probabilities(
    ending: str, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"p.{ending}"
    outcome = cli("predict", runs / "classification", tables / "wide.csv", "-o", path)
    assert outcome.code == 0, outcome.err
    found = pd.read_csv(path) if ending == "csv" else pd.read_parquet(path)
    assert list(found) == ["who", "prediction", "probability_0", "probability_1"]
    assert found.who.astype(str).tolist() == [str(number) for number in range(40)]
    assert np.allclose(found.probability_0 + found.probability_1, 1.0)
    assert (found.prediction == (found.probability_1 > 0.5)).all()


def test_values(cli: Call, runs: Path, tables: Path, tmp_path: Path) -> None:
    model = runs / "regression/model.safetensors"
    assert cli("predict", model, tables / "wide.csv", "-o", tmp_path / "p.csv").code == 0
    assert list(pd.read_csv(tmp_path / "p.csv")) == ["who", "prediction"]


def test_several_targets_have_a_column_each(cli: Call, tables: Path, tmp_path: Path) -> None:
    flags = ["--id=who", "--time=hour", "--features=a,b", "--target=score,age", "--dim=8"]
    flags += ["--num-heads=1", "--epochs=1", "--progress=none", "--task=regression"]
    assert cli("fit", tables / "wide.csv", *flags, "-o", tmp_path / "run").code == 0
    assert cli("predict", tmp_path / "run", tables / "wide.csv", "-o", tmp_path / "p.csv").code == 0
    names = list(pd.read_csv(tmp_path / "p.csv"))
    assert names == ["who", "prediction_score", "prediction_age"]


def test_forecasts_at_steps_with_quantiles(
    cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    flags = ["--horizon=4", "--every=2", "--quantiles"]
    path = tmp_path / "p.csv"
    outcome = cli("predict", runs / "forecasting", tables / "narrow.csv", *flags, "-o", path)
    assert outcome.code == 0, outcome.err
    found = pd.read_csv(path)
    assert list(found)[:4] == ["who", "hour", "variable", "prediction"]
    assert list(found)[4:] == ["q0.05", "q0.25", "q0.5", "q0.75", "q0.95"]
    assert len(found) == 40 * 2 * 2
    last = pd.read_csv(tables / "narrow.csv").groupby("who").hour.max()
    ahead = found.hour - found.who.map(last)
    assert sorted(ahead.round(6).unique()) == [2.0, 4.0]
    assert (found["q0.05"] <= found["q0.95"]).all()


@pytest.mark.parametrize("by_id", [True, False], ids=["by id", "for all"])
def test_forecasts_at_times_of_a_file(
    by_id: bool, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    times = pd.DataFrame({"hour": [20.0, 30.0]})
    if by_id:
        times["who"] = [3, 5]
    times.to_csv(tmp_path / "times.csv", index=False)
    path = tmp_path / "p.parquet"
    call = ["predict", runs / "forecasting", tables / "narrow.csv", "-o", path]
    outcome = cli(*call, "--times", tmp_path / "times.csv")
    assert outcome.code == 0, outcome.err
    found = pd.read_parquet(path)
    assert sorted(found.hour.unique()) == [20.0, 30.0]
    assert found.who.nunique() == (2 if by_id else 40)


def test_imputations_at_the_rows_of_the_table(
    cli: Call, runs: Path, tables: Path, tmp_path: Path, frame: Any
) -> None:
    path = tmp_path / "p.csv"
    outcome = cli("predict", runs / "imputation", tables / "wide.parquet", "-o", path)
    assert outcome.code == 0, outcome.err
    found = pd.read_csv(path)
    assert len(found) == len(frame)
    assert found.variable.unique().tolist() == ["a"]
    assert np.isfinite(found.prediction).all()


@pytest.mark.parametrize(
    ("task", "flags", "wanted"),
    [
        ("classification", ["--quantiles"], "do not apply"),
        ("imputation", ["--horizon=3"], "use --times"),
        ("forecasting", ["--horizon=1", "--every=2"], "not above --horizon"),
        ("forecasting", ["--horizon=1", "--times=x.csv"], "not both"),
    ],
)
def test_flags_of_another_task_are_refused(
    task: str, flags: list[str], wanted: str, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    table = tables / ("narrow.csv" if task == "forecasting" else "wide.parquet")
    outcome = cli("predict", runs / task, table, *flags, "-o", tmp_path / "p.csv")
    assert outcome.code == 2
    assert wanted in outcome.err


def test_ids_of_another_kind_are_explained(
    cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    pd.DataFrame({"who": ["x"], "hour": [20.0]}).to_csv(tmp_path / "times.csv", index=False)
    call = ["predict", runs / "forecasting", tables / "narrow.csv", "-o", tmp_path / "p.csv"]
    outcome = cli(*call, "--times", tmp_path / "times.csv")
    assert outcome.code == 1
    assert "none of the ids" in outcome.err


def test_missing_column_of_training_is_named(
    cli: Call, runs: Path, frame: Any, tmp_path: Path
) -> None:
    frame.rename(columns={"b": "B"}).to_parquet(tmp_path / "t.parquet")
    outcome = cli("predict", runs / "regression", tmp_path / "t.parquet", "-o", tmp_path / "p.csv")
    assert outcome.code == 1
    assert "did you mean 'B'" in outcome.err


def test_variable_that_does_not_occur_is_missing(
    cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    narrow = pd.read_csv(tables / "narrow.csv")
    narrow[narrow.variable == "a"].to_csv(tmp_path / "t.csv", index=False)
    outcome = cli("predict", runs / "forecasting", tmp_path / "t.csv", "-o", tmp_path / "p.csv")
    assert outcome.code == 0, outcome.err


def test_ending_says_the_format(cli: Call, runs: Path, tables: Path, tmp_path: Path) -> None:
    outcome = cli("predict", runs / "regression", tables / "wide.csv", "-o", tmp_path / "p.xlsx")
    assert outcome.code == 2
    assert ".parquet or .csv" in outcome.err


def test_dates_come_back_as_dates(cli: Call, frame: Any, tmp_path: Path) -> None:
    dated = frame.assign(hour=pd.Timestamp("2024-01-01") + pd.to_timedelta(frame.hour, unit="h"))
    dated.to_parquet(tmp_path / "t.parquet")
    flags = ["--task=forecasting", "--id=who", "--time=hour", "--features=a", "--unit=h"]
    flags += ["--dim=8", "--num-heads=1", "--epochs=1", "--progress=none", "--horizon=3"]
    assert cli("fit", tmp_path / "t.parquet", *flags, "-o", tmp_path / "run").code == 0
    path = tmp_path / "p.parquet"
    call = ["predict", tmp_path / "run", tmp_path / "t.parquet", "-o", path]
    assert cli(*call, "--horizon=2", "--every=2").code == 0
    found = pd.read_parquet(path).set_index("who").hour
    ahead = found - dated.groupby("who").hour.max()
    assert (ahead.dt.round("s") == pd.Timedelta(2, "h")).all()
    times = pd.DataFrame({"hour": [pd.Timestamp("2024-01-02")]})
    times.to_parquet(tmp_path / "times.parquet")
    assert cli(*call, "--times", tmp_path / "times.parquet").code == 0
    assert (pd.read_parquet(path).hour == pd.Timestamp("2024-01-02")).all()


def test_the_header_of_a_model_is_read_once(
    cli: Call, runs: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer import saving

    read, seen = saving.read_header, []

    def count(path: Path) -> Any:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(saving, "read_header", count)
    outcome = cli("predict", runs / "events", tables / "narrow.csv", "-o", tmp_path / "p.csv")
    assert outcome.code == 0, outcome.err
    assert seen == [runs / "events/model.safetensors"]


def test_predictions_are_written_part_by_part(
    cli: Call, runs: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer.cli import tables as reading

    call = ["predict", runs / "classification", tables / "wide.parquet", "--stream"]
    assert cli(*call, "-o", tmp_path / "whole.csv").code == 0
    sizes: list[int] = []
    parts_of = reading.parts_of

    def count(data: Any) -> Iterator[Any]:
        for part in parts_of(data, size=12):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(reading, "parts_of", count)
    assert cli(*call, "-o", tmp_path / "parts.csv").code == 0
    assert sizes == [12, 12, 12, 4]
    whole, parts = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("whole", "parts"))
    pd.testing.assert_frame_equal(whole, parts, rtol=1e-5)
