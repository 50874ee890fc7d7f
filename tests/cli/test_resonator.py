"""`osciformer fit --model resonator`: the same commands, other settings."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

Call = Callable[..., Any]
COMMON = ["--model=resonator", "--id=who", "--time=hour", "--features=a,b", "--progress=none"]
ILL = ["--task=classification", "--target=ill", *COMMON]


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--linear-head=ridge", "--families=states"]])
def test_classes_from_fit_to_evaluate(
    flags: list[str], cli: Call, tables: Path, tmp_path: Path
) -> None:
    table, run = tables / "wide.parquet", tmp_path / "run"
    done = cli("fit", table, *ILL, "--static=age", *flags, "-o", run)
    assert done.code == 0, done.err
    assert "each series by a model of the others" in done.out
    assert yaml.safe_load((run / "config.yaml").read_text())["model"] == "resonator"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["is_finished"]
    assert metrics["validation"]["auroc"] > 0.9
    done = cli("predict", run, table, "-o", tmp_path / "p.csv")
    assert done.code == 0, done.err
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    assert np.mean([int(row["prediction"]) == int(row["who"]) % 2 for row in rows]) > 0.9
    done = cli("evaluate", run, table, "--json", "--bootstrap=20")
    assert done.code == 0, done.err
    assert json.loads(done.out)["metrics"]["auroc"]["value"] > 0.9


def test_values_from_fit_to_evaluate(cli: Call, tables: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = cli(
        "fit", tables / "wide.csv", "--task=regression", "--target=score", *COMMON, "-o", run
    )
    assert done.code == 0, done.err
    done = cli("evaluate", run, tables / "wide.csv", "--json", "--bootstrap=0")
    assert json.loads(done.out)["metrics"]["r2"]["value"] > 0.9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs=3"], "--max-epochs is a setting of --model osciformer; the model is resonator"),
        (["--dim=8"], "--dim is a setting of --model osciformer"),
        (["--accelerator=gpu"], "--accelerator is a setting of --model osciformer"),
        (["--validation=x.csv"], "--validation is a setting of --model osciformer"),
        (["--linear-head=tree"], "--linear-head must be one of 'auto', 'ridge', 'logistic'"),
        (["--families=waves"], "families must be one of"),
        (["--model=resonater"], "there is no model 'resonater'; did you mean 'resonator'?"),
        (
            ["--model=osciformer", "--families=states"],
            "--families is a setting of --model resonator",
        ),
        (["--task=forecasting"], "--model is a setting of classification and regression"),
        (["--resume"], "--resume goes on with the training of a network"),
    ],
)
def test_settings_of_others_are_refused(
    flags: list[str], message: str, cli: Call, tables: Path, tmp_path: Path
) -> None:
    done = cli("fit", tables / "wide.csv", *ILL, *flags, "-o", tmp_path / "run")
    assert done.code in (1, 2)
    assert message in done.err
    assert not (tmp_path / "run").exists()
