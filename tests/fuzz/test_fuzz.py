"""Generated bad inputs: the right answer, or a clear error that leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from .families import FAMILIES, World, base, write_parquet

for package in ("typer", "rich", "yaml", "pytorch_lightning", "sklearn"):
    pytest.importorskip(package)

QUICK, MANY = 4, 70  # inputs of each family


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return run folders of a classifier and a forecaster of the table of `base`."""
    from osciformer.cli import main

    folder = tmp_path_factory.mktemp("models")
    table = write_parquet(folder / "t.parquet", base(np.random.default_rng(0), 40))
    shared = ["fit", table, "--id=who", "--time=hour", "--features=a,b"]
    quick = ["--task=classification", "--model=resonator", "--families=summary", "--target=ill"]
    tiny = ["--task=forecasting", "--horizon=2", "--dim=8", "--num-layers=1", "--num-heads=1"]
    tiny += ["--epochs=1", "--accelerator=cpu", "--progress=none"]
    for name, settings in {"classes": quick, "forecasts": tiny}.items():
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            assert main([str(item) for item in (*shared, *settings, "-o", folder / name)]) == 0
    return {"classes": folder / "classes", "forecasts": folder / "forecasts"}


def run(family: str, seeds: range, models: Mapping[str, Path], folder: Path) -> Counter[str]:
    """Return how many inputs of a family had each outcome; the first bad one is an error."""
    found = Counter[str]()
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        rng = np.random.default_rng([seed, *family.encode()])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[FAMILIES[family](rng, World(place, models))] += 1
        except BaseException as error:
            error.add_note(f"family {family!r}, seed {seed}")
            raise
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_inputs(family: str, models: Mapping[str, Path], tmp_path: Path) -> None:
    run(family, range(QUICK), models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_inputs(family: str, models: Mapping[str, Path], tmp_path: Path) -> None:
    found = run(family, range(QUICK, QUICK + MANY), models, tmp_path)
    print(f"{family}: {dict(found)}")  # shown with -s
    assert found.total() == MANY
