from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osciformer.config import SERIES_BACKBONE_DEFAULTS
from osciformer.estimators import OsciFormerClassifier, load_estimator
from osciformer.saving import ModelFileError
from osciformer.train import TrainingInterrupted
from osciformer.train.run_folder import CheckpointError

from .toy import TINY, close_frequencies, frequencies, make, two_levels


@pytest.fixture(scope="module")
def fitted() -> OsciFormerClassifier:
    settings = {**TINY, "max_epochs": 8, "learning_rate": 0.02}
    return make(OsciFormerClassifier, **settings).fit(two_levels(80))


def test_classes_that_differ_in_level_are_told_apart(fitted: OsciFormerClassifier) -> None:
    assert fitted.score(two_levels(60, seed=1)) > 0.9


def test_classes_that_differ_in_frequency_are_told_apart() -> None:
    settings = {**TINY, "dim": 16, "num_heads": 2, "max_epochs": 6, "learning_rate": 0.01}
    settings |= {"dropout": 0.0, "observation_dropout": 0.0, "batch_size": 32}
    model = make(OsciFormerClassifier, **settings).fit(frequencies(160))
    assert model.score(frequencies(60, seed=1)) > 0.9


def test_close_frequencies_in_noise_are_told_apart_by_the_network_alone() -> None:
    settings = {**TINY, "dim": 16, "max_epochs": 15, "learning_rate": 5e-3, "patience": None}
    model = make(OsciFormerClassifier, **settings).fit(close_frequencies(240))
    assert model.score(close_frequencies(150, seed=1)) > 0.8


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, True),
        ({"variables": False}, False),
        ({"backbone": "gru_d"}, False),
        ({"backbone": "gru_d", "variables": True}, True),
        ({"backbone_options": {"preset": "paper"}}, False),
    ],
    ids=str,
)
def test_variables_are_encoded_with_our_own_backbone(
    options: dict[str, Any], wanted: bool, tmp_path: Path
) -> None:
    settings = {**TINY, "num_heads": 8, "max_epochs": 1, **options}
    model = make(OsciFormerClassifier, **settings).fit(two_levels(40))
    assert model.model_.config.variables is wanted
    again = load_estimator(model.save(tmp_path / "model"))
    X = two_levels(10, seed=1)
    assert (again.predict_proba(X) == model.predict_proba(X)).all()


def test_attributes_describe_the_data(fitted: OsciFormerClassifier) -> None:
    assert fitted.classes_.tolist() == ["a", "b"]
    assert fitted.n_features_in_ == 2
    assert fitted.feature_names_in_.tolist() == ["pulse", "pressure"]
    assert fitted.static_names_in_ == ("age", "height")
    assert fitted.n_iter_ == len(fitted.history_) <= 8
    assert 0 <= fitted.best_epoch_ < fitted.n_iter_


def test_probabilities_sum_to_one_and_lead_to_the_prediction(fitted: OsciFormerClassifier) -> None:
    X = two_levels(20, seed=2)
    chance = fitted.predict_proba(X)
    assert chance.sum(axis=1) == pytest.approx(1.0)
    assert (fitted.predict(X) == fitted.classes_[chance.argmax(axis=1)]).all()
    assert fitted.predict_log_proba(X) == pytest.approx(np.log(chance))


def test_order_and_company_of_series_do_not_matter(fitted: OsciFormerClassifier) -> None:
    X = two_levels(20, seed=2)
    order = np.random.default_rng(0).permutation(20)
    assert fitted.predict_proba(X[order]) == pytest.approx(fitted.predict_proba(X)[order], abs=1e-5)
    assert fitted.predict_proba(X[[3]]) == pytest.approx(fitted.predict_proba(X)[[3]], abs=1e-5)


def test_same_random_state_gives_the_same_bits() -> None:
    X = two_levels(40)
    first, second = (make(OsciFormerClassifier, **TINY).fit(X) for _ in range(2))
    assert (first.predict_proba(X) == second.predict_proba(X)).all()
    other = make(OsciFormerClassifier, **{**TINY, "random_state": 1}).fit(X)
    assert (first.predict_proba(X) != other.predict_proba(X)).any()


def test_saved_and_pickled_models_predict_the_same_bits(
    fitted: OsciFormerClassifier, tmp_path: Path
) -> None:
    X = two_levels(20, seed=2)
    path = fitted.save(tmp_path / "model.safetensors")
    copies = [
        OsciFormerClassifier.load(path),
        load_estimator(path),
        pickle.loads(pickle.dumps(fitted)),
    ]
    for copy in copies:
        assert (copy.predict_proba(X) == fitted.predict_proba(X)).all()
        assert copy.get_params() == fitted.get_params()
        assert copy.classes_.dtype == fitted.classes_.dtype


