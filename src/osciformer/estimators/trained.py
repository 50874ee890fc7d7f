"""What every estimator shares: settings of training, the training itself, files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch import nn

from osciformer._optional import need
from osciformer.data.tables import Layout
from osciformer.estimators.automatic import LARGEST_BATCH, Auto, training_length
from osciformer.saving import ModelFileError, load_model, save_model
from osciformer.train.config import TrainConfig
from osciformer.train.fitting import FitResult, TrainingInterrupted, fit, num_processes
from osciformer.train.quiet import undisturbed_random_state
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


@dataclass(eq=False, repr=False, kw_only=True)
class TrainedEstimator(BaseEstimator):
    """Settings of training; the constructor stores them and does nothing else.

    Args:
        learning_rate: Highest learning rate.
        weight_decay: Weight decay.
        batch_size: Series per step, or `auto`: about an eighth of the series, 8 to 64.
        max_epochs: Most passes over the training series, or `auto`: 15, or more (up to 200) where
            these are fewer than 600 steps.
        warmup_fraction: Part of the steps in which the learning rate rises.
        gradient_clip: Bound on the norm of the gradient, or None.
        weight_averaging: Decay of an exponential average of the weights, which is what is validated
            and kept; from 0, for none, to below 1.
        validation_fraction: Part of the training series that is kept for early stopping, unless
            `fit` is given validation data; 0 for none, and then the last epoch's weights stay.
        keep_latest: Take for the best epoch the latest one whose validation metric is worse than
            the best by no more than its standard error, where that is known.
        patience: Epochs without improvement after which training stops; None for no stopping,
            `auto` for a quarter of `max_epochs`, at least 5.
        monitor: Validation metric that picks the best epoch, or `auto`.
        precision: `32-true`, `bf16-mixed` or `16-mixed`.
        accelerator: `auto`, `cpu` or `gpu`.
        devices: Processes on each machine.
        num_nodes: Number of machines.
        strategy: `auto`, `ddp` or `fsdp`.
        num_workers: Processes that prepare batches in the background.
        random_state: Seed, or a NumPy `RandomState`, or None. With a seed, training on a CPU gives
            the same weights each time, bit by bit.
        run_dir: Folder for history, logs and the checkpoint of a run; None writes nothing.
        resume: Go on from the checkpoint in `run_dir`, if there is one.
        verbose: 0 prints nothing, 1 shows a progress bar, 2 prints a line per epoch.

    Attributes:
        model_: The trained model.
        history_: One dict per epoch.
        best_epoch_: Epoch whose weights the model has.
        n_iter_: Number of epochs.
    """

    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    batch_size: int | Auto = "auto"
    max_epochs: int | Auto = "auto"
    warmup_fraction: float = 0.1
    gradient_clip: float | None = 1.0
    weight_averaging: float = 0.0
    validation_fraction: float = 0.1
    keep_latest: bool = False
    patience: int | Auto | None = "auto"
    monitor: str = "auto"
    precision: str = "32-true"
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"
    num_workers: int = 0
    random_state: Any = None
    run_dir: str | Path | None = None
    resume: bool = False
    verbose: int = 0

    def save(self, path: str | Path) -> Path:
        """Write the fitted estimator to a file (safetensors and JSON) and return its path."""
        check_is_fitted(self, "model_")
        content = {
            "estimator": type(self).__name__,
            "params": {name: plain(value) for name, value in self.get_params(deep=False).items()},
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
                f"{path} holds {kind!r}, not {cls.__name__!r}; load_estimator of "
                "osciformer.estimators reads any of them"
            )
        try:
            return cls._from_content(saved.content, saved.weights)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelFileError(f"{path} does not describe a usable {kind}: {error}") from error

    @classmethod
    def _from_content(cls, content: Mapping[str, Any], weights: Mapping[str, Any]) -> Self:
        defaults = {item.name: item.default for item in fields(cls)}
        params = {name: v for name, v in content["params"].items() if name in defaults}
        for name, value in params.items():
            if isinstance(defaults[name], tuple) and value is not None:
                params[name] = tuple(value)  # JSON has lists only
        result = cls(**params)
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
    def _model_from_dict(cls, config: Mapping[str, Any]) -> nn.Module:
        """Return the untrained model of a configuration."""
        raise NotImplementedError

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

    def _check_validation_fraction(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be from 0 to below 1; got {self.validation_fraction}"
            )

    def _draw_seed(self) -> int:
        if self.random_state is None and num_processes(self._train_config(0, 1)) > 1:
            raise ValueError(
                "random_state must be a number when several processes train together, so that "
                "all of them split the series in the same way"
            )
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _train_config(self, seed: int, num_series: int) -> TrainConfig:
        names = set(TrainConfig.__dataclass_fields__) & set(self._get_param_names())
        length = training_length(num_series, self.batch_size, self.max_epochs, self.patience)
        settings = {name: getattr(self, name) for name in names} | length._asdict()
        return TrainConfig.from_dict(settings | {"seed": seed})

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
        if resume is not None and not (Path(resume) / "last.ckpt").is_file():
            resume = None
        try:
            result = fit(
                model,
                task,
                train,
                validation,
                config,
                run_dir=self.run_dir,
                resume=resume,
                settings=self._settings_of_result(),
            )
        except TrainingInterrupted as interruption:
            self._remember_result(interruption.result)
            raise
        self._remember_result(result)

    def _settings_of_result(self) -> dict[str, Any]:
        """Return what decides the result besides `TrainConfig`, which is compared on its own."""
        others = {*TrainConfig.__dataclass_fields__, "layout", "run_dir", "resume", "random_state"}
        params = self.get_params(deep=False)
        return {name: plain(value) for name, value in params.items() if name not in others}

    def _remember_result(self, result: FitResult) -> None:
        self.model_: Any = result.model
        self.history_, self.best_epoch_ = result.history, result.best_epoch
        self.n_iter_ = len(result.history)


def plain(value: Any) -> Any:
    """Return a parameter as JSON has it.

    Example:
        >>> plain({"sizes": (1, np.int64(2)), "where": Path("a")})
        {'sizes': [1, 2], 'where': 'a'}
    """
    if isinstance(value, Layout):
        return value.to_dict()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.random.RandomState):
        return None
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
