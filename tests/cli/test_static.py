"""Static columns that another table holds: in training, in predictions, in scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from osciformer.cli.tables import join_static, open_table
from osciformer.data import Layout
from osciformer.saving import load_model

Call = Callable[..., Any]

TINY = ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=1", "--batch-size=16"]
TINY += ["--accelerator=cpu", "--progress=none"]
ILL = ["--task=classification", "--id=who", "--time=hour", "--features=a,b", "--target=ill"]
ILL += ["--no-resonators"]


@pytest.fixture(scope="module")
def patients(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table with a row per series, in another order, with a series too many."""
    table = frame.groupby("who", as_index=False)[["ill", "age"]].first().iloc[::-1]
    table = table.assign(height=160.0 + table.who).rename(columns={"who": "patient"})
    extra = table.iloc[:1].assign(patient=999)
    path = tmp_path_factory.mktemp("patients") / "patients.csv"
    pd.concat([extra, table]).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def lean(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of observations without what the patients' table holds, but for the age."""
    path = tmp_path_factory.mktemp("lean") / "lean.parquet"
    frame.drop(columns=["ill", "score"]).to_parquet(path, index=False)
    return path


def labels(patients: Path) -> list[str]:
    return ["--labels", str(patients), "--labels-id=patient"]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_rows_of_the_other_table_find_their_series(
    is_streamed: bool, lean: Path, patients: Path
) -> None:
    layout = Layout(id="who", time="hour", values=["a", "b"], static=["age"])
    data = open_table(lean, layout, stream=is_streamed)
    found = join_static(data, ["height"], labels=patients, labels_id="patient")
    series = found.read() if is_streamed else found
    assert series.static_names == ("age", "height")
    assert series.static[:, 0].tolist() == [40.0 + number for number in range(40)]
    assert series.static[:, 1].tolist() == [160.0 + number for number in range(40)]


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_static_columns_of_both_tables_are_used(
    flag: str, cli: Call, lean: Path, patients: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    call = ["fit", lean, *ILL, *labels(patients), "--static=height,age", *TINY, flag]
    outcome = cli(*call, "-o", run)
    assert outcome.code == 0, outcome.err
    content = load_model(run / "model.safetensors").content
    assert content["static_names"] == ["age", "height"]
    refused = cli("predict", run, lean, "-o", tmp_path / "p.csv")
    assert refused.code == 2
    assert "lacks height" in refused.err
    assert "--labels" in refused.err
    assert cli("predict", run, lean, *labels(patients), "-o", tmp_path / "p.csv").code == 0
    assert len(pd.read_csv(tmp_path / "p.csv")) == 40
    # The run remembers how the ids of the other table are called.
    score = cli("evaluate", run, lean, "--labels", patients, "--bootstrap=0", "--json")
    assert score.code == 0, score.err
    assert json.loads(score.out)["series"] == 40


def test_streamed_and_whole_tables_give_the_same_predictions(
    cli: Call, lean: Path, patients: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    call = ["fit", lean, *ILL, *labels(patients), "--static=height", *TINY]
    assert cli(*call, "-o", run).code == 0
    files = [tmp_path / "disk.csv", tmp_path / "memory.csv"]
    for file, flag in zip(files, ("--stream", "--no-stream"), strict=True):
        assert cli("predict", run, lean, *labels(patients), flag, "-o", file).code == 0
    assert files[0].read_text() == files[1].read_text()
    # Heights matter: with others the probabilities differ.
    other = tmp_path / "other.csv"
    table = pd.read_csv(patients)
    table.assign(height=table.height[::-1].to_numpy()).to_csv(other, index=False)
    call = ["predict", run, lean, "--labels", other, "--labels-id=patient"]
    assert cli(*call, "-o", tmp_path / "p.csv").code == 0
    assert (tmp_path / "p.csv").read_text() != files[0].read_text()


def test_forecasters_take_static_columns_of_another_table(
    cli: Call, tables: Path, patients: Path, tmp_path: Path
) -> None:
    narrow = ["--variable=variable", "--value=value", "--id=who", "--time=hour"]
    call = ["fit", tables / "narrow.csv", "--task=forecasting", *narrow, *TINY]
    outcome = cli(*call, *labels(patients), "--static=age", "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    content = load_model(tmp_path / "run/model.safetensors").content
    assert content["static_names"] == ["age"]


def test_validation_table_gets_them_too(
    cli: Call, lean: Path, patients: Path, tmp_path: Path
) -> None:
    shutil.copyfile(lean, tmp_path / "v.parquet")
    flags = ["--static=height", "--validation", tmp_path / "v.parquet", *labels(patients)]
    outcome = cli("fit", lean, *ILL, *TINY, *flags, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err


def test_resumed_run_finds_them_again(
    cli: Call, lean: Path, patients: Path, tmp_path: Path
) -> None:
    call = ["fit", lean, *ILL, *labels(patients), "--static=height", *TINY]
    assert cli(*call, "-o", tmp_path / "run").code == 0
    outcome = cli("fit", "--resume", "-o", tmp_path / "run", "--progress=none")
    assert outcome.code == 0, outcome.err


def test_column_of_neither_table_has_near_matches_of_both(
    cli: Call, lean: Path, patients: Path, tmp_path: Path
) -> None:
    call = ["fit", lean, *ILL, *labels(patients), "--static=heights", *TINY]
    outcome = cli(*call, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert "did you mean 'height'" in outcome.err
    assert not (tmp_path / "run").exists()


def test_series_that_the_other_table_lacks_are_named(
    cli: Call, lean: Path, patients: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.csv"
    table = pd.read_csv(patients)
    table[table.patient != 7].to_csv(few, index=False)
    call = ["fit", lean, *ILL, "--labels", few, "--labels-id=patient", "--static=height", *TINY]
    outcome = cli(*call, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert "lacks 1 ids: '7'" in outcome.err
