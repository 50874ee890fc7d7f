"""Settings of the task models as plain data."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, Self, get_args

from osciformer.models.config import OsciFormerConfig
from osciformer.nn.checks import check_choice
from osciformer.ops.attention.step import STREAMING_QUERIES

BackboneName = Literal["osciformer", "transformer", "gru_d", "contiformer"]
Pool = Literal["last", "mean", "max"]
Statistic = Literal["last", "mean", "min", "max", "rise", "count", "std", "age", "first"]
Direction = Literal["causal", "bidirectional"]

# The task model sets these itself, from its own settings.
_SHARED = ("input_dim", "static_dim", "dim", "num_layers", "num_heads", "dropout")

BACKBONE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "osciformer": (
        "preset",
        *(item.name for item in fields(OsciFormerConfig) if item.name not in _SHARED),
    ),
    "transformer": ("feedforward_dim", "direction"),
    "gru_d": ("direction",),
    "contiformer": (
        "feedforward_dim",
        "step",
        "num_nodes",
        "quadrature",
        "recompute",
        "fuse",
        "direction",
        "query",
        "vector_field",
        "activation",
        "norm",
    ),
}


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the configurations of the task models share.

    Attributes:
        input_dim: Number of features F.
        static_dim: Number of static features S.
        backbone: `osciformer`, or for comparison `transformer` (sinusoidal time encoding), `gru_d`
            (one recurrent layer, whatever `num_layers` and `num_heads`) or `contiformer`.
        carry: Let each token also hold, per feature, the last known value and its age.
        dim: Width D.
        num_layers: Number of encoder blocks.
        num_heads: Number of heads H.
        dropout: Dropout of the backbone and the head.
        observation_dropout: Share of the measured values that is hidden at random in training.
        backbone_options: Settings of the backbone alone; for `osciformer` those of
            `OsciFormerConfig` that are not above, and `preset`.
    """

    input_dim: int
    static_dim: int = 0
    backbone: str = "osciformer"
    carry: bool = True
    dim: int = 64
    num_layers: int = 2
    num_heads: int = 2
    dropout: float = 0.3
    observation_dropout: float = 0.2
    backbone_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be built, and turn lists, as JSON has them, into tuples."""
        for name, least in (("input_dim", 1), ("static_dim", 0), ("dim", 1), ("num_layers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        for name in ("dropout", "observation_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must lie in [0, 1); got {getattr(self, name)}")
        check_choice("backbone", self.backbone, get_args(BackboneName))
        options = {name: _frozen(value) for name, value in self.backbone_options.items()}
        _refuse_unknown(
            f"backbone_options of {self.backbone}", options, BACKBONE_OPTIONS[self.backbone]
        )
        object.__setattr__(self, "backbone_options", options)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Return the configuration that `to_dict` wrote; an unknown or missing key is an error."""
        _refuse_unknown("settings", settings, [item.name for item in fields(cls)])
        for item in fields(cls):
            needed = item.default is MISSING and item.default_factory is MISSING
            if needed and item.name not in settings:
                raise ValueError(f"{item.name} must be given; got {', '.join(sorted(settings))}")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that JSON can hold."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}