def test_defaults_of_the_backbone_are_part_of_the_saved_model(
    fitted: OsciFormerClassifier, tmp_path: Path
) -> None:
    from osciformer.saving import load_model, save_model

    saved = load_model(fitted.save(tmp_path / "model"))
    assert saved.content["model"]["backbone_options"] == dict(SERIES_BACKBONE_DEFAULTS)
    # A file from before these defaults names none of them, and means those of the layer.
    older = {**saved.content, "model": {**saved.content["model"], "backbone_options": {}}}
    save_model(tmp_path / "older", older, saved.weights)
    attention = load_estimator(tmp_path / "older").model_.backbone.model.encoder.blocks[0].attention
    assert attention.value == "average"
    attention = load_estimator(tmp_path / "model").model_.backbone.model.encoder.blocks[0].attention
    assert attention.value == "point"


def test_statistics_are_part_of_the_saved_model(tmp_path: Path) -> None:
    from osciformer.saving import load_model, save_model

    X = two_levels(20, seed=2)
    kinds = ("std", "age", "first", "count")
    model = make(OsciFormerClassifier, **TINY, statistics=kinds, weight_averaging=0.5).fit(X)
    again = load_estimator(model.save(tmp_path / "model"))
    assert (again.predict_proba(X) == model.predict_proba(X)).all()  # type: ignore[attr-defined]
    assert again.model_.config.statistics == again.settings()["statistics"] == kinds
    assert again.settings()["weight_averaging"] == 0.5
    # A file from before they had names means the ones of then, whatever the default is now.
    then = ("last", "mean", "min", "max", "rise", "count")
    model = make(OsciFormerClassifier, **TINY, statistics=then).fit(X)
    saved = load_model(model.save(tmp_path / "model"))
    content = {**saved.content, "model": dict(saved.content["model"])}
    content["params"] = dict(content["params"])
    content["params"]["model_options"] = None
    del content["model"]["statistics"]
    save_model(tmp_path / "older", content, saved.weights)
    older: Any = load_estimator(tmp_path / "older")
    assert (older.predict_proba(X) == model.predict_proba(X)).all()


def test_the_best_epoch_is_kept() -> None:
    # The first is the best: the labels of validation are those of training turned around.
    X, other = two_levels(40), two_levels(20, seed=1)
    turned = np.where(other.labels == "a", "b", "a")
    model = make(OsciFormerClassifier, **{**TINY, "max_epochs": 6, "weight_averaging": 0.0})
    model.set_params(train_options__monitor="auroc").fit(X, validation_data=(other, turned))
    assert (model.best_epoch_, model.n_iter_) == (0, 6)


