"""`osciformer explain`: importance of variables, and of the parts of single series."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

Call = Callable[..., Any]


@pytest.mark.parametrize("task", ["classification", "regression", "forecasting", "imputation"])
def test_importance_of_variables(
    task: str, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    table = tables / ("narrow.csv" if task == "forecasting" else "wide.parquet")
    output = tmp_path / "importance.csv"
    outcome = cli("explain", runs / task, table, "-o", output, "--repeats=2")
    assert outcome.code == 0, outcome.err
    found = pd.read_csv(output)
    assert set(found.variable) == {"a", "b", *(["age"] if task == "classification" else [])}
    if task == "classification":
        assert found.variable[0] == "a"
        assert found.low[0] > 0
    assert "95 % interval" in outcome.out
    assert f"{len(found)} rows" in outcome.out


def test_parts_of_single_series(cli: Call, runs: Path, tables: Path, tmp_path: Path) -> None:
    run, table, output = runs / "classification", tables / "wide.parquet", tmp_path / "parts.csv"
    flags = ["--series=7", "--series=12", "--windows=3", "-o", output]
    outcome = cli("explain", run, table, *flags)
    assert outcome.code == 0, outcome.err
    found = pd.read_csv(output)
    assert set(found.who) == {7, 12}
    assert set(found.part) == {"variable", "static", "time", "cell"}
    assert cli("predict", run, table, "-o", tmp_path / "p.csv").code == 0
    chance = pd.read_csv(tmp_path / "p.csv").set_index("who").probability_1
    assert found.prediction.to_numpy() == pytest.approx(chance[found.who].to_numpy(), abs=1e-5)
    whole = found[found.part == "variable"]
    assert whole.loc[whole[whole.who == 7].effect.abs().idxmax()].variable == "a"


def test_an_id_column_called_like_a_result_stays(
    cli: Call, tables: Path, frame: Any, tmp_path: Path
) -> None:
    table = tmp_path / "t.csv"
    frame.rename(columns={"who": "effect"}).to_csv(table, index=False)
    flags = ["--id=effect", "--time=hour", "--target=ill", "--features=a", "--families=summary"]
    flags += ["--model=resonator", "--task=classification"]
    assert cli("fit", table, *flags, "-o", tmp_path / "run").code == 0
    output = tmp_path / "parts.csv"
    outcome = cli("explain", tmp_path / "run", table, "--series=7", "-o", output)
    assert outcome.code == 0, outcome.err
    assert "the predicted one is called 'effect_'" in outcome.err
    assert set(pd.read_csv(output).effect) == {7}


def test_bad_calls_are_refused(cli: Call, runs: Path, tables: Path, tmp_path: Path) -> None:
    table, output = tables / "wide.parquet", tmp_path / "x.csv"
    outcome = cli("explain", runs / "classification", table, "--series=nobody", "-o", output)
    assert outcome.code == 1
    assert "no series 'nobody'; it has 0, 1" in outcome.err
    outcome = cli("explain", runs / "events", tables / "narrow.csv", "-o", output)
    assert outcome.code == 1
    assert "for series, not for events" in outcome.err
    outcome = cli("explain", runs / "classification", table, "-o", tmp_path / "x.xlsx")
    assert outcome.code == 2
    assert not output.exists()
