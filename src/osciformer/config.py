"""All settings in one place: what they are called, what they mean, which values they take.

A configuration is a frozen dataclass whose fields are made by `setting`, with a default and the
allowed values; its docstring says what they mean. From these fields come the saved JSON, the YAML
keys and flags of the command line, and the parameters of the estimators. To add a setting, add a
field and its line in the docstring. The module does not import torch, so `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin

from osciformer._text import check_choice, did_you_mean

Kind = Literal["whole", "number", "switch", "text", "texts", "numbers", "mapping", "other"]
TaskName = Literal["classification", "regression", "forecasting", "imputation", "events"]
TASKS: tuple[str, ...] = get_args(TaskName)
SERIES_TASKS, QUERY_TASKS, VALUE_TASKS, EVENT_TASKS = TASKS[:2], TASKS[2:4], TASKS[:4], TASKS[4:]
ModelName = Literal["osciformer", "resonator"]
MODELS: tuple[str, ...] = get_args(ModelName)
#: Groups of settings, in the order in which `--help` shows them.
PANELS = ("Table", "Model", "Training", "Processes")
TABLE, MODEL, TRAINING, PROCESSES = PANELS

QueryMode = Literal["hold", "linear", "ridge", "ridge_causal", "anchored", "learned"]
ValueMode = Literal["average", "point"]
Direction = Literal["causal", "bidirectional"]
BlockKind = Literal["attention", "resonator", "selective"]
BankKind = Literal[
    "log_uniform", "log_spaced", "linear", "random_uniform", "geometric", "harmonics", "data"
]
Backend = Literal["auto", "oracle", "reference", "blocked", "short", "triton"]
Pool = Literal["last", "mean", "max"]
Statistic = Literal["last", "mean", "min", "max", "rise", "count", "std", "age", "first"]
LinearHeadName = Literal["auto", "ridge", "logistic"]
HeadName = Literal["softplus", "decay", "mixture", "exponential"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
Accelerator = Literal["auto", "cpu", "gpu"]
Strategy = Literal["auto", "ddp", "fsdp"]
Scaling = Literal["asinh", "standard", "robust", "none"]
Criterion = Literal["huber", "mse"]
LoggerName = Literal["auto", "csv", "tensorboard", "wandb", "mlflow"]
Auto = Literal["auto"]

#: Frequencies for times that span about one unit, as `TimeScale` makes them.
DEFAULT_OMEGA_RANGE = (0.1, 200.0)
#: Names of frequency ranges that come from the training times, see `OsciFormer.fit_time_scale`.
RANGES_OF_DATA = ("data", "typical")

#: What each preset changes, of the layer and of whole models.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    # The paper gives neither the dropout rate, for which 0.1 is usual, nor depth and feed-forward.
    "paper": dict(dim=256, num_heads=8, query="ridge", omega_range=(1e-2, 10.0), dropout=0.1),
}

# Settings that were removed, and the value that meant "off".
_REMOVED: Mapping[str, Any] = {"foresight": 0.0, "keep_latest": False}


class Range(NamedTuple):
    """Allowed numbers: in words, and as a test."""

    words: str
    contains: Callable[[Any], bool]


POSITIVE_COUNT = Range("at least 1", lambda x: x >= 1)
NOT_NEGATIVE = Range("not negative", lambda x: x >= 0)
POSITIVE = Range("positive and finite", lambda x: 0 < x < float("inf"))
FRACTION = Range("from 0 to below 1", lambda x: 0 <= x < 1)
INSIDE = Range("between 0 and 1", lambda x: 0 < x < 1)
NOT_EMPTY = Range("at least one name", lambda x: len(x) > 0)


def setting(default: Any = MISSING, *, tasks: tuple[str, ...] = TASKS, **facts: Any) -> Any:
    """Return a field of a configuration; the Attributes of its class say what it means.

    Args:
        default: The default; a field without one must be given, and users do not set it.
        tasks: Tasks that the setting belongs to, of those that use its class.
        **facts: Further fields of `Setting`; `panel` is empty if users do not set it.
    """
    defaults = {} if default is MISSING else dict.fromkeys(tasks, default)
    return dataclasses.field(default=default, metadata={"defaults": defaults, **facts})


def _is_number(kind: type) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, kind) and not isinstance(x, bool)


def _is_tuple_of(kind: type) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, tuple) and all(isinstance(item, kind) for item in x)


_KINDS: Mapping[Kind, Range] = {
    "whole": Range("a whole number", _is_number(Integral)),
    "number": Range("a number", _is_number(Real)),
    "switch": Range("true or false", lambda x: isinstance(x, bool)),
    "text": Range("a text", lambda x: isinstance(x, str)),
    "texts": Range("a list of names", _is_tuple_of(str)),
    "numbers": Range("a list of numbers", _is_tuple_of(Real)),
    "mapping": Range("a mapping like {'a': 1}, or a word", lambda x: isinstance(x, Mapping | str)),
    "other": Range("checked by its own configuration", lambda x: True),
}
_SIMPLE: Mapping[Any, Kind] = {int: "whole", float: "number", bool: "switch", str: "text"}
#: Settings that estimators take as keywords; the others go into `model_options` (panel Model) or
#: `train_options` (panels Training and Processes).
KEYWORDS = frozenset(
    {"dim", "num_layers", "num_heads", "dropout", "head", "blend_with", "quantiles", "horizon"}
    | {"families", "resonators"}
    | {"covariates", "known_covariates", "hidden_fraction", "class_weight", "criterion"}
    | {"learning_rate", "max_epochs", "batch_size", "validation_fraction", "random_state"}
    | {"accelerator"}
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a configuration: something to set in an estimator, in a file or by a flag."""

    name: str  # key in a YAML file
    kind: Kind
    help: str  # what it means
    defaults: Mapping[str, Any]  # what holds if it is not given, by task that it belongs to
    choices: tuple[str, ...] = ()  # allowed words, if they are limited
    within: Range | None = None  # allowed numbers, if they are limited
    is_optional: bool = False  # None (`none`) is allowed
    is_automatic: bool = False  # `auto` is allowed where estimators want a number
    is_free: bool = False  # a continued run may change it, as the result does not depend on it
    parameter: str = ""  # name in Python, if it is another one
    short: str = ""  # a further flag
    panel: str = ""  # where `--help` shows it: one of `PANELS`, or nowhere
    models: tuple[str, ...] = MODELS[:1]  # models that have it

    @property
    def flag(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def python_name(self) -> str:
        """The name in the estimators, or in `Layout`."""
        return self.parameter or self.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it belongs to."""
        return tuple(self.defaults)

    @property
    def default(self) -> Any:
        """The default of the first of its tasks; see `defaults` for the others."""
        return next(iter(self.defaults.values()))

    @property
    def default_text(self) -> str:
        """The default in words, such as `32; 64 for events`; empty if it is None."""
        by_word: dict[str, list[str]] = {}
        for task, value in self.defaults.items():
            word = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            by_word.setdefault(word, []).append(task)
        (first, _), *others = by_word.items()
        shown = [] if first in ("", "None") else [first]
        return "; ".join(shown + [f"{word} for {', '.join(tasks)}" for word, tasks in others])

    @property
    def group(self) -> str:
        """The parameter of an estimator that holds it: `model_options`, or empty for its own."""
        if self.python_name in KEYWORDS or self.panel == TABLE:
            return ""
        return "model_options" if self.panel == MODEL else "train_options"

    @property
    def wanted(self) -> str:
        """What values are allowed, in words, such as `a whole number, auto, or none`."""
        automatic = ", auto" if self.is_automatic else ""
        return f"{_KINDS[self.kind].words}{automatic}{', or none' if self.is_optional else ''}"

    def check(self, value: Any, *, is_settled: bool = False) -> Any:
        """Return a value, lists as tuples; `auto` is an error if `is_settled`."""
        if value is None and self.is_optional:
            return None
        if value == "auto" and self.is_automatic and not is_settled:
            return value
        if self.kind in ("texts", "numbers"):
            value = (value,) if isinstance(value, str | Real) else tuples(value)
        for allowed in (_KINDS[self.kind], self.within):
            if allowed is not None and not allowed.contains(value):
                none = ", or None" if self.is_optional else ""
                raise ValueError(f"{self.name} must be {allowed.words}{none}; got {value!r}")
        for item in value if isinstance(value, tuple) else (value,):
            if self.choices:
                check_choice(self.name, item, self.choices)
        return value


def _read_type(annotation: Any) -> dict[str, Any]:
    """Return what an annotation says: kind of value, allowed words, and whether None is allowed."""
    is_union = get_origin(annotation) in (typing.Union, types.UnionType)
    parts = set(get_args(annotation)) if is_union else {annotation}
    found: dict[str, Any] = {"is_optional": types.NoneType in parts, "kind": "other"}
    parts -= {types.NoneType}
    if any(get_origin(part) is Mapping for part in parts):
        return {"is_optional": True, "kind": "mapping"}
    if len(parts) > 1:
        return found
    (part,) = parts
    if get_origin(part) is Literal:
        return {**found, "kind": "text", "choices": get_args(part)}
    if get_origin(part) is tuple:
        inner = _read_type(get_args(part)[0])
        kind = "texts" if inner["kind"] == "text" else "numbers"
        return {**found, "kind": kind, "choices": inner.get("choices", ())}
    return {**found, "kind": _SIMPLE.get(part, "other")}


def _help_of(cls: type, name: str) -> str:
    """Return what the docstring of a class, or of one that it extends, says about a field."""
    for base in cls.__mro__:
        _, _, listed = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        found = re.search(rf"^    {name}: (.+(?:\n        .+)*)", listed, re.MULTILINE)
        if found:
            return " ".join(found.group(1).replace("`", "").split())
    return ""


@functools.cache
def _settings_of(cls: Any) -> dict[str, Setting]:
    """Return the fields of a configuration as settings."""
    hints = typing.get_type_hints(cls)
    found = {}
    for item in fields(cls):
        facts = {
            "panel": cls.panel,
            "models": cls.models,
            **_read_type(hints[item.name]),
            **item.metadata,
        }
        found[item.name] = Setting(name=item.name, help=_help_of(cls, item.name), **facts)
    return found


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of all configurations: checked when made, and to and from plain values."""

    panel: ClassVar[str] = MODEL
    models: ClassVar[tuple[str, ...]] = MODELS[:1]

    def __post_init__(self) -> None:
        for name, item in self._settings().items():
            object.__setattr__(self, name, item.check(getattr(self, name), is_settled=True))

    @classmethod
    def _settings(cls) -> dict[str, Setting]:
        kind: Any = cls  # mypy does not know that classes can be hashed
        return _settings_of(kind)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Return the configuration that `to_dict` wrote; an unknown or missing key is an error."""
        settings = without_removed(settings)
        refuse_unknown("setting", settings, [item.name for item in fields(cls)])
        for item in fields(cls):
            if item.default is MISSING and item.name not in settings:
                raise ValueError(f"{item.name} must be given; got {', '.join(sorted(settings))}")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that JSON can hold."""
        return {item.name: plain(getattr(self, item.name)) for item in fields(self)}

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Return, in words, which settings of another run's `to_dict` would give another result.

        Example:
            >>> TrainConfig(seed=1).differences(TrainConfig(seed=2, verbose=1).to_dict())
            ['seed was 2, is 1']
        """
        # What an older version did not know had the default.
        usual = {f.name: plain(f.default) for f in fields(self) if f.default is not MISSING}
        known = self._settings()
        mine = {name: x for name, x in self.to_dict().items() if not known[name].is_free}
        return differences({**usual, **without_removed(other)}, mine)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Everything that decides the shape and behaviour of an `OscillatorAttention`.

    The fields are the arguments of the layer, which describes them.
    """

    dim: int = setting(within=POSITIVE_COUNT)
    num_heads: int = setting(8, within=POSITIVE_COUNT)
    query: QueryMode = setting("hold")
    value: ValueMode = setting("average")
    direction: Direction = setting("causal")
    oscillators_per_channel: int = setting(1, within=POSITIVE_COUNT)
    num_modes: int = setting(8, within=POSITIVE_COUNT)
    bank: BankKind = setting("log_spaced")
    omega_range: tuple[float, float] | str = setting(DEFAULT_OMEGA_RANGE)
    zeta_range: tuple[float, float] = setting((0.05, 0.4))
    undamped: bool = setting(False)
    velocity: bool = setting(True)
    drive_modes: int = setting(0, within=NOT_NEGATIVE)
    equilibrium: bool = setting(False)
    ridge: float = setting(1e-4)
    dropout: float = setting(0.0, within=FRACTION)
    bias: bool = setting(True)
    scale: float | None = setting(None)
    backend: Backend = setting("auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.omega_range, str):
            if self.omega_range not in RANGES_OF_DATA:
                allowed = " or ".join(map(repr, RANGES_OF_DATA))
                raise ValueError(
                    f"omega_range must be (low, high) or {allowed}; got {self.omega_range!r}"
                )
        else:
            object.__setattr__(self, "omega_range", tuple(self.omega_range))

    @classmethod
    def from_preset(cls, preset: str | None, **given: Any) -> Self:
        """Return a preset with the given settings in place of its own; None keeps the preset's."""
        check_choice("preset", preset or "default", list(PRESETS))
        chosen = {name: value for name, value in given.items() if value is not None}
        return cls.from_dict({**PRESETS[preset or "default"], **chosen})


def _count_blocks(config: Any) -> None:
    """Let `blocks` decide `num_layers`, of which a default cannot be told from a wish."""
    if config.blocks is not None:
        object.__setattr__(config, "num_layers", len(config.blocks))


@dataclass(frozen=True, kw_only=True)
class OsciFormerConfig(AttentionConfig):
    """Everything that decides the shape and behaviour of an `OsciFormer`; all keyword-only.

    Attributes:
        omega_range: Ends of the frequencies per unit of the model's time, or taken from the
            training times by `OsciFormer.fit_time_scale`: `"data"`, up to half a turn over a short
            gap; or `"typical"`, up to half a turn over the median gap.
        input_dim: Number of features F.
        static_dim: Number of static features S.
        num_layers: Number of encoder blocks; that of `blocks`, if they are given.
        blocks: Kinds of the encoder blocks in order, each `attention`, `resonator` or `selective`
            (resonators on a clock that the tokens drive); None is attention throughout.
        feedforward_dim: Hidden width of the feed-forward; None is 4 D.

    Example:
        >>> config = OsciFormerConfig.from_preset("paper", input_dim=3, dim=32)
        >>> config.query, config.dim, config.num_heads
        ('ridge', 32, 8)
    """

    dim: int = setting(64, within=POSITIVE_COUNT)
    num_heads: int = setting(4, within=POSITIVE_COUNT)
    omega_range: tuple[float, float] | str = setting("data")
    input_dim: int = setting(within=POSITIVE_COUNT)
    static_dim: int = setting(0, within=NOT_NEGATIVE)
    num_layers: int = setting(2, within=POSITIVE_COUNT)
    blocks: tuple[BlockKind, ...] | None = setting(None, within=NOT_EMPTY)
    feedforward_dim: int | None = setting(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        _count_blocks(self)


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Config):
    """What the configurations of the models of series share.

    Attributes:
        input_dim: Number of features F.
        static_dim: Number of static features S.
        dim: Width of the model.
        num_layers: Number of encoder blocks; that of `blocks`, if they are given.
        blocks: Kinds of the blocks of `osciformer` in order, each `attention`, `resonator` or
            `selective` (resonators on a clock that the tokens drive); attention throughout if not
            given.
        num_heads: Number of heads.
        dropout: Dropout of the backbone and the head.
        observation_dropout: Fraction of the measured values that is hidden at random in training.
        carry: Let each token also hold, per feature, the last known value and its age.
        backbone: `osciformer`, or for comparison `transformer` (sinusoidal time encoding), `gru_d`
            or another recurrent network of `osciformer.baselines` (one layer, whatever `num_layers`
            and `num_heads`), another model there, or any name of `register_backbone`.
        backbone_options: Further settings of the backbone, by name (JSON); for `osciformer` those
            of `OsciFormerConfig` that are not above, and `preset`.
    """

    input_dim: int = setting(within=POSITIVE_COUNT)
    static_dim: int = setting(0, within=NOT_NEGATIVE, panel="")
    dim: int = setting(64, within=POSITIVE_COUNT)
    num_layers: int = setting(2, within=POSITIVE_COUNT)
    blocks: tuple[BlockKind, ...] | None = setting(None, within=NOT_EMPTY)
    num_heads: int = setting(2, within=POSITIVE_COUNT)
    dropout: float = setting(0.3, within=FRACTION)
    observation_dropout: float = setting(0.2, within=FRACTION)
    carry: bool = setting(True)
    backbone: str = setting("osciformer")
    backbone_options: Mapping[str, Any] = setting(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        _count_blocks(self)
        object.__setattr__(self, "backbone_options", tuples(dict(self.backbone_options or {})))


@dataclass(frozen=True, kw_only=True)
class SeriesModelConfig(TaskConfig):
    """`TaskConfig` and everything else that decides a `SeriesModel`; all keyword-only.

    Attributes:
        output_dim: Number of outputs: classes, or targets of a regression.
        pool: How the states of a series become one, any of `last, mean, max`; they are joined.
        skip: Also give the head simple statistics of the series.
        statistics: Which ones, see `summarise_series`: any of `last, mean, min, max, rise, count,
            std, age, first`.
        variables: Also encode each variable by itself, by its spectrum and by reads at shared
            times, with attention among variables; if not given, estimators do so with the backbone
            `osciformer` and no preset.
    """

    # Lower than elsewhere: with one target a series there is less to learn from.
    dim: int = setting(32, within=POSITIVE_COUNT)
    num_heads: int = setting(1, within=POSITIVE_COUNT)
    dropout: float = setting(0.2, within=FRACTION)
    output_dim: int = setting(within=POSITIVE_COUNT)
    pool: tuple[Pool, ...] = setting(("last", "mean", "max"))
    skip: bool = setting(True)
    # What models have whose files name none; so this must stay, whatever estimators prefer.
    statistics: tuple[Statistic, ...] = setting(("last", "mean", "min", "max", "rise", "count"))
    variables: bool | None = setting(False)  # what models have whose files do not name it

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, hint in (("pool", ""), ("statistics", "; for none there is skip=False")):
            kinds = getattr(self, name)
            if not kinds or len(set(kinds)) < len(kinds):
                problem = "must name at least one kind, each once"
                raise ValueError(f"{name} {problem}; got {kinds}{hint}")


@dataclass(frozen=True, kw_only=True)
class QueryModelConfig(TaskConfig):
    """`TaskConfig` and everything else that decides a `QueryModel`; all keyword-only.

    Attributes:
        quantiles: Levels of the predicted quantiles, increasing, within (0, 1).
        direction: `causal`, for forecasts: only observations at or before a query time count; or
            `bidirectional`, for imputation.
        feature_dim: Width of the part of the head that each feature has of its own; 0 for none.
            With it the head's hidden layer is twice as wide. For imputation it then has no dropout,
            and also sees how far what is measured at the query time is from the line between its
            neighbours.
    """

    # Both are lower: a series has many targets, and hidden values make neighbours hard to predict.
    dropout: float = setting(0.1, within=FRACTION)
    observation_dropout: float = setting(0.0, within=FRACTION)
    quantiles: tuple[float, ...] = setting((0.1, 0.5, 0.9))
    direction: Direction = setting("causal", panel="")
    # What models have whose files name none; so this must stay, whatever estimators prefer.
    feature_dim: int = setting(0, within=NOT_NEGATIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "direction" in self.backbone_options:
            raise ValueError("give direction itself, not as one of the backbone_options")
        levels = tuple(float(level) for level in self.quantiles)
        ends = (0.0, *levels, 1.0)
        if not levels or any(low >= high for low, high in pairwise(ends)):
            raise ValueError(f"quantiles must increase within (0, 1); got {levels}")
        object.__setattr__(self, "quantiles", levels)


@dataclass(frozen=True, kw_only=True)
class EventModelConfig(Config):
    """Everything that decides the shape and behaviour of a `NeuralEventProcess`.

    Attributes:
        num_types: Number of event types K.
        encoder: What reads the history of events: `osciformer`, a baseline, or any name of
            `register_backbone`.
        head: What turns states into intensities: `softplus` of the state at the time itself,
            `decay` of the state after the last event, `mixture` density of the waiting time with
            types by the state at the time itself, or `exponential` hazard (RMTPP).
        dim: Width D of the states.
        num_layers: Number of blocks of the encoder.
        num_heads: Number of heads of its attention.
        dropout: Dropout.
        num_components: Components of the `mixture` head.
        encoder_options: Further settings of the encoder, by name (JSON).
    """

    num_types: int = setting(within=POSITIVE_COUNT)
    encoder: str = setting("osciformer")
    head: HeadName = setting("mixture")
    dim: int = setting(64, within=POSITIVE_COUNT)
    num_layers: int = setting(1, within=POSITIVE_COUNT)
    num_heads: int = setting(4, within=POSITIVE_COUNT)
    dropout: float = setting(0.1, within=FRACTION)
    num_components: int = setting(16, within=POSITIVE_COUNT)
    encoder_options: Mapping[str, Any] = setting(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "encoder_options", dict(self.encoder_options or {}))


@dataclass(frozen=True, kw_only=True)
class EstimatorConfig(Config):
    """What an estimator needs besides a model and a training run.

    Attributes:
        scaling: Scaling of the values: `asinh`, `standard`, `robust` or `none`.
        clip: Bound on the absolute scaled inputs, against outliers; none for no bound.
        resonators: Also fit a model on features of driven oscillators, in seconds, and predict with
            a mixture of it and the network, by weights that the validation series decide.
        blend_with: Classical processes to blend the network with: of `renewal`, `repeat`, `hawkes`;
            `auto` or none.
        covariates: Features that are inputs and not predicted.
        known_covariates: Features known ahead, not predicted.
        horizon: How far to look ahead; a quarter of a typical series if not given.
        hidden_fraction: Part of the observations that is hidden in training.
        validation_fraction: Part of the series that is kept for early stopping.
        class_weight: none, `balanced`, or weights by class (JSON).
        label_smoothing: Part of the target that is spread over all classes.
        criterion: `huber` or `mse`.
    """

    scaling: Scaling = setting("standard", tasks=VALUE_TASKS)
    clip: float | None = setting(6.0, within=POSITIVE, tasks=VALUE_TASKS)
    # Free: the network that a continued run trains is the same with them and without.
    resonators: bool = setting(True, tasks=SERIES_TASKS, is_free=True)
    blend_with: tuple[str, ...] | None = setting(None, tasks=EVENT_TASKS)
    covariates: tuple[str, ...] = setting((), tasks=QUERY_TASKS)
    known_covariates: tuple[str, ...] = setting((), tasks=("forecasting",))
    horizon: float | None = setting(None, within=POSITIVE, tasks=("forecasting",))
    hidden_fraction: float = setting(0.2, within=INSIDE, tasks=("imputation",))
    validation_fraction: float = setting(0.1, within=FRACTION, panel=TRAINING)
    class_weight: str | Mapping[Any, float] | None = setting(
        None, panel=TRAINING, tasks=TASKS[:1], models=MODELS
    )
    label_smoothing: float = setting(0.0, within=FRACTION, panel=TRAINING, tasks=TASKS[:1])
    criterion: Criterion = setting("huber", panel=TRAINING, tasks=("regression",))


@dataclass(frozen=True, kw_only=True)
class ResonatorConfig(Config):
    """What can be set of the models on resonator features.

    Attributes:
        linear_head: Classifier on the features: `ridge`, `logistic`, or `auto`: `ridge`, but of two
            classes that of the lower log loss on series left out.
        families: Families of features, of `shape`, `spectrum`, `states`, `summary`, `observation`
            and `static`; those that tell most about series left out, if not given.
    """

    models: ClassVar[tuple[str, ...]] = MODELS[1:]

    linear_head: LinearHeadName = setting("auto", parameter="head", tasks=TASKS[:1])
    families: tuple[str, ...] | None = setting(None, tasks=SERIES_TASKS)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Everything that decides how a model is trained.

    Attributes:
        seed: Decides the order of batches and all randomness of training.
        max_epochs: Passes over the training series, if early stopping does not end them before.
        batch_size: Series per step, of all processes together.
        learning_rate: Highest learning rate of AdamW.
        weight_decay: Weight decay; spectra, norms and biases have none.
        warmup_fraction: Part of all steps in which the learning rate rises linearly; it then falls
            as a cosine.
        gradient_clip: Bound on the norm of the gradient; none for no bound.
        weight_averaging: Decay of an exponential average of the weights, which is what is validated
            and returned; from 0, for none, to below 1.
        patience: Epochs without a better validation metric after which training stops; none for no
            early stopping.
        monitor: Validation metric that decides which epoch is best; `auto` asks the task.
        restore_best: Return the weights of the best epoch, not those of the last.
        precision: `32-true`, `bf16-mixed` or `16-mixed`.
        accelerator: `auto` (a GPU if there is one), `cpu` or `gpu`.
        devices: Processes on each machine; ignored under `torchrun`, which decides.
        num_nodes: Number of machines; `torchrun` decides here too.
        strategy: `auto` (DDP if there are several processes), `ddp` or `fsdp`.
        num_workers: Processes that prepare batches in the background; 0 for none.
        logger: Where each epoch's numbers go besides the history: `tensorboard`, `wandb`, `mlflow`,
            nowhere (`csv`: the history alone), or `auto`: TensorBoard if it is installed.
        verbose: 0 prints nothing, 1 shows a progress bar, 2 prints a line per epoch.
    """

    panel: ClassVar[str] = TRAINING

    seed: int = setting(0, within=NOT_NEGATIVE, parameter="random_state", models=MODELS)
    max_epochs: int = setting(15, within=POSITIVE_COUNT, short="--epochs", is_automatic=True)
    batch_size: int = setting(64, within=POSITIVE_COUNT, is_automatic=True)
    learning_rate: float = setting(2e-3, within=POSITIVE)
    weight_decay: float = setting(0.02, within=NOT_NEGATIVE)
    warmup_fraction: float = setting(0.1, within=FRACTION)
    gradient_clip: float | None = setting(1.0, within=POSITIVE)
    weight_averaging: float = setting(0.0, within=FRACTION)
    patience: int | None = setting(5, within=POSITIVE_COUNT, is_automatic=True)
    monitor: str = setting("auto")
    restore_best: bool = setting(True, panel="")
    precision: Precision = setting("32-true", panel=PROCESSES)
    accelerator: Accelerator = setting("auto", panel=PROCESSES, is_free=True)
    devices: int = setting(1, within=POSITIVE_COUNT, panel=PROCESSES, is_free=True)
    num_nodes: int = setting(1, within=POSITIVE_COUNT, panel=PROCESSES, is_free=True)
    strategy: Strategy = setting("auto", panel=PROCESSES, is_free=True)
    num_workers: int = setting(0, within=NOT_NEGATIVE, panel=PROCESSES, is_free=True)
    logger: LoggerName = setting("auto", is_free=True)
    verbose: int = setting(0, within=NOT_NEGATIVE, panel="", is_free=True)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """What to train, and on which columns of a table; as the command line has it.

    `Setting.python_name` is the parameter of `osciformer.data.Layout` that a setting stands for.

    Attributes:
        task: What to train: classification, regression, forecasting, imputation or events.
        model: What to train it with: osciformer, a network; or resonator, a linear model on
            features of driven oscillators, in seconds.
        table: The table to train on.
        id: Column that says which series a row belongs to.
        time: Column of times.
        target: Column to predict, constant within a series (several, with commas, for regression);
            for forecasting and imputation, features to predict, all if not given.
        features: Feature columns, or variables; all if not given.
        static: Columns (or variables) with one value per series; --labels may hold them, too.
        variable: Column of names, for tables of (id, time, variable, value).
        value: Column of values, for such tables.
        type: Column of the types of events: text, or integers from 0; none if all are of one type.
        num_types: Number of types that are integers, if the table lacks some that others have.
        start: Column that says where observation of a sequence began.
        end: Column that says where it ended.
        time_unit: Name of the unit of times that are numbers.
        labels: Another table, a row per series, with the target.
        labels_id: Its column of ids, if not called as in the table.
        validation: Table for early stopping, in place of a part of the table.
        calibration_fraction: Part of the series that is kept for `predict --coverage`; then the
            model is not trained on it. 100 series or more are well spent.
        stream: Read Parquet from disk in each epoch; large files always are.
        unit: Unit of dates: ns, us, ms, s, min, h or d.
        origin: Where time 0 is: auto, series or absolute.
        time_format: How to read times that are text: iso, or as of strptime.
        duplicates: Values at equal times: error, mean, last or keep; of events, keep or error.
        empty: Series without values: error, drop or keep.
        guess_types: Read ids and classes of CSV that look like numbers as numbers, not as text.
    """

    panel: ClassVar[str] = TABLE
    models: ClassVar[tuple[str, ...]] = MODELS

    task: TaskName | None = setting(None)
    model: ModelName = setting("osciformer", tasks=SERIES_TASKS)
    table: str | None = setting(None, is_free=True)
    id: str | None = setting(None)
    time: str | None = setting(None)
    target: tuple[str, ...] | None = setting(None, parameter="label", tasks=VALUE_TASKS)
    features: tuple[str, ...] | None = setting(None, parameter="values", tasks=VALUE_TASKS)
    static: tuple[str, ...] | None = setting(None, tasks=VALUE_TASKS)
    variable: str | None = setting(None, tasks=VALUE_TASKS)
    value: str | None = setting(None, tasks=VALUE_TASKS)
    type: str | None = setting(None, tasks=EVENT_TASKS)
    num_types: int | None = setting(None, tasks=EVENT_TASKS)
    start: str | None = setting(None, tasks=EVENT_TASKS)
    end: str | None = setting(None, tasks=EVENT_TASKS)
    time_unit: str | None = setting(None, tasks=EVENT_TASKS)
    labels: str | None = setting(None, tasks=VALUE_TASKS, is_free=True)
    labels_id: str | None = setting(None, tasks=VALUE_TASKS)
    validation: str | None = setting(None, is_free=True, models=MODELS[:1])
    calibration_fraction: float = setting(0.0, within=FRACTION, tasks=VALUE_TASKS)
    stream: bool | None = setting(None, tasks=VALUE_TASKS)
    unit: str = setting("s")
    origin: str = setting("auto")
    time_format: str | None = setting(None)
    duplicates: str | None = setting(None)
    empty: str = setting("error", tasks=VALUE_TASKS)
    guess_types: bool = setting(False, tasks=VALUE_TASKS)


_LENGTH: Mapping[str, Any] = {"max_epochs": "auto", "batch_size": "auto", "patience": "auto"}
_SERIES_DEFAULTS: Mapping[str, Any] = {
    **_LENGTH,
    "statistics": get_args(Statistic),
    "variables": None,
    "scaling": "asinh",
    "learning_rate": 1e-3,
    "weight_averaging": 0.99,
}
_QUERY_DEFAULTS: Mapping[str, Any] = {**_LENGTH, "quantiles": (0.05, 0.25, 0.5, 0.75, 0.95)}
# Not for forecasts: those of series whose history matters were worse with the feature head.
_IMPUTATION_DEFAULTS: Mapping[str, Any] = {
    **_QUERY_DEFAULTS,
    "num_layers": 1,
    "feature_dim": 32,
    "learning_rate": 3e-3,
    "weight_averaging": 0.99,
}
#: Defaults of each task's estimator that are not those of its dataclasses.
TASK_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(SERIES_TASKS, _SERIES_DEFAULTS),
    "forecasting": _QUERY_DEFAULTS,
    "imputation": _IMPUTATION_DEFAULTS,
    **dict.fromkeys(EVENT_TASKS, _LENGTH),
}
#: Options of the backbone `osciformer` in classification and regression, unless they or a preset
#: are given. If a series as a whole counts, values at the end of a gap tell a frequency, which
#: averages over the gap hardly keep; and frequencies of rare short gaps are of no use.
SERIES_BACKBONE_DEFAULTS: Mapping[str, Any] = {"value": "point", "omega_range": "typical"}

_MODELS: Mapping[str, type[Config]] = {
    **dict.fromkeys(SERIES_TASKS, SeriesModelConfig),
    **dict.fromkeys(QUERY_TASKS, QueryModelConfig),
    **dict.fromkeys(EVENT_TASKS, EventModelConfig),
}


def settings(task: str | None = None, model: str | None = None) -> list[Setting]:
    """Return all that can be set for a task and a model, or any, in the order of `--help`."""
    found = list(_all_settings())
    if task is not None:
        check_choice("task", task, TASKS)
        found = [item for item in found if task in item.tasks]
    return found if model is None else [item for item in found if model in item.models]


@functools.cache
def _all_settings() -> tuple[Setting, ...]:
    found: dict[str, Setting] = {}
    for task in TASKS:
        for cls in (DataConfig, _MODELS[task], ResonatorConfig, EstimatorConfig, TrainConfig):
            for name, item in cls._settings().items():
                if item.panel and task in item.defaults:
                    before = found[name].defaults if name in found else {}
                    default = TASK_DEFAULTS[task].get(name, item.defaults[task])
                    defaults = {**before, task: default}
                    found[name] = dataclasses.replace(found.get(name, item), defaults=defaults)
    return tuple(sorted(found.values(), key=lambda item: PANELS.index(item.panel)))


def find_setting(name: str) -> Setting:
    """Return a setting by its name in files; an unknown one is an error with near matches."""
    known = {item.name: item for item in settings()}
    refuse_unknown("setting", [name], known)
    return known[name]


def estimator_settings(task: str, model: str = MODELS[0]) -> dict[str, Setting]:
    """Return the settings of an estimator by their names in Python, columns left out."""
    return {item.python_name: item for item in settings(task, model) if item.panel != TABLE}


def estimator_defaults(task: str, model: str = MODELS[0]) -> dict[str, Any]:
    """Return the default of each setting of an estimator, by its name in Python."""
    return {name: item.defaults[task] for name, item in estimator_settings(task, model).items()}


def estimator_arguments(
    task: str, given: Mapping[str, Any], model: str = MODELS[0]
) -> dict[str, Any]:
    """Return settings, by names in files or in Python, as arguments of an estimator.

    Example:
        >>> estimator_arguments("classification", {"dim": 8, "seed": 1, "weight_decay": 0.1})
        {'dim': 8, 'random_state': 1, 'train_options': {'weight_decay': 0.1}}
    """
    by_name = {item.name: item for item in settings(task, model)}
    by_name |= estimator_settings(task, model)
    refuse_unknown("setting", given, by_name)
    found: dict[str, Any] = {}
    for name, value in given.items():
        item = by_name[name]
        if item.panel != TABLE:
            place = found.setdefault(item.group, {}) if item.group else found
            place[item.python_name] = value
    return found


def refuse_unknown(what: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse names that are not allowed, with near matches."""
    allowed = list(allowed)
    for name in sorted(set(given) - set(allowed)):
        hint = did_you_mean(name, allowed) or f"allowed: {', '.join(allowed)}"
        raise ValueError(f"unknown {what} {name!r}; {hint}")


def is_removed(name: str) -> bool:
    """Return whether earlier versions had a setting that this one lacks."""
    return name in _REMOVED


def without_removed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that were removed; one that was in use is an error."""
    for name, off in _REMOVED.items():
        if settings.get(name, off) not in (off, None):
            raise ValueError(
                f"{name}={settings[name]!r} is a setting that this version of osciformer does not "
                f"have; train the model again without {name}, or install osciformer 0.1.0, which "
                "knows it"
            )
    return {name: value for name, value in settings.items() if name not in _REMOVED}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return, in words, which settings that both sides have differ."""
    return [
        f"{name} was {before[name]!r}, is {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def plain(value: Any) -> Any:
    """Return a value as JSON has it: lists in place of tuples, plain numbers, text for paths."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if hasattr(value, "__fspath__"):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def tuples(value: Any) -> Any:
    """Return tuples in place of lists, which JSON has, also inside mappings."""
    if isinstance(value, Mapping):
        return {name: tuples(item) for name, item in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value
