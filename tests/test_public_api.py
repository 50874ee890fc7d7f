"""The public names are a promise: a change here belongs in the changelog."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

import osciformer

PUBLIC = {
    "Drive",
    "IrregularSeries",
    "OnlineSession",
    "OsciFormer",
    "OsciFormerClassifier",
    "OsciFormerConfig",
    "OsciFormerEventPredictor",
    "OsciFormerForecaster",
    "OsciFormerImputer",
    "OsciFormerRegressor",
    "OscillatorAttention",
    "ResonatorClassifier",
    "ResonatorFeatures",
    "ResonatorRegressor",
    "__version__",
    "choose_backend",
    "from_frame",
    "load",
    "oscillator_attention",
    "oscillator_response",
}
API_PAGES = Path(__file__).parents[1] / "docs" / "api"
MOVED = {"Encoder", "SeriesEmbedding", "TimeScale", "parameter_groups"}
# Packages that users may import from; `docs/api` describes each.
PACKAGES = (
    "baselines",
    "config",
    "data",
    "equivariant",
    "estimators",
    "events",
    "events.neural",
    "explain",
    "inspection",
    "math",
    "models",
    "nn",
    "ops",
    "plots",
    "resonators",
    "saving",
    "streaming",
    "testing",
    "theory",
    "train",
)

# Parameters and defaults that callers rely on, in order.
OPERATOR_SIGNATURE = {
    "q": inspect.Parameter.empty,
    "k": inspect.Parameter.empty,
    "v": inspect.Parameter.empty,
    "query_times": inspect.Parameter.empty,
    "key_times": inspect.Parameter.empty,
    "key_omega": inspect.Parameter.empty,
    "key_zeta": inspect.Parameter.empty,
    "value_omega": inspect.Parameter.empty,
    "value_zeta": inspect.Parameter.empty,
    "key_velocity": None,
    "value_velocity": None,
    "query": "hold",
    "query_params": None,
    "value": "average",
    "drive": None,
    "direction": "causal",
    "mask": None,
    "scale": None,
    "backend": "auto",
    "return_weights": False,
}
NUM_POSITIONAL = 5


def operator_parameters() -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(osciformer.oscillator_attention).parameters)


def test_exported_names_are_the_pinned_ones() -> None:
    assert set(osciformer.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_exported_name_exists(name: str) -> None:
    assert hasattr(osciformer, name)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_exported_object_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(osciformer, name))


@pytest.mark.parametrize("name", sorted(MOVED))
def test_moved_name_warns_and_works(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"osciformer.{name} is deprecated.*osciformer.nn"):
        assert getattr(osciformer, name) is getattr(osciformer.nn, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_package_names_its_public_things(package: str) -> None:
    module = importlib.import_module(f"osciformer.{package}")
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    assert inspect.getdoc(module)
    assert names
    assert not [name for name in names if not hasattr(module, name)]


def test_every_public_package_has_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in API_PAGES.glob("*.md"))
    assert [name for name in PACKAGES if f"osciformer.{name}" not in pages] == []


@pytest.mark.parametrize("name", OPERATOR_SIGNATURE)
def test_operator_keeps_its_parameter(name: str) -> None:
    parameter = operator_parameters()[name]
    keyword_only = list(OPERATOR_SIGNATURE).index(name) >= NUM_POSITIONAL
    assert parameter.default == OPERATOR_SIGNATURE[name]
    assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == keyword_only


def test_every_other_operator_parameter_is_an_optional_keyword() -> None:
    for name, parameter in operator_parameters().items():
        if name not in OPERATOR_SIGNATURE:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, name
            assert parameter.default is not inspect.Parameter.empty, name


def test_layer_is_called_with_tokens_times_mask_and_query_times() -> None:
    names = list(inspect.signature(osciformer.OscillatorAttention.forward).parameters)
    assert names[:5] == ["self", "x", "times", "mask", "query_times"]


def test_version_is_the_one_of_the_project_file() -> None:
    project = Path(__file__).parents[1] / "pyproject.toml"
    declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    # A source tree that was never installed has no metadata to read.
    assert osciformer.__version__ in (declared, "0+unknown")
