"""`osciformer` on tables of events: fit, predict, evaluate."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

Call = Callable[..., Any]

TINY = ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=2", "--batch-size=16"]
TINY += ["--learning-rate=0.02", "--accelerator=cpu", "--progress=none"]
COLUMNS = ["--task=events", "--id=who", "--time=hour", "--type=what"]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with train.parquet and new.csv, in which types take turns."""
    folder = tmp_path_factory.mktemp("events")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(40):
        what = np.arange(rng.integers(2, 9)) % 2
        hours = np.cumsum(np.where(what, 0.5, 2.0) * rng.gamma(4, 0.25, len(what)))
        rows += [(f"p{number:02d}", t, ("visit", "order")[k % 2]) for k, t in enumerate(hours)]
    table = pd.DataFrame(rows, columns=["who", "hour", "what"])
    table[table["who"] < "p30"].to_parquet(folder / "train.parquet")
    table[table["who"] >= "p30"].to_csv(folder / "new.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def run(events: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from .conftest import call

    folder = tmp_path_factory.mktemp("runs") / "run"
    flags = [*COLUMNS, *TINY, "--time-unit=h", "--validation-fraction=0.2"]
    outcome = call("fit", events / "train.parquet", *flags, "-o", folder)
    assert outcome.code == 0, outcome.err
    assert "30 sequences" in outcome.err
    assert "log_likelihood" in outcome.out
    return folder


def test_run_folder_holds_the_model_and_pictures(run: Path) -> None:
    names = {item.name for item in run.iterdir()}
    assert {"config.yaml", "run.json", "metrics.json", "history.csv", "model.safetensors"} <= names
    assert {"training.png", "calibration.png", "intensity.png"} <= names
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in names if "png" in name)
    assert yaml.safe_load((run / "config.yaml").read_text())["type"] == "what"
    facts = json.loads((run / "run.json").read_text())["data"]
    assert facts["types"] == ["order", "visit"]
    assert facts["series"] == 30
    assert json.loads((run / "metrics.json").read_text())["is_finished"]


def test_next_events_are_written(cli: Call, run: Path, events: Path, tmp_path: Path) -> None:
    outcome = cli("predict", run, events / "new.csv", "-o", tmp_path / "next.parquet")
    assert outcome.code == 0, outcome.err
    assert "10 rows, one per sequence; gaps in h" in outcome.out
    found = pd.read_parquet(tmp_path / "next.parquet")
    table = pd.read_csv(events / "new.csv")
    assert list(found["who"]) == list(table["who"].unique())
    last = table.groupby("who", sort=False)["hour"].max()
    np.testing.assert_allclose(found["last_time"], last)
    np.testing.assert_allclose(found["median_time"], found["last_time"] + found["median_gap"])
    np.testing.assert_allclose(found[["probability_order", "probability_visit"]].sum(axis=1), 1)
    assert set(found["type"]) <= {"order", "visit"}


def test_scores_have_a_unit_intervals_and_a_calibration(
    cli: Call, run: Path, events: Path, tmp_path: Path
) -> None:
    from osciformer.estimators import load_estimator

    scores, picture = tmp_path / "scores.json", tmp_path / "qq.png"
    table = events / "new.csv"
    outcome = cli(
        "evaluate", run, table, "--bootstrap=50", "-o", scores, "--picture", picture, "--json"
    )
    assert outcome.code == 0, outcome.err
    found = json.loads(scores.read_text())
    assert json.loads(outcome.out) == found
    assert found["time_unit"] == "h"
    wanted = load_estimator(run / "model.safetensors").evaluate(pd.read_csv(table))  # type: ignore[attr-defined]
    assert found["events"] == wanted.num_predicted
    metrics = found["metrics"]
    assert metrics["log_likelihood"]["value"] == pytest.approx(wanted.log_likelihood.micro)
    assert metrics["macro_log_likelihood"]["value"] == pytest.approx(wanted.log_likelihood.macro)
    assert metrics["accuracy"]["value"] == pytest.approx(wanted.accuracy)
    assert metrics["time_rmse"]["value"] == pytest.approx(wanted.time_rmse)
    assert metrics["time_mae"]["low"] < metrics["time_mae"]["value"] < metrics["time_mae"]["high"]
    assert 0 < found["calibration"]["statistic"] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = cli("evaluate", run, table, "--bootstrap=0").out
    assert "times in h" in printed
    assert "KS distance" in printed


