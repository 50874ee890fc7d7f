"""Tiny tables and trained runs that the tests of the command line share."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("typer", "rich", "yaml", "pandas", "pyarrow", "pytorch_lightning", "sklearn"):
    pytest.importorskip(package)

TINY = ["--dim=8", "--num-layers=1", "--num-heads=1", "--epochs=2", "--batch-size=16"]
TINY += ["--accelerator=cpu", "--progress=none"]
COLUMNS = ["--id=who", "--time=hour"]


@dataclass(frozen=True)
class Outcome:
    """What a call of the program gave."""

    code: int
    out: str
    err: str


def call(*arguments: object) -> Outcome:
    """Run the program in this process."""
    from osciformer.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def make_frame(count: int = 40, seed: int = 0) -> Any:
    """Return a wide table whose label is the sign of the mean of `a`."""
    import pandas as pd

    generator = np.random.default_rng(seed)
    parts = []
    for number in range(count):
        length = int(generator.integers(4, 8))
        sign = 1 if number % 2 else -1
        a = sign + 0.3 * generator.standard_normal(length)
        b = generator.standard_normal(length)
        b[generator.random(length) < 0.3] = np.nan
        parts.append(
            pd.DataFrame(
                {
                    "who": number,
                    "hour": np.sort(generator.random(length)) * 10,
                    "a": a,
                    "b": b,
                    "age": 40.0 + number,
                    "ill": int(sign > 0),
                    "score": float(a.mean()),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


@pytest.fixture
def cli() -> Callable[..., Outcome]:
    return call


@pytest.fixture(scope="session")
def frame() -> Any:
    return make_frame()


@pytest.fixture(scope="session")
def tables(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with wide.parquet, wide.csv, narrow.csv and outcomes.csv."""
    folder = tmp_path_factory.mktemp("tables")
    frame.to_parquet(folder / "wide.parquet", index=False)
    frame.to_csv(folder / "wide.csv", index=False)
    narrow = frame.melt(["who", "hour"], ["a", "b"]).dropna().sort_values(["who", "hour"])
    narrow.to_csv(folder / "narrow.csv", index=False)
    narrow.to_parquet(folder / "narrow.parquet", index=False)
    outcomes = frame.groupby("who", as_index=False)[["ill"]].first()
    outcomes.rename(columns={"who": "patient"}).to_csv(folder / "outcomes.csv", index=False)
    return folder


@pytest.fixture(scope="session")
def runs(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained run per task."""
    folder = tmp_path_factory.mktemp("runs")
    common = [*COLUMNS, *TINY]
    calls = {
        "classification": ["wide.parquet", "--target=ill", "--static=age", "--features=a,b"],
        "regression": ["wide.csv", "--target=score", "--features=a,b", "--no-resonators"],
        "forecasting": ["narrow.csv", "--variable=variable", "--value=value", "--horizon=4"],
        "imputation": ["wide.parquet", "--features=a,b", "--target=a"],
        "events": ["narrow.csv", "--type=variable"],
    }
    for task, (table, *flags) in calls.items():
        outcome = call(
            "fit", tables / table, f"--task={task}", *common, *flags, "-o", folder / task
        )
        assert outcome.code == 0, outcome.err
    return folder
