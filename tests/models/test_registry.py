"""Backbones by name: the core knows its own, the baselines are a plugin."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from osciformer.models import Backbone, SeriesModel, SeriesModelConfig, backbones
from osciformer.models.backbones import backbone_names, find_backbone, register_backbone

from .task_batches import make_batch

WITHOUT_BASELINES = """
import sys
sys.modules["osciformer.baselines"] = None  # a package that cannot be imported
import torch
from osciformer.events import EventSequences
from osciformer.events.neural import EventModelConfig, make_event_model
from osciformer.models import QueryModel, QueryModelConfig, SeriesModel, SeriesModelConfig
SeriesModel(SeriesModelConfig(input_dim=2, output_dim=1))
QueryModel(QueryModelConfig(input_dim=2))
events = EventSequences.from_arrays([[0.0, 1.0, 2.5]])
make_event_model(EventModelConfig(num_types=1, dim=8)).fit_times(events)(events.batch())
try:
    SeriesModel(SeriesModelConfig(input_dim=2, output_dim=1, backbone="gru_d"))
except ValueError as error:
    assert "backbone must be one of 'osciformer'; got 'gru_d'" in str(error), error
else:
    raise AssertionError("no error")
"""


def test_the_core_works_without_the_baselines() -> None:
    command = [sys.executable, "-c", WITHOUT_BASELINES]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_core_does_not_import_the_baselines() -> None:
    program = (
        "import sys, osciformer.models, osciformer.events.neural\n"
        "print([name for name in sys.modules if name.startswith('osciformer.baselines')])\n"
        "from osciformer.models.backbones import find_backbone\n"
        "print(find_backbone('gru_d').make.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split("\n")[:2] == ["[]", "GRUD"], result.stderr


def test_all_names_are_known_after_one_question() -> None:
    assert {"osciformer", "transformer", "gru_d", "contiformer"} <= set(backbone_names())
    assert {"osciformer", "rmtpp", "mtan", "contiformer"} <= set(backbone_names("events"))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("series", "gru-d", "backbone must be one of 'osciformer', .*; did you mean 'gru_d'"),
        ("events", "rmtp", "encoder must be one of 'osciformer', .*; did you mean 'rmtpp'"),
        ("series", "rmtpp", "backbone must be one of"),
    ],
)
def test_an_unknown_name_gets_near_matches(kind, name, message) -> None:
    with pytest.raises(ValueError, match=message):
        find_backbone(name, kind)


def test_a_backbone_of_a_user_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "_REGISTRY", dict(backbones._REGISTRY))

    @register_backbone("mean", settings=("dropout",))
    class Mean(Backbone):
        def __init__(self, input_dim, static_dim, dim, dropout, level=0.0):
            super().__init__()
            self.dim, self.level = dim, level

        def encode(self, values, times, mask, static=None):
            mean = values.nan_to_num(self.level).mean(dim=-1, keepdim=True)
            return type("Encoded", (), {"states": mean.expand(*mask.shape, self.dim)})

        def read(self, encoded, query_times) -> Tensor:
            raise NotImplementedError

        def _fit_time_scale(self, times, mask, generator) -> None:
            pass

    settings = {"input_dim": 3, "static_dim": 2, "output_dim": 2, "backbone": "mean"}
    model = SeriesModel(SeriesModelConfig(**settings, backbone_options={"level": 1.0}))
    assert model(batch := make_batch()).shape == (len(batch.values), 2)
    with pytest.raises(ValueError, match="option of backbone mean 'levels'; did you mean 'level'"):
        SeriesModel(SeriesModelConfig(**settings, backbone_options={"levels": 1.0}))


@pytest.mark.parametrize(
    ("module", "name"),
    [("models.baselines", "GRUD"), ("events.neural.baselines", "ODERNNEncoder")],
)
def test_the_old_place_of_the_baselines_still_works(module: str, name: str) -> None:
    old, new = (importlib.import_module(f"osciformer.{m}") for m in (module, "baselines"))
    with pytest.warns(DeprecationWarning, match=f"import {name} from osciformer.baselines"):
        assert getattr(old, name) is getattr(new, name)
    with pytest.raises(AttributeError):
        _ = old.Nonsense


def test_the_old_name_of_forward_fill_still_works() -> None:
    models = importlib.import_module("osciformer.models")
    with pytest.warns(DeprecationWarning, match="is called forward_fill"):
        assert models.carry_forward is models.forward_fill
    assert torch.is_tensor(models.forward_fill(torch.ones(1, 1, 1), torch.ones(1, 1))[0])
