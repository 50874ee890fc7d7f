from __future__ import annotations

import dataclasses
import json

import pytest

from osciformer.models import QueryModelConfig, SeriesModel, SeriesModelConfig

SERIES = {
    "input_dim": 3,
    "static_dim": 2,
    "output_dim": 4,
    "pool": ("mean",),
    "skip": True,
    "backbone_options": {"omega_range": (0.1, 9.0), "query": "linear", "preset": "paper"},
}
QUERY = {"input_dim": 3, "quantiles": (0.05, 0.5, 0.6), "direction": "bidirectional"}


@pytest.mark.parametrize(
    "config", [SeriesModelConfig(**SERIES), QueryModelConfig(**QUERY)], ids=["series", "query"]
)
def test_a_configuration_survives_json(config):
    again = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.to_dict() == config.to_dict()


def test_options_reach_the_backbone_and_what_is_given_wins_over_a_preset():
    inner = SeriesModel(SeriesModelConfig(**SERIES, dim=16, num_heads=2)).backbone.model.config
    assert (inner.query, inner.omega_range, inner.dim, inner.num_heads) == (
        "linear",
        (0.1, 9.0),
        16,
        2,
    )
    assert (inner.input_dim, inner.static_dim, inner.ridge) == (9, 2, 1e-4)


def test_a_configuration_cannot_be_changed():
    config = SeriesModelConfig(**SERIES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 5  # type: ignore[misc]


def test_a_configuration_keeps_its_own_options():
    options = {"query": "linear"}
    config = SeriesModelConfig(input_dim=1, output_dim=1, backbone_options=options)
    options["query"] = "hold"
    config.to_dict()["backbone_options"]["query"] = "hold"
    assert config.backbone_options["query"] == "linear"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop_out": 0.1}, "unknown settings: 'drop_out'; did you mean dropout"),
        ({"zzz": 1}, "unknown settings: 'zzz'; allowed: input_dim"),
        ({"backbone": "lstm"}, "backbone must be one of osciformer, transformer, gru_d"),
        ({"pool": ["median"]}, "pool must be one of last, mean, max; got 'median'"),
        ({"pool": []}, "pool must name at least one kind"),
        ({"pool": ["last", "last"]}, "each once"),
        ({"statistics": ["median"]}, "statistics must be one of last, mean, .*; got 'median'"),
        ({"statistics": []}, r"statistics must name at least one .*\(\); for none .* skip=False"),
        ({"output_dim": 0}, "output_dim must be at least 1; got 0"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\); got 1.0"),
        ({"observation_dropout": -0.1}, "observation_dropout must lie"),
        ({"backbone_options": {"queries": "hold"}}, "of osciformer: 'queries'; did you mean query"),
        ({"backbone": "gru_d"}, "unknown backbone_options of gru_d"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_settings_of_a_series_model_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SeriesModelConfig.from_dict({**SERIES, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantiles": (0.5, 0.5)}, "quantiles must increase"),
        ({"quantiles": ()}, "quantiles must increase"),
        ({"quantiles": (0.5, 1.0)}, "quantiles must increase"),
        ({"direction": "forwards"}, "direction must be one of causal, bidirectional"),
        ({"backbone_options": {"direction": "causal"}}, "give direction itself"),
        ({"backbone": "contiformer"}, "contiformer cannot be read"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_settings_of_a_query_model_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        QueryModelConfig.from_dict({**QUERY, **change})


def test_a_configuration_without_statistics_has_those_from_before_they_had_names():
    # So that older files of models fit their weights, whatever becomes the default elsewhere.
    model = SeriesModel(SeriesModelConfig.from_dict({**SERIES, "dim": 8}))
    assert model.config.statistics == ("last", "mean", "min", "max", "rise", "count")
    assert model.head[1].in_features == 8 + 2 * 2 + 6 * 3


def test_a_missing_setting_is_named():
    with pytest.raises(ValueError, match="output_dim must be given; got input_dim"):
        SeriesModelConfig.from_dict({"input_dim": 3})


@pytest.mark.parametrize(
    ("backbone", "options", "expected"),
    [
        ("osciformer", {}, True),
        ("osciformer", {"query": "ridge_causal"}, True),
        ("osciformer", {"direction": "bidirectional"}, False),
        ("osciformer", {"query": "ridge"}, False),
        ("osciformer", {"preset": "paper"}, False),
        ("osciformer", {"preset": "paper", "query": "hold"}, True),
        ("gru_d", {}, True),
        ("gru_d", {"direction": "bidirectional"}, False),
        ("transformer", {}, False),
        ("transformer", {"direction": "causal"}, True),
    ],
)
def test_foresight_needs_states_that_know_nothing_of_later_rows(backbone, options, expected):
    settings = {"input_dim": 2, "output_dim": 1, "backbone": backbone, "backbone_options": options}
    assert SeriesModelConfig(**settings).is_causal == expected
    if expected:
        assert SeriesModelConfig(**settings, foresight=1).foresight == 1
    else:
        with pytest.raises(ValueError, match="foresight=1 needs states"):
            SeriesModelConfig(**settings, foresight=1)
