"""Loggers by name: which one is made, what it is told, and what is said if it is missing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pytorch_lightning", reason="training needs Lightning")
pytest.importorskip("sklearn")

from pytorch_lightning import loggers

from osciformer import IrregularSeries, OsciFormerClassifier
from osciformer.train.run_folder import make_loggers

CLASSES = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger"}


def only_installed(patch: pytest.MonkeyPatch, *names: str) -> None:
    find = importlib.util.find_spec

    def find_some(name: str, *rest: Any) -> Any:
        return (True if name in names else None) if name in CLASSES else find(name, *rest)

    patch.setattr(importlib.util, "find_spec", find_some)


class Recorder(loggers.CSVLogger):
    """Stands for a logger of another package; keeps what it is told."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__("unused")
        self.given, self.rows = (args, given), []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))

    def save(self) -> None:
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Return a list that gets every logger that is made."""
    found: list[Recorder] = []

    def make(*args: Any, **given: Any) -> Recorder:
        found.append(Recorder(*args, **given))
        return found[-1]

    for name in CLASSES.values():
        monkeypatch.setattr(loggers, name, make)
    return found


def classifier(**options: Any) -> OsciFormerClassifier:
    return OsciFormerClassifier(
        dim=4,
        num_layers=1,
        max_epochs=2,
        resonators=False,
        random_state=0,
        accelerator="cpu",
        **options,
    )


def series() -> IrregularSeries:
    generator = np.random.default_rng(0)
    times = np.tile(np.arange(3.0), 12)
    return IrregularSeries(
        times,
        generator.normal(size=(36, 1)),
        np.arange(0, 37, 3),
        labels=np.arange(12) % 2,
    )


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_named_logger_gets_each_epoch_without_a_run_folder(
    name: str, made: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_installed(monkeypatch, name)
    mlflow = SimpleNamespace(get_tracking_uri=lambda: "sqlite:///of-the-user.db")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    model = classifier(train_options={"logger": name}, validation_fraction=0.25).fit(series())
    (logger,) = made
    place = {"tracking_uri": "sqlite:///of-the-user.db"}
    project = {"project": "osciformer"}
    wanted = project if name == "wandb" else {"experiment_name": "osciformer", **place}
    assert logger.given == ((), wanted)
    assert [step for step, _ in logger.rows] == [0, 1]
    assert [row for _, row in logger.rows] == model.history_


def test_logger_does_not_change_the_weights(
    made: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_installed(monkeypatch, "wandb")
    first = classifier(train_options={"logger": "wandb"}).fit(series())
    second = classifier(train_options={"logger": "csv"}).fit(series())
    for one, other in zip(first.model_.parameters(), second.model_.parameters(), strict=True):
        assert one.equal(other)


def test_tensorboard_is_the_default_if_it_is_installed_and_there_is_a_folder(
    made: list[Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only_installed(monkeypatch, "tensorboard")
    assert make_loggers("auto", None) == []
    assert make_loggers("csv", tmp_path) == []
    assert make_loggers("auto", tmp_path) == made
    assert made[0].given == ((tmp_path,), {"name": "tensorboard", "version": ""})
    only_installed(monkeypatch)
    assert make_loggers("auto", tmp_path) == []


@pytest.mark.parametrize("name", CLASSES)
def test_missing_package_is_said_before_the_data_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only_installed(monkeypatch)
    model = classifier(train_options={"logger": name}, run_dir=tmp_path)
    with pytest.raises(ImportError, match=f"logger='{name}' needs .*: pip install {name}$"):
        model.fit(series())
    assert not list(tmp_path.iterdir())


def test_tensorboard_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    only_installed(monkeypatch, "tensorboard")
    with pytest.raises(ValueError, match="give a run_dir"):
        classifier(train_options={"logger": "tensorboard"}).fit(series())


def test_unknown_logger_is_named() -> None:
    with pytest.raises(ValueError, match=r"logger must be one of .*'wandb'.*; got 'wanbd'"):
        classifier(train_options={"logger": "wanbd"}).fit(series())
