from __future__ import annotations

import dataclasses
import json

import pytest

from osciformer.models import OsciFormer, OsciFormerConfig


def test_paper_preset_is_the_paper():
    config = OsciFormerConfig.from_preset("paper", input_dim=3)
    assert (config.dim, config.num_heads, config.num_modes) == (256, 8, 8)
    assert (config.query, config.omega_range, config.zeta_range) == (
        "ridge",
        (1e-2, 10.0),
        (0.05, 0.4),
    )
    assert (config.dropout, config.ridge, config.velocity) == (0.1, 1e-4, True)


def test_default_preset_holds_the_query_and_asks_the_data_for_frequencies():
    config = OsciFormerConfig.from_preset("default", input_dim=3)
    assert (config.query, config.omega_range) == ("hold", "data")
    assert config == OsciFormerConfig(input_dim=3)


def test_what_is_given_wins_over_the_preset():
    config = OsciFormer(2, preset="paper", query="linear", dim=16, num_heads=2).config
    assert (config.query, config.dim, config.num_heads) == ("linear", 16, 2)
    assert config.omega_range == (1e-2, 10.0)


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_a_configuration_survives_json(preset):
    config = OsciFormerConfig.from_preset(preset, input_dim=3, static_dim=1)
    assert OsciFormerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_configuration_cannot_be_changed():
    config = OsciFormerConfig(input_dim=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_dim": 3, "n_heads": 2}, r"unknown settings \['n_heads'\]; allowed: input_dim,"),
        ({"dim": 8}, "input_dim, the number of features, must be given"),
        ({"input_dim": 3, "num_layers": 0}, "num_layers must be at least 1; got 0"),
        ({"input_dim": 3, "omega_range": "auto"}, r"\(low, high\) or 'data' or 'typical'; got"),
    ],
    ids=["unknown", "missing", "layers", "omega"],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OsciFormerConfig.from_dict(settings)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="preset must be one of default, paper; got 'best'"):
        OsciFormer(3, preset="best")