@dataclass(frozen=True, kw_only=True)
class SeriesModelConfig(TaskConfig):
    """Everything that decides the shape and behaviour of a `SeriesModel`; all keyword-only.

    Attributes:
        input_dim: This and all up to `backbone_options` are those of `TaskConfig`.
        output_dim: Number of outputs: classes, or targets of a regression.
        pool: How the states of a series become one, any of `last, mean, max`; they are joined.
        skip: Also give the head simple statistics of the series.
        statistics: Which ones, see `summarise_series`: any of `last, mean, min, max, rise, count,
            std, age, first`.
        foresight: Weight of the loss of predicting the next measurements, see `Foresight`; 0 for
            none. It needs a backbone that `is_causal`.
        dim: This, `num_heads` and `dropout` are lower than those of `TaskConfig`: with one target a
            series there is less to learn from.

    Example:
        >>> config = SeriesModelConfig(input_dim=37, output_dim=2, pool=["last", "mean"])
        >>> config.pool, config.dim
        (('last', 'mean'), 32)
        >>> SeriesModelConfig.from_dict(config.to_dict()) == config
        True
    """

    output_dim: int
    pool: tuple[str, ...] = ("last", "mean", "max")
    skip: bool = True
    # What models have whose files name none; so this must stay, whatever estimators prefer.
    statistics: tuple[str, ...] = ("last", "mean", "min", "max", "rise", "count")
    foresight: float = 0.0
    dim: int = 32
    num_heads: int = 1
    dropout: float = 0.2

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        super().__post_init__()
        if self.output_dim < 1:
            raise ValueError(f"output_dim must be at least 1; got {self.output_dim}")
        if not isinstance(self.foresight, Real):
            raise ValueError(f"foresight must be a number; got {self.foresight!r}")
        if not 0.0 <= self.foresight < float("inf"):
            raise ValueError(f"foresight must be finite and not negative; got {self.foresight}")
        if self.foresight and not self.is_causal:
            raise ValueError(
                f"foresight={self.foresight} needs states that do not know what follows, and those "
                f"of {self.backbone} with {dict(self.backbone_options)} do; give foresight=0, or "
                "direction='causal' among the backbone_options, and no query='ridge'"
            )
        self._check_kinds("pool", get_args(Pool))
        self._check_kinds("statistics", get_args(Statistic), "; for none there is skip=False")

    @property
    def is_causal(self) -> bool:
        """Whether the state at a row depends on no row of a later time."""
        options = dict(self.backbone_options)
        if self.backbone != "osciformer":
            usual = "bidirectional" if self.backbone == "transformer" else "causal"
            return bool(options.get("direction", usual) == "causal")
        preset = options.pop("preset", "default")
        inner = OsciFormerConfig.from_preset(preset, input_dim=self.input_dim, **options)
        # A query that cannot be streamed is fitted to the whole series, in either direction.
        return inner.direction == "causal" and inner.query in STREAMING_QUERIES

    def _check_kinds(self, name: str, allowed: tuple[str, ...], hint: str = "") -> None:
        given = getattr(self, name)
        kinds = (given,) if isinstance(given, str) else tuple(given)
        for kind in kinds:
            check_choice(name, kind, allowed)
        if not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(f"{name} must name at least one kind, each once; got {kinds}{hint}")
        object.__setattr__(self, name, kinds)


@dataclass(frozen=True, kw_only=True)
class QueryModelConfig(TaskConfig):
    """Everything that decides the shape and behaviour of a `QueryModel`; all keyword-only.

    Attributes:
        input_dim: This and all up to `backbone_options` are those of `TaskConfig`.
        quantiles: Levels of the predicted quantiles, increasing, within (0, 1).
        direction: `causal`, for forecasts: only observations at or before a query time count; or
            `bidirectional`, for imputation.
        dropout: This and `observation_dropout` are lower than for whole series: each series has
            many targets, and a hidden value makes its neighbours harder to predict.

    Example:
        >>> config = QueryModelConfig(input_dim=3, direction="bidirectional")
        >>> config.quantiles
        (0.1, 0.5, 0.9)
        >>> QueryModelConfig.from_dict(config.to_dict()) == config
        True
    """

    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)
    direction: str = "causal"
    dropout: float = 0.1
    observation_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        super().__post_init__()
        check_choice("direction", self.direction, get_args(Direction))
        if "direction" in self.backbone_options:
            raise ValueError("give direction itself, not as one of the backbone_options")
        if self.backbone == "contiformer":
            raise ValueError("contiformer cannot be read at other times; take another backbone")
        levels = tuple(float(level) for level in self.quantiles)
        ends = (0.0, *levels, 1.0)
        if not levels or any(low >= high for low, high in pairwise(ends)):
            raise ValueError(f"quantiles must increase within (0, 1); got {levels}")
        object.__setattr__(self, "quantiles", levels)


def _refuse_unknown(what: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    for name in sorted(set(given) - set(allowed)):
        near = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(allowed)}"
        raise ValueError(f"unknown {what}: {name!r}; {hint}")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
