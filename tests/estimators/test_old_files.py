"""Files and runs that version 0.1.0 wrote load, predict the same and go on."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osciformer.data import IrregularSeries
from osciformer.estimators import OsciFormerClassifier, load
from osciformer.saving import ModelFileError, load_model, save_model
from osciformer.train.run_folder import CONFIG_KEY, SETUP_KEY, CheckpointError

OLD = Path(__file__).with_name("old")
TINY: dict[str, Any] = {"dim": 4, "num_layers": 1, "num_heads": 1, "batch_size": 16}


def series(count: int, seed: int = 0) -> IrregularSeries:
    generator = np.random.default_rng(seed)
    classes = np.arange(count) % 2
    times, values = [], []
    for number in classes:
        times.append(np.sort(generator.uniform(0, 10, generator.integers(4, 12))))
        table = generator.normal(2.0 * number, 0.5, (len(times[-1]), 2))
        table[1:][generator.random((len(table) - 1, 2)) < 0.2] = np.nan
        values.append(table)
    return IrregularSeries.from_arrays(
        times,
        values,
        labels=np.array(["a", "b"])[classes],
        static=generator.normal(size=(count, 1)),
        feature_names=["pulse", "pressure"],
        static_names=["age"],
    )


def events(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(np.cumsum(rng.exponential(1.0, 6)), rng.integers(0, 2, 6)) for _ in range(count)]


def next_events(model: Any) -> np.ndarray:
    found = model.predict(events(3, seed=1))
    return np.column_stack([found.type_probability, found.median_gap, found.mean_gap])


@pytest.fixture(scope="module")
def wanted() -> Any:
    return np.load(OLD / "predictions.npz")


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("classifier", lambda model: model.predict_proba(series(4, seed=1))),
        ("regressor", lambda model: model.predict(series(4, seed=1))),
        (
            "forecaster",
            lambda model: model.predict_quantiles(series(4, seed=1), [1.0, 2.0], relative=True),
        ),
        ("imputer", lambda model: model.predict_quantiles(series(4, seed=1), [1.0, 2.0])),
        ("events", next_events),
        ("blend", lambda model: model.score(events(3, seed=1))),
    ],
)
def test_old_model_predicts_the_same(name: str, ask: Any, wanted: Any) -> None:
    model = load(OLD / f"{name}.safetensors")
    key = "blend_score" if name == "blend" else name
    np.testing.assert_allclose(ask(model), wanted[key], rtol=1e-6, atol=1e-6)


def test_settings_of_an_old_model_are_where_they_belong(tmp_path: Path) -> None:
    model = load(OLD / "classifier.safetensors")
    assert model.model_options == {"backbone_options": {"num_modes": 4}, "pool": ("last", "mean")}
    assert model.train_options == {"weight_decay": 0.05, "label_smoothing": 0.1}
    assert not model.resonators  # which there were not then
    assert (model.resonator_, model.network_weight_) == (None, 1.0)
    again = load(model.save(tmp_path / "again"))
    assert again.get_params() == model.get_params()


def old_run(folder: Path, **changes: dict[str, Any]) -> Path:
    path = folder / "last.ckpt"
    path.write_bytes(lzma.decompress((OLD / "last.ckpt.xz").read_bytes()))
    if changes:
        checkpoint = torch.load(path, weights_only=True)
        for key, change in changes.items():
            checkpoint[{"config": CONFIG_KEY, "setup": SETUP_KEY}[key]].update(change)
        torch.save(checkpoint, path)
    return folder


def test_old_run_goes_on_to_the_weights_of_one_that_was_not_stopped(
    tmp_path: Path, wanted: Any
) -> None:
    settings = {
        **TINY,
        "max_epochs": 4,
        "accelerator": "cpu",
        "random_state": 0,
        "run_dir": old_run(tmp_path),
        "resume": True,
        "resonators": False,
    }
    with pytest.raises(CheckpointError, match="variables was False, is True"):
        OsciFormerClassifier(**settings).fit(series(24))
    settings["model_options"] = {"variables": False}
    model = OsciFormerClassifier(**settings).fit(series(24))
    assert model.n_iter_ == 4
    found = model.predict_proba(series(4, seed=1))
    np.testing.assert_allclose(found, wanted["resumed"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change", [{"config": {"keep_latest": True}}, {"setup": {"foresight": 0.5}}], ids=str
)
def test_old_run_with_a_removed_setting_says_what_to_do(change: Any, tmp_path: Path) -> None:
    folder = old_run(tmp_path, **change)
    settings = {**TINY, "max_epochs": 4, "random_state": 0, "run_dir": folder, "resume": True}
    with pytest.raises(CheckpointError, match=r"cannot be continued: .*train the model again"):
        OsciFormerClassifier(**settings).fit(series(24))


def test_old_model_with_a_removed_setting_says_what_to_do(tmp_path: Path) -> None:
    saved = load_model(OLD / "classifier.safetensors")
    content = {**saved.content, "model": {**saved.content["model"], "foresight": 0.5}}
    save_model(tmp_path / "model", content, saved.weights)
    with pytest.raises(ModelFileError, match=r"foresight=0.5 .* train the model again without"):
        load(tmp_path / "model")