def test_a_run_is_resumed_to_the_same_model(
    cli: Call, run: Path, events: Path, tmp_path: Path
) -> None:
    from osciformer.saving import load_model

    flags = [*COLUMNS, *TINY, "--time-unit=h", "--validation-fraction=0.2"]
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    (cut / "model.safetensors").unlink()
    outcome = cli("fit", "--resume", "-o", cut)
    assert outcome.code == 0, outcome.err
    one, two = (load_model(folder / "model.safetensors").weights for folder in (run, cut))
    assert all(torch.equal(one[name], two[name]) for name in one)
    outcome = cli("fit", "--resume", "--head=decay", "-o", cut)
    assert outcome.code == 2
    assert "--head was mixture when the run was begun, and is decay" in outcome.err
    table = pd.read_parquet(events / "train.parquet").iloc[:-1]
    table.to_parquet(tmp_path / "other.parquet")
    outcome = cli("fit", tmp_path / "other.parquet", *flags, "--resume", "-o", cut)
    assert outcome.code == 1
    assert "begun with other events" in outcome.err


def test_a_blend_is_fitted_told_evaluated_and_resumed(
    cli: Call, events: Path, tmp_path: Path
) -> None:
    from osciformer.saving import load_model

    run = tmp_path / "run"
    flags = [*COLUMNS, *TINY, "--blend-with=renewal,repeat", "--validation-fraction=0.3"]
    outcome = cli("fit", events / "train.parquet", *flags, "-o", run)
    assert outcome.code == 0, outcome.err
    assert re.search(r"weights network 0\.\d+, renewal 0\.\d+, repeat 0\.\d+", outcome.out)
    weights = json.loads((run / "metrics.json").read_text())["blend_weights"]
    assert sum(weights.values()) == pytest.approx(1.0)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["blend_with"] == ["renewal", "repeat"]
    outcome = cli("evaluate", run, events / "new.csv", "--json", "--bootstrap=0")
    found = json.loads(outcome.out)["metrics"]["log_likelihood"]["value"]
    alone = json.loads((run / "metrics.json").read_text())["validation"]["log_likelihood"]
    assert found > alone
    before = load_model(run / "model.safetensors").weights
    (run / "model.safetensors").unlink()
    outcome = cli("fit", "--resume", "-o", run)
    assert outcome.code == 0, outcome.err
    after = load_model(run / "model.safetensors").weights
    assert all(torch.equal(before[name], after[name]) for name in before)
    outcome = cli("fit", "--resume", "--blend-with=none", "-o", run)
    assert outcome.code == 2
    assert "--blend-with was" in outcome.err


def test_companions_of_a_blend_come_from_a_file_too(
    cli: Call, events: Path, tmp_path: Path
) -> None:
    (tmp_path / "auto.yaml").write_text("blend_with: auto\nvalidation_fraction: 0.3\n")
    flags = [*COLUMNS, *TINY, "--config", tmp_path / "auto.yaml"]
    outcome = cli("fit", events / "train.parquet", *flags, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert list(metrics["blend_weights"]) == ["network", "renewal", "repeat", "hawkes"]
    flags = [*flags, "--blend-with=none"]
    outcome = cli("fit", events / "train.parquet", *flags, "-o", tmp_path / "alone")
    metrics = json.loads((tmp_path / "alone" / "metrics.json").read_text())
    assert metrics["blend_weights"] == {"network": 1.0}
    assert "weights" not in outcome.out


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--task=events", "--id=who", "--time=hour"], 2, "--type is needed.*or none if all"),
        (["--task=events", "--time=hour", "--type=what"], 2, "--id is needed"),
        ([*COLUMNS, "--target=what"], 2, "--target is a setting of classification"),
        ([*COLUMNS, "--carry"], 2, "--carry is a setting of"),
        ([*COLUMNS, "--type=kind"], 1, "'kind'"),
        ([*COLUMNS, "--encoder=lstm"], 1, "encoder must be one of.*lstm"),
        ([*COLUMNS, "--dim=0"], 1, "dim must be at least 1"),
        ([*COLUMNS, "--blend-with=poisson"], 1, "blend.with must be one of 'auto'.*'poisson'"),
        (["--task=classification", "--id=who", "--time=hour", "--head=decay"], 2, "of events"),
    ],
    ids=["no type", "no id", "target", "carry", "column", "encoder", "dim", "blend", "other task"],
)
def test_wrong_calls_are_explained_and_leave_nothing(
    cli: Call, events: Path, tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    outcome = cli("fit", events / "train.parquet", *TINY, *flags, "-o", tmp_path / "run")
    assert outcome.code == code, outcome.err
    assert re.search(message, outcome.err), outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"who": [1, 2], "hour": [0.0, 1.0], "what": ["a", "b"]}, "has a second event"),
        ({"who": [1, 1], "hour": [2.0, 2.0], "what": ["a", "b"]}, "no waiting time to learn"),
        ({"who": [1, 1], "hour": [0.0, None], "what": ["a", "b"]}, "hour"),
        ({"who": [1, 1], "hour": [0.0, 1.0], "what": ["a", None]}, "1 rows without a type"),
    ],
    ids=["no second", "no gap", "no time", "missing type"],
)
def test_bad_tables_are_explained(
    cli: Call, tmp_path: Path, table: dict[str, Any], message: str
) -> None:
    pd.DataFrame(table).to_parquet(tmp_path / "bad.parquet")
    outcome = cli("fit", tmp_path / "bad.parquet", *COLUMNS, *TINY, "-o", tmp_path / "run")
    assert outcome.code == 1
    assert message in outcome.err
    assert not (tmp_path / "run").exists()


