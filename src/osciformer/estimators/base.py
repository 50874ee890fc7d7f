"""What every estimator shares: settings, training, and files."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

import numpy as np
from torch import nn

from osciformer._optional import need
from osciformer._text import did_you_mean
from osciformer._types import Int
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
from osciformer.saving import ModelFile, ModelFileError, load_model, save_model
from osciformer.train.fitting import (
    FitResult,
    TrainingInterrupted,
    fit,
    num_processes,
    undisturbed_random_state,
)
from osciformer.train.run_folder import CHECKPOINT
from osciformer.train.sources import BatchSource
from osciformer.train.tasks import Task

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted
else:
    BaseEstimator = need("sklearn.base", extra="train").BaseEstimator
    check_random_state = need("sklearn.utils", extra="train").check_random_state
    check_is_fitted = need("sklearn.utils.validation", extra="train").check_is_fitted

#: Estimators by the names that their files have.
ESTIMATORS: dict[str, type[TrainedEstimator]] = {}
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
) -> Length:
    """Return the settings with numbers in place of `auto`.

    Batches hold about an eighth of the series, 8 to 64. There are 15 passes, or as many (at most
    200) as give 600 steps. Training stops after a quarter of them without improvement, at least 5.

    Example:
        >>> training_length(3600)
        Length(batch_size=64, max_epochs=15, patience=5)
        >>> training_length(40)
        Length(batch_size=8, max_epochs=120, patience=30)
    """
    given = {"batch_size": batch_size, "max_epochs": max_epochs, "patience": patience}
    for name, value in given.items():
        if isinstance(value, str) and value != "auto":
            raise ValueError(f"{name} must be a number or 'auto'; got {value!r}")
    eighth = max(1, num_series // 8)
    usual = min(LARGEST_BATCH, max(_SMALLEST_BATCH, 1 << (eighth.bit_length() - 1)))
    size = usual if isinstance(batch_size, str) else batch_size
    steps = max(1, -(-num_series // max(1, size)))
    enough = min(_MOST_EPOCHS, max(_FEWEST_EPOCHS, -(-_STEPS // steps)))
    epochs = enough if isinstance(max_epochs, str) else max_epochs
    quarter = max(_LEAST_PATIENCE, epochs // 4)
    return Length(size, epochs, quarter if isinstance(patience, str) else patience)


def split(
    classes: Int[np.ndarray, "n"], fraction: float, generator: np.random.Generator
) -> tuple[Int[np.ndarray, "t"], Int[np.ndarray, "v"]]:
    """Return rising positions of training and of validation series, class by class.

    Each class gives `round(fraction * n)` of its n members to validation, but keeps one for
    training. scikit-learn's splits would draw others, and continued runs must draw the same.

    Example:
        >>> classes = np.array([0] * 8 + [1] * 4)
        >>> train, validation = split(classes, 0.25, np.random.default_rng(0))
        >>> np.bincount(classes[validation])
        array([2, 1])
    """
    is_validation = np.zeros(len(classes), dtype=bool)
    for number in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == number))
        size = min(round(fraction * len(members)), len(members) - 1)
        is_validation[members[:size]] = True
    return np.flatnonzero(~is_validation), np.flatnonzero(is_validation)


@dataclass_transform(kw_only_default=True)
def estimator(cls: _Class) -> _Class:
    """Make an estimator of a class: a dataclass of keywords that also takes deprecated ones.

    scikit-learn sees the keywords of the dataclass. Settings that were keywords once are moved
    into `model_options` or `train_options`, with a warning that says so.
    """
    dataclass(eq=False, repr=False, kw_only=True)(cls)  # it changes and returns the same class
    init: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, **given: Any) -> None:
        init(self, **cls._move_deprecated(given))  # type: ignore[attr-defined]

    cls.__init__ = __init__  # type: ignore[misc]
    if hasattr(cls, "task"):
        ESTIMATORS[cls.__name__] = cls
    return cls


@estimator
class TrainedEstimator(BaseEstimator):
    """Keywords that all estimators have; the constructor stores them and does nothing else.

    Settings without a keyword of their own are given by name in `model_options` and
    `train_options`. `settings()` lists all of them with the values that hold;
    `set_params(train_options__weight_decay=0.1)` sets one.

    Args:
        learning_rate: Highest learning rate.
        batch_size: Series per step, or `auto`: about an eighth of the series, 8 to 64.
        max_epochs: Most passes over the training series, or `auto`: 15, or more (up to 200) where
            these are fewer than 600 steps.
        validation_fraction: Part of the training series that is kept for early stopping, unless
            `fit` is given validation data; 0 for none, and then the last epoch's weights stay.
        accelerator: `auto`, `cpu` or `gpu`.
        random_state: Seed, or a NumPy `RandomState`, or None. With a seed, training on a CPU gives
            the same weights each time, bit by bit.
        run_dir: Folder for history, logs and the checkpoint of a run; None writes nothing.
        resume: Go on from the checkpoint in `run_dir`, if there is one.
        verbose: 0 prints nothing, 1 shows a progress bar, 2 prints a line per epoch.
        model_options: Further settings of the model, by name.
        train_options: Further settings of training, by name: `weight_decay`, `warmup_fraction`,
            `gradient_clip`, `weight_averaging`, `patience` (epochs without improvement, `auto` or
            None), `monitor`, `precision`, `devices`, `num_nodes`, `strategy`, `num_workers`, see
            `TrainConfig`; and those of the task.

    Attributes:
        model_: The trained model.
        history_: One dict per epoch.
        best_epoch_: Epoch whose weights the model has.
        n_iter_: Number of epochs.
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

    task: ClassVar[str]
    model_class: ClassVar[Any]
    config_class: ClassVar[Any]

    def settings(self) -> dict[str, Any]:
        """Return every setting by name with the value that holds: given, or the default.

        Raises:
            ValueError: If an option has an unknown name; near matches are named.

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
                hint = did_you_mean(name, [*names, *known]) or f"it has {', '.join(sorted(names))}"
                raise TypeError(f"{cls.__name__} has no parameter {name!r}; {hint}")
            warnings.warn(advice, DeprecationWarning, stacklevel=3)
        return given

    def save(self, path: str | Path) -> Path:
        """Write the fitted estimator to a file (safetensors and JSON) and return its path."""
        self._check_fitted()
        params = self.get_params(deep=False)
        if not isinstance(self.random_state, int | np.integer):
            params["random_state"] = None
        content = {
            "estimator": type(self).__name__,
            "params": {name: plain(value) for name, value in params.items()},
            "model": self.model_.config.to_dict(),
            **self._data_state(),
            "history": self.history_,
            "best_epoch": self.best_epoch_,
            "task": self._task_state(),
        }
        return save_model(path, content, self.model_.state_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the estimator that `save` wrote; nothing in the file is executed.

        Raises:
            ModelFileError: If the file is not one of this estimator's, or is damaged.
        """
        saved = load_model(path)
        kind = saved.content.get("estimator")
        if kind != cls.__name__:
            raise ModelFileError(
                f"{path} holds {kind!r}, not {cls.__name__!r}; osciformer.estimators.load reads "
                "any of them"
            )
        return cls._from_file(path, saved)

    @classmethod
    def _from_file(cls, path: str | Path, saved: ModelFile) -> Self:
        try:
            return cls._from_content(saved.content, saved.weights)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelFileError(
                f"{path} does not describe a usable {cls.__name__}: {error}"
            ) from error

    @classmethod
    def _from_content(cls, content: Mapping[str, Any], weights: Mapping[str, Any]) -> Self:
        result = cls(**cls._saved_params(content["params"]))
        with undisturbed_random_state():
            result.model_ = cls._model_from_dict(content["model"])
        result.model_.load_state_dict(dict(weights))
        result.model_.eval()
        result.history_, result.best_epoch_ = content["history"], content["best_epoch"]
        result.n_iter_ = len(result.history_)
        result._restore_data(content)
        result._restore_task(content["task"])
        return result

    @classmethod
    def _saved_params(cls, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a file; older ones have a keyword for each setting."""
        params = without_removed(params)
        own = {item.name: item.default for item in fields(cls)}  # type: ignore[arg-type]
        found = {name: value for name, value in params.items() if name in own}
        defaults = estimator_defaults(cls.task)
        for name, item in estimator_settings(cls.task).items():
            if item.group and name in params and tuples(params[name]) != defaults[name]:
                found[item.group] = {**(found.get(item.group) or {}), name: params[name]}
        for name in found:  # JSON has lists only
            if name in OPTIONS and found[name] is not None:
                found[name] = {key: tuples(value) for key, value in found[name].items()}
            elif isinstance(own[name], tuple):
                found[name] = tuples(found[name])
        return found

    @classmethod
    def _model_from_dict(cls, config: Mapping[str, Any]) -> nn.Module:
        """Return the untrained model of a configuration."""
        model: nn.Module = cls.model_class(cls.config_class.from_dict(config))
        return model

    def _data_state(self) -> dict[str, Any]:
        """Return what was learned about the data, as plain values by name."""
        raise NotImplementedError

    def _restore_data(self, content: Mapping[str, Any]) -> None:
        """Set what `_data_state` returned, which is a part of the content."""
        raise NotImplementedError

    def _task_state(self) -> dict[str, Any]:
        """Return what was learned about the task, as plain values."""
        raise NotImplementedError

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        """Set what `_task_state` returned."""
        raise NotImplementedError

    def _check_fitted(self) -> None:
        check_is_fitted(
            self,
            "model_",
            msg="this %(name)s is not fitted; call fit, or load one that was saved",
        )

    def _start(self) -> int:
        """Refuse bad settings, and return the seed; called once, at the start of `fit`."""
        settings = self.settings()
        EstimatorConfig.from_dict(_of(EstimatorConfig, settings))
        if self.random_state is None and num_processes(self._train_config(0, 1)) > 1:
            raise ValueError(
                "random_state must be a number when several processes train together, so that "
                "all of them split the series in the same way"
            )
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _train_config(self, seed: int, num_series: int) -> TrainConfig:
        settings = self.settings()
        length = training_length(num_series, *(settings[name] for name in Length._fields))
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
        resume = self.run_dir if self.resume else None
        if resume is not None and not (Path(resume) / CHECKPOINT).is_file():
            resume = None
        of_training = {*_of(TrainConfig, self.settings()), "random_state"}
        others = {n: plain(v) for n, v in self.settings().items() if n not in of_training}
        try:
            result = fit(
                model,
                task,
                train,
                validation,
                config,
                run_dir=self.run_dir,
                resume=resume,
                settings=others,
            )
        except TrainingInterrupted as interruption:
            self._remember(interruption.result)
            raise
        self._remember(result)

    def _remember(self, result: FitResult) -> None:
        self.model_: Any = result.model
        self.history_, self.best_epoch_ = result.history, result.best_epoch
        self.n_iter_ = len(result.history)


def _of(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are fields of a configuration."""
    names = {item.name for item in fields(config) if item.default is not MISSING}
    return {name: value for name, value in settings.items() if name in names}


def load(path: str | Path) -> TrainedEstimator:
    """Return the estimator in a file, whichever it is; nothing in the file is executed.

    Raises:
        FileNotFoundError: If there is no such file.
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


load_estimator = load
