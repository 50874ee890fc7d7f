"""Model files whose settings ask for more than the file can hold: refused before any is built."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from osciformer.estimators import OsciFormerClassifier, OsciFormerForecaster, load
from osciformer.saving import ModelFileError, load_model, save_model

from .toy import TINY, make, two_levels


@pytest.fixture(scope="module", params=[OsciFormerClassifier, OsciFormerForecaster])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make(request.param, **{**TINY, "max_epochs": 1}).fit(two_levels(12))
    return model.save(tmp_path_factory.mktemp("saved") / "model")


@pytest.mark.parametrize("size", [10**4, 10**6, 10**12])
@pytest.mark.parametrize("name", ["num_layers", "dim", "input_dim", "static_dim"])
def test_sizes_beyond_those_of_the_file_are_refused_at_once(
    saved: Path, name: str, size: int, tmp_path: Path
) -> None:
    found = load_model(saved)
    content = {**found.content, "model": {**found.content["model"], name: size}}
    path = save_model(tmp_path / "hostile", content, found.weights)
    started = time.process_time()
    with pytest.raises(ModelFileError, match=r"far larger model than the|size mismatch"):
        load(path)
    assert time.process_time() - started < 5.0


def test_sizes_that_a_file_can_hold_are_compared_with_its_tensors(
    saved: Path, tmp_path: Path
) -> None:
    found = load_model(saved)
    content = {**found.content, "model": {**found.content["model"], "dim": 16}}
    path = save_model(tmp_path / "odd", content, found.weights)
    with pytest.raises(ModelFileError, match="size mismatch"):
        load(path)