def test_what_the_model_does_not_know_is_refused(
    cli: Call, run: Path, events: Path, tmp_path: Path
) -> None:
    output = tmp_path / "next.csv"
    strange = pd.read_csv(events / "new.csv").replace({"what": {"order": "return"}})
    strange.to_csv(tmp_path / "strange.csv", index=False)
    outcome = cli("predict", run, tmp_path / "strange.csv", "-o", output)
    assert outcome.code == 1
    assert "types that are not known, 'return'" in outcome.err
    outcome = cli("predict", run, events / "new.csv", "-o", output, "--horizon=3")
    assert outcome.code == 2
    assert "do not apply to events" in outcome.err
    outcome = cli("evaluate", run, events / "new.csv", "--target=what")
    assert outcome.code == 2
    single = pd.read_csv(events / "new.csv").groupby("who", as_index=False).first()
    single.to_csv(tmp_path / "single.csv", index=False)
    outcome = cli("evaluate", run, tmp_path / "single.csv")
    assert outcome.code == 1
    assert "nothing to score: no sequence has a second event" in outcome.err
    assert not output.exists()


def test_integers_that_the_table_lacks_can_be_announced(cli: Call, tmp_path: Path) -> None:
    table = pd.DataFrame({"who": [1, 1, 2, 2], "hour": [0.0, 1.0, 0.0, 2.0], "what": [0, 1, 1, 0]})
    table.to_parquet(tmp_path / "train.parquet")
    table.replace({"what": {1: 2}}).to_parquet(tmp_path / "new.parquet")
    for flags, code in (([], 1), (["--num-types=3"], 0)):
        run = tmp_path / f"run{code}"
        assert cli("fit", tmp_path / "train.parquet", *COLUMNS, *TINY, *flags, "-o", run).code == 0
        outcome = cli("predict", run, tmp_path / "new.parquet", "-o", tmp_path / "next.csv")
        assert outcome.code == code, outcome.err
        assert code == 0 or "must be from 0 to 1; there is 2" in outcome.err


def test_one_type_and_dates(cli: Call, events: Path, tmp_path: Path) -> None:
    table = pd.read_parquet(events / "train.parquet").drop(columns="what")
    table["hour"] = pd.Timestamp("2024-05-01") + pd.to_timedelta(table["hour"], unit="h")
    table.to_parquet(tmp_path / "dates.parquet")
    flags = [*COLUMNS[:-1], "--type=none", "--unit=h", *TINY]
    outcome = cli("fit", tmp_path / "dates.parquet", *flags, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    output = tmp_path / "next.parquet"
    assert cli("predict", tmp_path / "run", tmp_path / "dates.parquet", "-o", output).code == 0
    found = pd.read_parquet(output)
    hours = (found["median_time"] - found["last_time"]) / pd.Timedelta("1h")
    np.testing.assert_allclose(hours, found["median_gap"], atol=1e-6)


def test_validation_table_is_used(cli: Call, events: Path, tmp_path: Path) -> None:
    flags = [*COLUMNS, *TINY, f"--validation={events / 'new.csv'}"]
    outcome = cli("fit", events / "train.parquet", *flags, "-o", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())["validation"]
    scores = cli("evaluate", tmp_path / "run", events / "new.csv", "--json", "--bootstrap=0")
    found = json.loads(scores.out)["metrics"]["log_likelihood"]["value"]
    assert found == pytest.approx(metrics["log_likelihood"], abs=1e-5)
