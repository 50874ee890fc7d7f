from __future__ import annotations

import json

import pytest

from osciformer.train import TrainConfig


def test_json_round_trip_keeps_all_settings() -> None:
    config = TrainConfig(max_epochs=3, gradient_clip=None, precision="bf16-mixed")
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_epochs": 0}, "max_epochs must be at least 1; got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive and finite; got nan"),
        ({"warmup_fraction": 1.0}, "warmup_fraction must be from 0 to below 1"),
        ({"gradient_clip": 0.0}, "gradient_clip must be positive or None"),
        ({"weight_averaging": 1.0}, r"weight_averaging must be from 0 to below 1; got 1\.0"),
        ({"weight_averaging": -0.1}, "weight_averaging must be from 0 to below 1"),
        ({"weight_averaging": float("nan")}, "weight_averaging must be from 0 to below 1"),
        ({"patience": 0}, "patience must be at least 1, or None"),
        ({"precision": "8"}, "precision must be one of '32-true', 'bf16-mixed', '16-mixed'"),
        ({"strategy": "tpu"}, "strategy must be one of 'auto', 'ddp', 'fsdp'; got 'tpu'"),
    ],
)
def test_bad_setting_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)  # type: ignore[arg-type]


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown settings \['learning'\]"):
        TrainConfig.from_dict({"learning": 1.0})


def test_where_a_run_goes_on_is_no_conflict() -> None:
    other = TrainConfig(devices=4, verbose=2, num_workers=3, strategy="ddp").to_dict()
    assert TrainConfig().conflicts(other) == []


def test_setting_that_an_older_run_did_not_know_had_its_default() -> None:
    older = TrainConfig().to_dict()
    del older["weight_averaging"]
    assert TrainConfig().conflicts(older) == []
    assert TrainConfig(weight_averaging=0.5).conflicts(older) == [
        "weight_averaging was 0.0, is 0.5"
    ]