def test_average_of_the_weights_is_kept_by_default() -> None:
    X = two_levels(40)
    kept = make(OsciFormerClassifier, **TINY).fit(X)
    raw = make(OsciFormerClassifier, **TINY, weight_averaging=0.0).fit(X)
    assert kept.settings()["weight_averaging"] == 0.99
    assert [row["train_loss"] for row in kept.history_] == [r["train_loss"] for r in raw.history_]
    assert [row["val_loss"] for row in kept.history_] != [r["val_loss"] for r in raw.history_]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"backbone_options": {"value": "average"}},
            {"value": "average", "omega_range": "typical"},
        ),
        ({"backbone_options": {"preset": "paper"}}, {"preset": "paper"}),
        ({"backbone": "gru_d"}, {}),
    ],
    ids=["given", "preset", "baseline"],
)
def test_defaults_of_the_backbone_give_way(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = {**TINY, "max_epochs": 1, **settings}
    model = make(OsciFormerClassifier, **settings).fit(two_levels(20))
    assert model.model_.config.backbone_options == expected


def test_damaged_content_is_refused_by_name(fitted: OsciFormerClassifier, tmp_path: Path) -> None:
    from osciformer.saving import load_model, save_model

    saved = load_model(fitted.save(tmp_path / "model"))
    save_model(tmp_path / "model", {**saved.content, "model": {"input_dim": 9}}, saved.weights)
    with pytest.raises(ModelFileError, match="does not describe a usable OsciFormerClassifier"):
        load_estimator(tmp_path / "model")
    save_model(tmp_path / "model", {**saved.content, "estimator": "Oracle"}, saved.weights)
    with pytest.raises(ModelFileError, match="'Oracle', which is none of"):
        load_estimator(tmp_path / "model")
    with pytest.raises(ModelFileError, match="'Oracle', not 'OsciFormerClassifier'"):
        OsciFormerClassifier.load(tmp_path / "model")


def test_sample_weight_zero_is_as_good_as_absence() -> None:
    X = two_levels(40)
    y = X.labels.copy()
    wrong = np.arange(40) < 20
    y[wrong] = np.where(y[wrong] == "a", "b", "a")
    settings = {**TINY, "max_epochs": 8, "learning_rate": 0.02, "validation_fraction": 0.0}
    model = make(OsciFormerClassifier, **settings).fit(
        X, y, sample_weight=np.where(wrong, 0.0, 1.0)
    )
    assert model.score(two_levels(40, seed=1)) > 0.8


def test_class_weight_moves_the_probabilities() -> None:
    X = two_levels(60)
    shy, keen = (
        make(OsciFormerClassifier, **TINY, class_weight={"b": weight}).fit(X).predict_proba(X)[:, 1]
        for weight in (0.1, 10.0)
    )
    assert (keen > shy).all()


def test_balanced_weights_follow_the_rare_class() -> None:
    X = two_levels(60)
    keep = (X.labels == "a") | (np.arange(60) < 12)
    model = make(OsciFormerClassifier, **TINY, class_weight="balanced").fit(X[keep])
    assert model.classes_.tolist() == ["a", "b"]


def test_validation_data_take_the_place_of_a_split() -> None:
    X, V = two_levels(30), two_levels(20, seed=1)
    alone = make(OsciFormerClassifier, **TINY).fit(X, validation_data=V)
    pair = make(OsciFormerClassifier, **TINY).fit(
        X, validation_data=(V.replace(labels=None), V.labels)
    )
    assert alone.history_[0]["val_loss"] == pair.history_[0]["val_loss"]


def test_no_validation_at_all() -> None:
    model = make(OsciFormerClassifier, **TINY, validation_fraction=0.0).fit(two_levels(20))
    assert "val_loss" not in model.history_[0]


def test_data_frame_is_read_by_its_layout() -> None:
    pytest.importorskip("pandas")
    X = two_levels(24)
    frame = X.to_frame("pandas", id="who", time="hour")
    layout = {"id": "who", "time": "hour", "label": "label", "static": ["age", "height"]}
    model = make(OsciFormerClassifier, **TINY, layout=layout).fit(frame)
    plain = make(OsciFormerClassifier, **TINY).fit(X)
    assert (model.predict_proba(frame.drop(columns="label")) == plain.predict_proba(X)).all()
    assert model.score(frame) == plain.score(X)


def test_list_of_pairs_is_enough() -> None:
    X = two_levels(20)
    pairs = [(one.times, one.values) for one in X]
    model = make(OsciFormerClassifier, **TINY).fit(pairs, X.labels)
    assert model.predict(pairs).shape == (20,)


def test_series_without_any_value_gets_a_prediction(fitted: OsciFormerClassifier) -> None:
    X = two_levels(3)
    blank = X.replace(values=np.full_like(X.values, np.nan))
    assert np.isfinite(fitted.predict_proba(blank)).all()


@pytest.mark.parametrize("backbone", ["transformer", "gru_d", "cfc", "lmu"])
def test_baselines_have_the_same_interface(backbone: str, tmp_path: Path) -> None:
    X = two_levels(20)
    model = make(OsciFormerClassifier, **TINY, backbone=backbone).fit(X)
    again = OsciFormerClassifier.load(model.save(tmp_path / "model"))
    assert (again.predict_proba(X) == model.predict_proba(X)).all()


def test_interrupted_fit_can_be_used_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osciformer.train.module import TrainingModule

    X = two_levels(40)
    settings = {**TINY, "max_epochs": 4, "run_dir": tmp_path, "resume": True}
    step = TrainingModule.training_step

    def interrupted(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.current_epoch == 2:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    model = make(OsciFormerClassifier, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", interrupted)
        with pytest.raises(TrainingInterrupted):
            model.fit(X)
    assert model.n_iter_ == 2
    assert model.predict(X).shape == (40,)
    whole = make(OsciFormerClassifier, **{**TINY, "max_epochs": 4}).fit(X)
    assert (model.fit(X).predict_proba(X) == whole.predict_proba(X)).all()


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"dropout": 0.1}, r"dropout was 0\.2, is 0\.1"),
        ({"clip": None}, r"clip was 6\.0, is None"),
        ({"pool": ("last",)}, r"pool was \['last', 'mean', 'max'\], is \['last'\]"),
        ({"weight_averaging": 0.0}, r"weight_averaging was 0\.99, is 0\.0"),
        ({"class_weight": "balanced"}, "class_weight was None, is 'balanced'"),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_changed_settings_are_refused_on_resume(
    changed: dict[str, Any], wanted: str, resumable: Path
) -> None:
    settings = {**TINY, "run_dir": resumable, "resume": True, **changed}
    with pytest.raises(CheckpointError, match=wanted):
        make(OsciFormerClassifier, **settings).fit(two_levels(24))


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make(OsciFormerClassifier, **TINY, run_dir=folder).fit(two_levels(24))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_names": ["pulse", "weight"]}, "'pressure' are missing and 'weight' were not"),
        ({"feature_names": ["pressure", "pulse"]}, "another order, 'pressure', 'pulse'"),
        ({"static": None}, "static features.*'age', 'height' are missing"),
    ],
)
def test_other_columns_than_in_fit_are_named(
    fitted: OsciFormerClassifier, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fitted.predict(two_levels(4).replace(**change))


def test_times_in_another_unit_are_refused(fitted: OsciFormerClassifier) -> None:
    from osciformer.data import TimeAxis

    X = two_levels(4).replace(time_axis=TimeAxis("duration", unit="h", resolution="s"))
    with pytest.raises(ValueError, match=r"unit None.*X has 'duration', 'h'"):
        fitted.predict(X)


def test_unknown_label_in_score_is_named(fitted: OsciFormerClassifier) -> None:
    with pytest.raises(ValueError, match="not there in fit: 'c'; the classes are 'a', 'b'"):
        fitted.score(two_levels(3), ["a", "b", "c"])
