"""Configurations are checked, survive JSON, and say what a user can set."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any, get_args, get_type_hints

import pytest
import torch

from osciformer import config as configs
from osciformer.config import (
    TASKS,
    AttentionConfig,
    DataConfig,
    EstimatorConfig,
    EventModelConfig,
    OsciFormerConfig,
    QueryModelConfig,
    SeriesModelConfig,
    TrainConfig,
    estimator_arguments,
    estimator_defaults,
    find_setting,
    settings,
    without_removed,
)
from osciformer.math import frequency_bank
from osciformer.models import OsciFormer, QueryModel, SeriesModel
from osciformer.ops import oscillator_attention

SERIES: dict[str, Any] = {
    "input_dim": 3,
    "static_dim": 2,
    "output_dim": 4,
    "pool": ("mean",),
    "skip": True,
    "backbone_options": {"omega_range": (0.1, 9.0), "query": "linear", "preset": "paper"},
}
QUERY: dict[str, Any] = {
    "input_dim": 3,
    "quantiles": (0.05, 0.5, 0.6),
    "direction": "bidirectional",
}
EXAMPLES = [
    AttentionConfig(dim=16),
    OsciFormerConfig.from_preset("default", input_dim=3, static_dim=1),
    OsciFormerConfig.from_preset("paper", input_dim=3, blocks=["attention", "resonator"]),
    SeriesModelConfig(**SERIES),
    QueryModelConfig(**QUERY),
    EventModelConfig(num_types=3, encoder_options={"a": 1}),
    EstimatorConfig(class_weight={"a": 2.0}, covariates=["x"]),  # type: ignore[arg-type]
    TrainConfig(max_epochs=3, gradient_clip=None, precision="bf16-mixed"),
    DataConfig(task="events", id="user"),
]


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda config: type(config).__name__)
def test_a_configuration_survives_json(config: Any) -> None:
    again = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.to_dict() == config.to_dict()
    assert config.differences(again.to_dict()) == []


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda config: type(config).__name__)
def test_a_configuration_cannot_be_changed(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 5)


def test_paper_preset_is_the_paper() -> None:
    config = OsciFormerConfig.from_preset("paper", input_dim=3)
    assert (config.dim, config.num_heads, config.num_modes) == (256, 8, 8)
    assert (config.query, config.omega_range, config.zeta_range) == (
        "ridge",
        (1e-2, 10.0),
        (0.05, 0.4),
    )
    assert (config.dropout, config.ridge, config.velocity) == (0.1, 1e-4, True)


def test_default_preset_holds_the_query_and_asks_the_data_for_frequencies() -> None:
    config = OsciFormerConfig.from_preset("default", input_dim=3)
    assert (config.query, config.omega_range) == ("hold", "data")
    assert config == OsciFormerConfig(input_dim=3)


def test_what_is_given_wins_over_the_preset() -> None:
    config = OsciFormer(2, preset="paper", query="linear", dim=16, num_heads=2).config
    assert (config.query, config.dim, config.num_heads) == ("linear", 16, 2)
    assert config.omega_range == (1e-2, 10.0)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="preset must be one of 'default', 'paper'; got 'best'"):
        OsciFormer(3, preset="best")


def test_options_reach_the_backbone_and_what_is_given_wins_over_a_preset() -> None:
    model: Any = SeriesModel(SeriesModelConfig(**SERIES, dim=16, num_heads=2))
    inner = model.backbone.model.config
    assert (inner.query, inner.omega_range) == ("linear", (0.1, 9.0))
    assert (inner.dim, inner.num_heads) == (16, 2)
    assert (inner.input_dim, inner.static_dim, inner.ridge) == (9, 2, 1e-4)


def test_blocks_reach_the_backbone_and_decide_the_number_of_layers() -> None:
    blocks = ("resonator", "attention", "attention")
    config = SeriesModelConfig.from_dict({**SERIES, "num_layers": 2, "blocks": list(blocks)})
    inner: Any = SeriesModel(config)
    inner = inner.backbone.model
    assert config.num_layers == inner.config.num_layers == 3
    assert inner.config.blocks == blocks
    kinds = [type(block.attention).__name__ for block in inner.encoder]
    assert kinds == ["ResonatorLayer", "OscillatorAttention", "OscillatorAttention"]
    assert estimator_arguments("classification", {"blocks": blocks}) == {
        "model_options": {"blocks": blocks}
    }


def test_a_configuration_without_blocks_is_attention_throughout() -> None:
    before = OsciFormerConfig(input_dim=2, dim=8).to_dict()
    assert before.pop("blocks") is None
    torch.manual_seed(0)
    old = OsciFormer.from_config(OsciFormerConfig.from_dict(before))
    torch.manual_seed(0)
    new = OsciFormer(2, dim=8, blocks=("attention", "attention"))
    assert all(torch.equal(x, new.state_dict()[name]) for name, x in old.state_dict().items())


def test_a_configuration_keeps_its_own_options() -> None:
    options = {"query": "linear"}
    config = SeriesModelConfig(input_dim=1, output_dim=1, backbone_options=options)
    options["query"] = "hold"
    config.to_dict()["backbone_options"]["query"] = "hold"
    assert dict(config.backbone_options or {})["query"] == "linear"


def test_a_configuration_without_statistics_has_those_from_before_they_had_names() -> None:
    # So that older files of models fit their weights, whatever becomes the default elsewhere.
    model: Any = SeriesModel(SeriesModelConfig.from_dict({**SERIES, "dim": 8}))
    assert model.config.statistics == ("last", "mean", "min", "max", "rise", "count")
    assert model.head[1].in_features == 8 + 2 * 2 + 6 * 3


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (OsciFormerConfig, {"input_dim": 3, "n_heads": 2}, "'n_heads'; did you mean 'num_heads'"),
        (OsciFormerConfig, {"dim": 8}, "input_dim must be given; got dim"),
        (OsciFormerConfig, {"input_dim": 3, "num_layers": 0}, "num_layers must be at least 1; got"),
        (
            OsciFormerConfig,
            {"input_dim": 3, "omega_range": "auto"},
            r"\(low, high\) or 'data' or 'typical'; got",
        ),
        (OsciFormerConfig, {"input_dim": "x"}, "input_dim must be a whole number; got 'x'"),
        (OsciFormerConfig, {"input_dim": 1, "bias": 1}, "bias must be true or false; got 1"),
        (TrainConfig, {"max_epochs": 0}, "max_epochs must be at least 1; got 0"),
        (TrainConfig, {"learning_rate": float("nan")}, "must be positive and finite; got nan"),
        (TrainConfig, {"warmup_fraction": 1.0}, "warmup_fraction must be from 0 to below 1"),
        (TrainConfig, {"gradient_clip": 0.0}, "must be positive and finite, or None; got 0.0"),
        (TrainConfig, {"weight_averaging": 1.0}, r"must be from 0 to below 1; got 1\.0"),
        (TrainConfig, {"weight_averaging": -0.1}, "weight_averaging must be from 0 to below 1"),
        (TrainConfig, {"weight_averaging": float("nan")}, "must be from 0 to below 1; got nan"),
        (TrainConfig, {"patience": 0}, "patience must be at least 1, or None"),
        (TrainConfig, {"precision": "8"}, "one of '32-true', 'bf16-mixed', '16-mixed'; got '8'"),
        (TrainConfig, {"strategy": "tpu"}, "one of 'auto', 'ddp', 'fsdp'; got 'tpu'"),
        (TrainConfig, {"learning": 1.0}, "unknown setting 'learning'; did you mean 'learning_rate"),
        (EventModelConfig, {"num_types": 0}, "num_types must be at least 1; got 0"),
        (
            EventModelConfig,
            {"num_types": 1, "head": "x"},
            "head must be one of 'softplus', 'decay'",
        ),
        (EventModelConfig, {"num_types": 1, "dropout": 1}, "dropout must be from 0 to below 1"),
        (EstimatorConfig, {"clip": "much"}, "clip must be a number, or None; got 'much'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_setting_is_named(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.from_dict(given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop_out": 0.1}, "unknown setting 'drop_out'; did you mean 'dropout'"),
        ({"zzz": 1}, "unknown setting 'zzz'; allowed: input_dim"),
        ({"backbone": "lstm"}, "backbone must be one of 'osciformer', .*'gru_d'"),
        ({"pool": ["median"]}, "pool must be one of 'last', 'mean', 'max'; got 'median'"),
        ({"pool": []}, "pool must name at least one kind"),
        ({"pool": ["last", "last"]}, "each once"),
        ({"statistics": ["median"]}, "statistics must be one of 'last', 'mean', .*; got 'median'"),
        ({"statistics": []}, r"statistics must name at least one .*\(\); for none .* skip=False"),
        ({"output_dim": 0}, "output_dim must be at least 1; got 0"),
        ({"dropout": 1.0}, r"dropout must be from 0 to below 1; got 1.0"),
        ({"observation_dropout": -0.1}, "observation_dropout must be from 0"),
        ({"backbone_options": {"quary": 1}}, "backbone osciformer 'quary'; did you mean 'query'"),
        ({"backbone": "gru_d"}, "unknown option of backbone gru_d"),
        ({"blocks": ["resonater"]}, "blocks must be one of .attention., .resonator., .selective.; got"),
        ({"blocks": []}, r"blocks must be at least one name, or None; got \(\)"),
        ({"blocks": ["resonator"], "backbone": "gru_d"}, "setting of backbone 'osciformer'; .*gru"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_settings_of_a_series_model_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeriesModel(SeriesModelConfig.from_dict({**SERIES, **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantiles": (0.5, 0.5)}, "quantiles must increase"),
        ({"quantiles": ()}, "quantiles must increase"),
        ({"quantiles": (0.5, 1.0)}, "quantiles must increase"),
        ({"direction": "forwards"}, "direction must be one of 'causal', 'bidirectional'"),
        ({"backbone_options": {"direction": "causal"}}, "give direction itself"),
        ({"backbone": "contiformer"}, "contiformer cannot be read"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_settings_of_a_query_model_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QueryModel(QueryModelConfig.from_dict({**QUERY, **change}))


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ValueError, match="output_dim must be given; got input_dim"):
        SeriesModelConfig.from_dict({"input_dim": 3})


def test_where_a_run_goes_on_is_no_difference() -> None:
    other = TrainConfig(devices=4, verbose=2, num_workers=3, strategy="ddp").to_dict()
    assert TrainConfig().differences(other) == []


def test_setting_that_an_older_run_did_not_know_had_its_default() -> None:
    older = TrainConfig().to_dict()
    del older["weight_averaging"]
    assert TrainConfig().differences(older) == []
    changed = TrainConfig(weight_averaging=0.5)
    assert changed.differences(older) == ["weight_averaging was 0.0, is 0.5"]


@pytest.mark.parametrize(
    ("kind", "given", "off", "on"),
    [
        (SeriesModelConfig, SERIES, {"foresight": 0.0}, {"foresight": 0.5}),
        (TrainConfig, {}, {"keep_latest": False}, {"keep_latest": True}),
    ],
)
def test_removed_settings_are_silent_if_off_and_say_what_to_do_if_on(
    kind: Any, given: Any, off: Any, on: Any
) -> None:
    assert kind.from_dict({**given, **off}) == kind.from_dict(given)
    assert without_removed(off) == {}
    (name,) = on
    for call in (kind.from_dict, kind.from_dict(given).differences):
        with pytest.raises(ValueError, match=f"{name}=.* train the model again without {name}, or"):
            call({**given, **on})


@pytest.mark.parametrize(
    ("ours", "name"),
    [(configs.ValueMode, "value"), (configs.Direction, "direction"), (configs.Backend, "backend")],
)
def test_words_are_those_of_the_operator(ours: Any, name: str) -> None:
    assert get_args(ours) == get_args(get_type_hints(oscillator_attention)[name])


def test_kinds_of_banks_are_those_of_the_operator() -> None:
    assert get_args(configs.BankKind) == get_args(get_type_hints(frequency_bank)["kind"])


def test_importing_the_settings_imports_no_torch() -> None:
    code = "import sys, osciformer.config as c; c.settings(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("task", TASKS)
def test_defaults_of_a_task_are_allowed_values(task: str) -> None:
    for item in settings(task):
        assert item.check(item.defaults[task]) == item.defaults[task]
        assert item.help
        assert item.panel in configs.PANELS


def test_kinds_come_from_the_annotations() -> None:
    kinds = {
        "dim": "whole",
        "dropout": "number",
        "carry": "switch",
        "backbone": "text",
        "pool": "texts",
        "quantiles": "numbers",
        "class_weight": "mapping",
        "target": "texts",
    }
    assert {name: find_setting(name).kind for name in kinds} == kinds
    patience = find_setting("patience")
    assert patience.is_automatic
    assert patience.is_optional
    assert patience.check("auto") == "auto"
    with pytest.raises(ValueError, match="patience must be a whole number, or None; got 'many'"):
        patience.check("many")


def test_an_unknown_setting_or_task_is_refused_with_near_matches() -> None:
    with pytest.raises(ValueError, match="unknown setting 'drop_out'; did you mean 'dropout'"):
        find_setting("drop_out")
    with pytest.raises(ValueError, match=r"task must be one of 'classification', .*; got 'guess'"):
        settings("guess")


def test_defaults_differ_by_task() -> None:
    dims = {task: estimator_defaults(task)["dim"] for task in TASKS}
    assert dims == dict(zip(TASKS, (32, 32, 64, 64, 64), strict=True))
    rates = {estimator_defaults(task)["learning_rate"] for task in ("regression", "events")}
    assert rates == {1e-3, 2e-3}
    assert "quantiles" not in estimator_defaults("regression")


def test_arguments_of_an_estimator_go_where_they_belong() -> None:
    given = {"table": "a.csv", "carry": False, "seed": 4, "patience": None, "dim": 8}
    assert estimator_arguments("imputation", given) == {
        "model_options": {"carry": False},
        "random_state": 4,
        "train_options": {"patience": None},
        "dim": 8,
    }
    with pytest.raises(ValueError, match="unknown setting 'pool'"):
        estimator_arguments("imputation", {"pool": "last"})
