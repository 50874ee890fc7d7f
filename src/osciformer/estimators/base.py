"""What every estimator shares: settings, training, and files."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    NoReturn,
    Self,
    TypeVar,
    dataclass_transform,
)

import numpy as np
from torch import nn

from osciformer._optional import need
from osciformer._text import did_you_mean
from osciformer._types import Int, Tensor
from osciformer.config import (
    Auto,
    EstimatorConfig,
    TrainConfig,
    estimator_defaults,
    estimator_settings,
    is_removed,
    plain,
    refuse_unknown,
    tuples,
    without_removed,
)
from osciformer.saving import BuildLimit, ModelFile, ModelFileError, load_model, save_model
from osciformer.train.fitting import (
    TrainingInterrupted,
    fit,
    num_processes,
    undisturbed_random_state,
)
from osciformer.train.run_folder import CHECKPOINT, check_logger
from osciformer.train.sources import BatchSource
from osciformer.train.tasks import Task

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
else:
    _sklearn = need("sklearn.base", extra="train")
    BaseEstimator, TransformerMixin = _sklearn.BaseEstimator, _sklearn.TransformerMixin
    ClassifierMixin, RegressorMixin = _sklearn.ClassifierMixin, _sklearn.RegressorMixin

#: Estimators by the names that their files have.
ESTIMATORS: dict[str, type[SavedEstimator]] = {}
OPTIONS = ("model_options", "train_options")
#: Series per step in prediction, and the most in training, if the batch size is left open.
LARGEST_BATCH = 64
_SMALLEST_BATCH = 8
# A step counts for more than a pass: forty series are no reason to stop after fifteen steps.
_STEPS = 600
_FEWEST_EPOCHS, _MOST_EPOCHS = 15, 200
_LEAST_PATIENCE = 5
_Class = TypeVar("_Class", bound=type)


class Length(NamedTuple):
    """How long to train: series per step, passes, and passes without improvement."""

    batch_size: int
    max_epochs: int
    patience: int | None


def training_length(
    num_series: int,
    batch_size: int | Auto = "auto",
    max_epochs: int | Auto = "auto",
    patience: int | Auto | None = "auto",
    *,
    largest_batch: int = LARGEST_BATCH,
) -> Length:
    """Return the settings with numbers in place of `auto`.

    Example:
        >>> training_length(40)
        Length(batch_size=8, max_epochs=120, patience=30)
    """

    def settle(name: str, value: Any, usual: int) -> Any:
        if isinstance(value, str) and value != "auto":
            raise ValueError(f"{name} must be a number or 'auto'; got {value!r}")
        return usual if isinstance(value, str) else value

    eighth = 1 << (max(1, num_series // 8).bit_length() - 1)
    size = settle("batch_size", batch_size, min(largest_batch, max(_SMALLEST_BATCH, eighth)))
    steps = max(1, -(-num_series // max(1, size)))
    enough = min(_MOST_EPOCHS, max(_FEWEST_EPOCHS, -(-_STEPS // steps)))
    epochs = settle("max_epochs", max_epochs, enough)
    return Length(size, epochs, settle("patience", patience, max(_LEAST_PATIENCE, epochs // 4)))


def split(
    classes: Int[np.ndarray, "n"], fraction: float, generator: np.random.Generator
) -> tuple[Int[np.ndarray, "t"], Int[np.ndarray, "v"]]:
    """Return increasing positions of training and of validation series, class by class.

    scikit-learn's splits would draw others, and continued runs must draw the same.
    """
    is_validation = np.zeros(len(classes), dtype=bool)
    for number in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == number))
        size = min(round(fraction * len(members)), len(members) - 1)
        is_validation[members[:size]] = True
    return np.flatnonzero(~is_validation), np.flatnonzero(is_validation)


@dataclass_transform(kw_only_default=True)
def estimator(cls: _Class) -> _Class:
    """Make a dataclass of keywords; deprecated keywords move to the options, with a warning."""
    dataclass(eq=False, repr=False, kw_only=True)(cls)  # it changes and returns the same class
    init: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, **given: Any) -> None:
        init(self, **cls._move_deprecated(given))  # type: ignore[attr-defined]

    cls.__init__ = __init__  # type: ignore[misc]
    if hasattr(cls, "task"):
        ESTIMATORS[cls.__name__] = cls
    return cls


class SavedEstimator(BaseEstimator):
    """What every estimator of this package has: keywords with near names, and files."""

    task: ClassVar[str]
    model: ClassVar[str] = "osciformer"  #: Its name in `osciformer fit --model`.
    _fitted_attribute: ClassVar[str] = "model_"

    @classmethod
    def _move_deprecated(cls, given: dict[str, Any], *, is_strict: bool = True) -> dict[str, Any]:
        """Return the arguments; an unknown one is an error with near names."""
        names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        for name in sorted(given.keys() - names):
            _refuse_parameter(cls, name, names)
        return given

    def save(self, path: str | Path) -> Path:
        """Write the fitted estimator to a file (safetensors and JSON) and return its path."""
        self._check_fitted()
        return save_model(path, self._content(), self._weights())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the estimator that `save` wrote; nothing in the file is executed."""
        saved = load_model(path)
        kind = saved.content.get("estimator")
        if kind != cls.__name__:
            raise ModelFileError(
                f"{path} holds {kind!r}, not {cls.__name__!r}; osciformer.load reads any of them"
            )
        return cls._from_file(path, saved)

    @classmethod
    def _from_file(cls, path: str | Path, saved: ModelFile) -> Self:
        try:
            return cls._from_content(saved.content, saved.weights)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            problem = f"{path} does not describe a usable {cls.__name__}: {error}"
            raise ModelFileError(problem) from error

    def _content(self) -> dict[str, Any]:
        """Return what a file holds beside tensors."""
        params = self.get_params(deep=False)
        if not isinstance(params["random_state"], int | np.integer):
            params["random_state"] = None
        return {"estimator": type(self).__name__, "params": plain(params), **self._state()}

    @classmethod
    def _from_content(cls, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Self:
        """Return the estimator that `_content` and `_weights` describe."""
        result = cls(**cls._saved_params(content["params"]))
        result._restore(content, weights)
        return result

    @classmethod
    def _saved_params(cls, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a file."""
        found: dict[str, Any] = tuples(params)
        return found

    def _state(self) -> dict[str, Any]:
        """Return what was learned, as plain values."""
        raise NotImplementedError

    def _weights(self) -> Mapping[str, Tensor]:
        """Return what was learned, as tensors."""
        raise NotImplementedError

    def _restore(self, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Set what `_state`, which is a part of the content, and `_weights` returned."""
        raise NotImplementedError

    def _check_fitted(self) -> None:
        need("sklearn.utils.validation", extra="train").check_is_fitted(
            self,
            self._fitted_attribute,
            msg="this %(name)s is not fitted; call fit, or load one that was saved",
        )


def _refuse_parameter(cls: type, name: str, known: Iterable[str]) -> NoReturn:
    names = sorted({item.name for item in fields(cls)})  # type: ignore[arg-type]
    hint = did_you_mean(name, known) or f"it has {', '.join(names)}"
    raise TypeError(f"{cls.__name__} has no parameter {name!r}; {hint}")


@estimator
class TrainedEstimator(SavedEstimator):
    """Keywords that all estimators have; the constructor stores them and does nothing else.

    `settings()` lists all settings with the values that hold;
    `set_params(train_options__weight_decay=0.1)` sets one that has no keyword.

    Args:
        learning_rate: Highest learning rate.
        batch_size: Series per step, or `auto`: about an eighth of the series, 8 to 64 (to 32 for
            imputation).
        max_epochs: Most passes over the training series, or `auto`: 15, or 600 steps (up to 200).
        validation_fraction: Part of the training series that is kept for early stopping, unless
            `fit` is given validation data; 0 for none, and then the last epoch's weights stay.
        accelerator: `auto`, `cpu` or `gpu`.
        random_state: Seed, or a NumPy `RandomState`, or None. With a seed, training on a CPU gives
            the same weights each time, bit by bit; fits in several threads wait for each other.
        run_dir: Folder for history, logs and the checkpoint of a run; None writes nothing.
        resume: Go on from the checkpoint in `run_dir`, if there is one.
        verbose: 0 prints nothing, 1 shows a progress bar, 2 prints a line per epoch.
        model_options: Further settings of the model, by name.
        train_options: Further settings of training, by name, see `TrainConfig`.

    Attributes:
        model_: The trained model.
        history_: One dict per epoch.
        best_epoch_: Epoch whose weights the model has.
        n_iter_: Number of epochs.
        monitor_: Validation metric that decided which epoch is best; `fit` sets it.
    """

    learning_rate: float = TrainConfig.learning_rate
    batch_size: int | Auto = "auto"
    max_epochs: int | Auto = "auto"
    validation_fraction: float = EstimatorConfig.validation_fraction
    accelerator: str = TrainConfig.accelerator
    random_state: Any = None
    run_dir: str | Path | None = None
    resume: bool = False
    verbose: int = 0
    model_options: Mapping[str, Any] | None = None
    train_options: Mapping[str, Any] | None = None

    model_class: ClassVar[Any]
    config_class: ClassVar[Any]
    largest_batch: ClassVar[int] = LARGEST_BATCH  # in training, if the batch size is `auto`

    def settings(self) -> dict[str, Any]:
        """Return every setting by name with the value that holds: given, or the default.

        Example:
            >>> from osciformer.estimators import OsciFormerClassifier
            >>> model = OsciFormerClassifier(dim=8, train_options={"weight_decay": 0.1})
            >>> [model.settings()[name] for name in ("dim", "weight_decay", "patience")]
            [8, 0.1, 'auto']
        """
        known = estimator_settings(self.task)
        found = estimator_defaults(self.task)
        for group in OPTIONS:
            options = without_removed(getattr(self, group) or {})
            allowed = [name for name, item in known.items() if item.group == group]
            for name in options.keys() & known.keys() - set(allowed):
                place = known[name].group or "the keywords"
                raise ValueError(f"{name} does not belong to {group}, but to {place}")
            refuse_unknown(f"name in {group} of {type(self).__name__}:", options, allowed)
            found |= options
        return found | {name: getattr(self, name) for name, x in known.items() if not x.group}

    def set_params(self, **params: Any) -> Self:
        """Set keywords by name, and options as `train_options__weight_decay`."""
        for key in list(params):
            group, _, name = key.partition("__")
            if group in OPTIONS and name:
                before = params.get(group, getattr(self, group))
                params[group] = {**(before or {}), name: params.pop(key)}
        current = {group: getattr(self, group) for group in OPTIONS}
        moved = type(self)._move_deprecated({**current, **params}, is_strict=False)
        result: Self = super().set_params(**moved)
        return result

    @classmethod
    def _move_deprecated(cls, given: dict[str, Any], *, is_strict: bool = True) -> dict[str, Any]:
        """Return arguments with settings that were keywords once among the options."""
        names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        known = estimator_settings(cls.task) if hasattr(cls, "task") else {}
        for name in sorted(given.keys() - names):
            if is_removed(name):
                without_removed({name: given.pop(name)})
                advice = f"{name} has no effect and will be refused; leave it out"
            elif name in known:
                group = known[name].group
                given[group] = {**(given.get(group) or {}), name: given.pop(name)}
                advice = f"{name} as a keyword is deprecated; give {group}={{{name!r}: ...}}"
            elif not is_strict:
                continue
            else:
                _refuse_parameter(cls, name, [*names, *known])
            warnings.warn(advice, DeprecationWarning, stacklevel=3)
        return given

    @classmethod
    def _saved_params(cls, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a file; older ones have a keyword for each setting."""
        params = tuples(without_removed(params))
        names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        found = {name: value for name, value in params.items() if name in names}
        defaults = estimator_defaults(cls.task)
        for name, item in estimator_settings(cls.task).items():
            if item.group and name in params and params[name] != defaults[name]:
                found[item.group] = {**(found.get(item.group) or {}), name: params[name]}
        return found

    @classmethod
    def _model_from_dict(cls, config: Mapping[str, Any]) -> nn.Module:
        model: nn.Module = cls.model_class(cls.config_class.from_dict(config))
        return model

    def _state(self) -> dict[str, Any]:
        model = self.model_.config.to_dict()
        return {"model": model, "history": self.history_, "best_epoch": self.best_epoch_}

    def _weights(self) -> Mapping[str, Tensor]:
        return finite_weights(self.model_)

    def _restore(self, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        model = self._network_from(content["model"], weights)
        self._remember(model, content["history"], content["best_epoch"])

    @classmethod
    def _network_from(cls, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
        """Return a network of a file, in evaluation mode."""
        with undisturbed_random_state(), BuildLimit(weights, settings.get("num_layers") or 0):
            model = cls._model_from_dict(settings)
        model.load_state_dict(dict(weights))
        return model.eval()

    def _start(self) -> int:
        """Refuse bad settings, and return the seed; called once, at the start of `fit`."""
        EstimatorConfig.from_dict(_of(EstimatorConfig, self.settings()))
        check_logger(self.settings()["logger"], self.run_dir)
        if self.random_state is None and num_processes(self._train_config(0, 1)) > 1:
            raise ValueError(
                "random_state must be a number when several processes train together, so that "
                "all of them split the series in the same way"
            )
        return draw_seed(self.random_state)

    def _train_config(self, seed: int, num_series: int) -> TrainConfig:
        settings = self.settings()
        length = training_length(
            num_series,
            *(settings[name] for name in Length._fields),
            largest_batch=self.largest_batch,
        )
        others = {"seed": seed, "verbose": self.verbose}
        return TrainConfig.from_dict({**_of(TrainConfig, settings), **length._asdict(), **others})

    def _model_config(self, **of_data: Any) -> Any:
        """Return the configuration of the model: the settings, and what the data decide."""
        return self.config_class(**_of(self.config_class, self.settings()), **of_data)

    @property
    def _prediction_batch(self) -> int:
        return LARGEST_BATCH if isinstance(self.batch_size, str) else self.batch_size

    def _train(
        self,
        model: nn.Module,
        task: Task,
        train: BatchSource,
        validation: BatchSource | None,
        config: TrainConfig,
    ) -> None:
        """Train, and remember the result, even if Ctrl-C ends training early."""
        folder = self.run_dir
        can_resume = self.resume and folder is not None and (Path(folder) / CHECKPOINT).is_file()
        settings, known = self.settings(), estimator_settings(self.task)
        of_training = {*_of(TrainConfig, settings), "random_state"}
        decisive = [n for n in settings if n not in of_training and not known[n].is_free]
        others = {name: plain(settings[name]) for name in decisive}
        # A switch that is left to the model is as the model has it.
        open_switches = [n for n in decisive if settings[n] is None and known[n].kind == "switch"]
        others |= {name: getattr(model.config, name) for name in open_switches}
        self.monitor_ = task.resolve_monitor(config.monitor)
        paths: dict[str, Any] = {"run_dir": folder, "resume": folder if can_resume else None}
        try:
            result = fit(model, task, train, validation, config, settings=others, **paths)
        except TrainingInterrupted as interruption:
            result = interruption.result
            self._remember(result.model, result.history, result.best_epoch)
            raise
        self._remember(result.model, result.history, result.best_epoch)

    def _remember(self, model: Any, history: list[dict[str, float]], best_epoch: int) -> None:
        self.model_, self.history_, self.best_epoch_ = model, history, best_epoch
        self.n_iter_ = len(history)


def finite_weights(network: nn.Module) -> Mapping[str, Tensor]:
    """Return the weights of a network; infinity and NaN are refused."""
    weights: Mapping[str, Tensor] = network.state_dict()
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"the model is not written: {name} holds infinity or NaN")
    return weights


def draw_seed(random_state: Any) -> int:
    """Return a seed that a seed, a NumPy `RandomState` or None decides."""
    check_random_state = need("sklearn.utils", extra="train").check_random_state
    return int(check_random_state(random_state).randint(2**31 - 1))


def _of(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are fields of a configuration."""
    names = {item.name for item in fields(config) if item.default is not MISSING}
    return {name: value for name, value in settings.items() if name in names}


def load(path: str | Path) -> SavedEstimator:
    """Return the estimator in a file, whichever it is; nothing in the file is executed.

    Raises:
        ModelFileError: If it is not a model file, is damaged, or needs a newer version.
    """
    saved = load_model(path)
    kind = saved.content.get("estimator")
    if kind not in ESTIMATORS:
        raise ModelFileError(
            f"{path} holds {kind!r}, which is none of {', '.join(ESTIMATORS)}; a newer version of "
            "osciformer may know it"
        )
    return ESTIMATORS[kind]._from_file(path, saved)


#: The former name of `load`.
load_estimator = load
