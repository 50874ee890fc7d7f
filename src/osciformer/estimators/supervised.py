"""Estimators with one label per series: classes, or real targets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from osciformer._processes import is_first_process
from osciformer._types import Float, Tensor
from osciformer.config import SERIES_BACKBONE_DEFAULTS, SeriesModelConfig, estimator_defaults
from osciformer.data.inputs import SeriesData, chunks
from osciformer.estimators.base import estimator, finite_weights
from osciformer.estimators.export import (
    MeanNetwork,
    Probabilities,
    ServedNetwork,
    Targets,
    write_program,
)
from osciformer.estimators.joining import (
    class_log_likelihood,
    mix,
    target_log_likelihood,
    weigh_network,
)
from osciformer.estimators.labels import (
    SeriesClassifier,
    SeriesRegressor,
    read_labels,
    weigh_classes,
)
from osciformer.estimators.resonator import (
    ResonatorClassifier,
    ResonatorEstimator,
    ResonatorRegressor,
)
from osciformer.estimators.series import Held, Numbered, SeriesEstimator, Training
from osciformer.models import SeriesModel
from osciformer.resonators.linear import LeftOut
from osciformer.train.fitting import TrainingInterrupted, num_processes
from osciformer.train.fitting import fit as train_network
from osciformer.train.tasks import Classification, Regression, Task

# Fewer of the rarer class than this, and AUROC is too noisy to pick an epoch by.
FEWEST_FOR_AUROC = 10
_DEFAULTS = estimator_defaults("classification")
# Before the names of tensors in a file: those of resonators, and of networks after the first.
_RESONATOR, _NETWORK = "resonator/", "network-{}/"


@estimator
class SupervisedEstimator(SeriesEstimator):
    """Estimators that map a whole series to a class or to numbers.

    A network, and beside it a `ResonatorClassifier` or `ResonatorRegressor`, fitted in seconds to
    all training series; outputs (log-probabilities, or targets) are a weighted mean of both. The
    network's weight is its posterior mean given the validation series, by a prior of which three
    quarters are on 0, so that few of them leave it near the resonators and many find the best
    mixture. What resonators say of a validation series of X is what the model of all the others
    says. Without any the weight is that of the prior, 0.14.

    Args:
        resonators: Whether to fit them; False is the network alone, of the same bits.
        ensemble_size: Number of networks, trained one after the other from seeds that follow each
            other and validated with the same series; the network's output is then the mean of
            theirs. The first is the same whatever the size, and it alone has a checkpoint: a
            continued run trains the others again.
        model_options: Further settings of the model, by name, besides those of `SeriesEstimator`:
            `pool`, `skip` and `statistics`, see `SeriesModelConfig`. For the backbone `osciformer`,
            `backbone_options` start from `SERIES_BACKBONE_DEFAULTS` unless they hold a preset.

    Attributes:
        model_: The network, the first of an ensemble; so with `history_` and `best_epoch_`.
        networks_: All networks.
        histories_: The history of each.
        resonator_: The fitted `ResonatorClassifier` or `ResonatorRegressor`, or None.
        network_weight_: Weight of the network, from 0 to 1; the rest is that of the resonators.
    """

    resonators: bool = _DEFAULTS["resonators"]
    ensemble_size: int = _DEFAULTS["ensemble_size"]
    dim: int = _DEFAULTS["dim"]
    num_heads: int = _DEFAULTS["num_heads"]
    dropout: float = _DEFAULTS["dropout"]
    learning_rate: float = _DEFAULTS["learning_rate"]

    model_class: ClassVar[Any] = SeriesModel
    config_class: ClassVar[Any] = SeriesModelConfig
    resonator_class: ClassVar[Any]

    # `SeriesClassifier` and `SeriesRegressor` have them.
    _encode: ClassVar[Callable[..., np.ndarray]]
    _task_state: ClassVar[Callable[..., dict[str, Any]]]
    _restore_task: ClassVar[Callable[..., None]]

    def _start(self) -> int:
        seed = super()._start()
        if self.ensemble_size > 1 and num_processes(self._train_config(seed, 1)) > 1:
            raise ValueError(
                "ensemble_size must be 1 when several processes train together; train the networks "
                "of an ensemble in one process"
            )
        return seed

    def _train_more(self, begin: Callable[[int], Training]) -> None:
        for number in range(1, self.ensemble_size):
            if self.verbose:
                told = f"network {number + 1} of {self.ensemble_size}"
                print(told, file=sys.stderr, flush=True)
            result = train_network(*begin(number))
            self.networks_.append(result.model)
            self.histories_.append(result.history)

    def _remember(self, model: Any, history: list[dict[str, float]], best_epoch: int) -> None:
        super()._remember(model, history, best_epoch)
        self.networks_, self.histories_ = [model], [history]

    def _model_config(self, **of_data: Any) -> Any:
        config = super()._model_config(output_dim=self._output_dim, **of_data)
        given = config.backbone_options
        # They become part of the model's configuration, so that a saved model keeps its own.
        is_ours = config.backbone == "osciformer" and "preset" not in given
        if is_ours:
            config = replace(config, backbone_options={**SERIES_BACKBONE_DEFAULTS, **given})
        return config if config.variables is not None else replace(config, variables=is_ours)

    def _numbers(self, data: SeriesData, y: Any) -> np.ndarray:
        found: np.ndarray = self._encode(read_labels(data, y))
        return found

    @contextmanager
    def _accompanied(
        self, whole: Numbered, weight: np.ndarray | None, held: Held, seed: int
    ) -> Iterator[None]:
        """Fit the resonators before training, and weigh the network after it, or after Ctrl-C."""
        self.resonator_: Any = None
        self.network_weight_ = 1.0
        if not self.resonators:
            yield
            return
        verbose = self.verbose if is_first_process() else 0
        resonator = self._make_resonator(random_state=seed, verbose=verbose)
        resonator._restore_task(self._task_state())
        assert whole.numbers is not None
        left_out = resonator._fit(whole.data, whole.numbers, weight)
        try:
            yield
        except TrainingInterrupted:
            self._join(resonator, left_out, whole, weight, held)
            raise
        self._join(resonator, left_out, whole, weight, held)

    def _join(
        self,
        resonator: ResonatorEstimator,
        left_out: LeftOut,
        whole: Numbered,
        weight: np.ndarray | None,
        held: Held,
    ) -> None:
        """Weigh the network by the validation series, and remember both."""
        weight = np.ones(len(whole.data)) if weight is None else weight
        if held.others is not None:
            series, outputs = held.others, resonator._outputs(held.others.data)
            weight = np.ones(len(outputs))
        else:
            # Of very many series a sample alone is left out in turn.
            places = np.intersect1d(held.places, left_out.places)
            outputs = left_out.outputs[np.searchsorted(left_out.places, places)]
            series, weight = whole.part(places), weight[places]
        network = self._network_outputs(series.data) if len(outputs) else outputs
        likelihood = self._likelihood(series.numbers, whole.numbers, weight)
        self.network_weight_ = weigh_network(network, outputs, likelihood)
        self.resonator_ = resonator
        if resonator.verbose:
            weights = f"network {self.network_weight_:.2f}, resonators "
            weights += f"{1.0 - self.network_weight_:.2f}, by {len(outputs)} validation series"
            print(f"joined with the weights {weights}", file=sys.stderr, flush=True)

    def _make_resonator(self, **settings: Any) -> ResonatorEstimator:
        raise NotImplementedError

    def _likelihood(self, numbers: Any, of_all: Any, weight: Float[np.ndarray, "n"]) -> Any:
        """Return what gives the log-likelihood of weighted numbers for outputs [n, O]."""
        raise NotImplementedError

    @classmethod
    def _saved_params(cls, params: Mapping[str, Any]) -> dict[str, Any]:
        # Older versions had networks alone.
        return {"resonators": False, **super()._saved_params(params)}

    def _state(self) -> dict[str, Any]:
        state = {**super()._state(), "task": self._task_state()}
        if len(self.networks_) > 1:
            state["more_histories"] = self.histories_[1:]
        if self.resonator_ is None:
            return state
        joined = {"resonator": self.resonator_._content(), "network_weight": self.network_weight_}
        return {**state, **joined}

    def _weights(self) -> Mapping[str, Tensor]:
        parts = {
            _NETWORK.format(number): finite_weights(network)
            for number, network in enumerate(self.networks_[1:], start=2)
        }
        if self.resonator_ is not None:
            parts[_RESONATOR] = self.resonator_._weights()
        named = {mark + name: x for mark, part in parts.items() for name, x in part.items()}
        return {**super()._weights(), **named}

    def _restore(self, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        def of(mark: str) -> dict[str, Tensor]:
            marked = (name for name in weights if name.startswith(mark))
            return {name.removeprefix(mark): weights[name] for name in marked}

        histories = content.get("more_histories", [])
        marks = [_NETWORK.format(number) for number in range(2, 2 + len(histories))]
        parts = (*marks, _RESONATOR)
        super()._restore(content, {n: x for n, x in weights.items() if not n.startswith(parts)})
        self.networks_ += [self._network_from(content["model"], of(mark)) for mark in marks]
        self.histories_ += histories
        self._restore_task(content["task"])
        self.resonator_, self.network_weight_ = None, content.get("network_weight", 1.0)
        if "resonator" in content:
            fitted = self.resonator_class._from_content(content["resonator"], of(_RESONATOR))
            self.resonator_ = fitted

    def export(self, path: str | Path, *, length: int) -> Path:
        """Write the network as a program of `torch.export`, and return its path.

        After `import osciformer.ops`, which has the operators and needs no package of training,
        `torch.export.load(path).module()` takes times [B, N] float64, values [B, N, F] float32 in
        the units of the data (NaN is missing), a mask [B, N], True where there is a row, and
        static features [B, S] if the model has any. It returns probabilities [B, C] or targets
        [B, K]. B is any number; N is `length`: pad shorter series, and keep the last rows of
        longer ones. It is compared with the network before it is written.

        Args:
            path: The file, ending in `.pt2`.
            length: Number of rows N.
        """
        self._check_fitted()
        if self.resonator_ is not None and self.network_weight_ < 1.0:
            raise ValueError(
                f"this model is joined: the network has the weight {self.network_weight_:g}, and "
                "its resonators, which are not a torch module, have the rest. Fit with "
                "resonators=False to export the network alone"
            )
        if length < 1:
            raise ValueError(f"length must be at least 1; got {length}")
        network = self.model_ if len(self.networks_) == 1 else MeanNetwork(self.networks_)
        served = ServedNetwork(network, self.transform_, self._last_module())
        return write_program(path, served, length, self.n_features_in_)

    def _last_module(self) -> nn.Module:
        """Return what turns outputs of the network into predictions."""
        raise NotImplementedError

    def _outputs(self, data: SeriesData) -> Float[np.ndarray, "n O"]:
        """Return what both say about each series, or one of them if the other has no weight."""
        if self.resonator_ is None or self.network_weight_ == 1.0:
            return self._network_outputs(data)
        found: np.ndarray = self.resonator_._outputs(data)
        if self.network_weight_ == 0.0:
            return found
        return mix(self._network_outputs(data), found, self.network_weight_)

    def _network_outputs(self, data: SeriesData) -> Float[np.ndarray, "n O"]:
        """Return what the network says about each series, or the mean of several networks."""
        parts = []
        for chunk in chunks(data):
            settings = {"batch_size": self._prediction_batch, "shuffle": False}
            source = self._source(Numbered(chunk), **settings)
            total = np.zeros((len(chunk), self.model_.config.output_dim), dtype=np.float32)
            for network in self.networks_:
                for batch, output in self._outputs_of(source, network):
                    total[batch.index.numpy()] += output.numpy()
            parts.append(total / np.float32(len(self.networks_)))
        return np.concatenate(parts)


@estimator
class OsciFormerClassifier(SeriesClassifier, SupervisedEstimator):
    """Classifier of irregularly sampled series, in scikit-learn's manner.

    X is an `IrregularSeries`, a `ParquetSeries` (read from disk in each epoch), a data frame with a
    `layout`, or a list of `(times, values)` pairs. Besides those below it has the keywords and
    attributes of `TrainedEstimator`, `SeriesEstimator` and `SupervisedEstimator`.

    Args:
        class_weight: None, `balanced`, or a dict from label to weight.
        train_options: Further settings of training, by name: `label_smoothing`; `monitor` (`loss`,
            `accuracy`, `log_loss`, `auroc`, `auprc`; `auto` is `auroc` if there are two classes
            with at least 10 validation series each, and `loss` otherwise), and those above.

    Attributes:
        classes_: The classes, sorted.

    Example:
        >>> from osciformer.data import IrregularSeries
        >>> times = [[0.0, 1.0 + k, 3.0 + k] for k in range(8)]
        >>> values = [[[k % 2], [1.0], [k % 2]] for k in range(8)]
        >>> X = IrregularSeries.from_arrays(times, values, labels=["no", "yes"] * 4)
        >>> model = OsciFormerClassifier(dim=8, num_heads=1, max_epochs=1, random_state=0).fit(X)
        >>> model.classes_, model.predict_proba(X).shape
        (array(['no', 'yes'], dtype='<U3'), (8, 2))
    """

    class_weight: str | Mapping[Any, float] | None = None

    task: ClassVar[str] = "classification"
    resonator_class: ClassVar[Any] = ResonatorClassifier
    _regressor: ClassVar[str] = "OsciFormerRegressor"

    @property
    def _output_dim(self) -> int:
        return len(self.classes_)

    def _strata(self, whole: Numbered) -> Any:
        return whole.numbers

    def _last_module(self) -> nn.Module:
        return Probabilities(self.temperature_)

    def _make_resonator(self, **settings: Any) -> ResonatorEstimator:
        return ResonatorClassifier(class_weight=self.class_weight, **settings)

    def _likelihood(self, numbers: Any, of_all: Any, weight: Float[np.ndarray, "n"]) -> Any:
        by_class = weigh_classes(self.class_weight, self.classes_, of_all)
        if by_class is not None:
            weight = weight * np.array(by_class)[numbers]
        return partial(class_log_likelihood, classes=numbers, weight=weight)

    def _make_task(self, numbers: Any, watched: Any) -> Task:
        counts = np.bincount(() if watched is None else watched, minlength=len(self.classes_))
        is_ranked = len(counts) == 2 and counts.min() >= FEWEST_FOR_AUROC
        return Classification(
            num_classes=len(self.classes_),
            class_weight=weigh_classes(self.class_weight, self.classes_, numbers),
            label_smoothing=self.settings()["label_smoothing"],
            monitor="auroc" if is_ranked else "loss",
        )


@estimator
class OsciFormerRegressor(SeriesRegressor, SupervisedEstimator):
    """Regressor of irregularly sampled series, in scikit-learn's manner.

    X is what `OsciFormerClassifier` takes; y is [n], or [n, K] for several targets. Besides those
    below it has the keywords and attributes of `TrainedEstimator`, `SeriesEstimator` and
    `SupervisedEstimator`.

    Args:
        criterion: `huber` (linear for errors above one standard deviation of the target) or `mse`.
        train_options: Further settings of training, by name: `monitor` (`loss`, which is `auto`,
            `rmse` or `mae`), and those above.

    Attributes:
        target_center_: Mean of the targets [K].
        target_scale_: Their standard deviation [K].
    """

    criterion: str = "huber"

    task: ClassVar[str] = "regression"
    resonator_class: ClassVar[Any] = ResonatorRegressor
    _classifier: ClassVar[str] = "OsciFormerClassifier"

    @property
    def _output_dim(self) -> int:
        return len(self.target_scale_)

    def _last_module(self) -> nn.Module:
        return Targets(self.target_center_, self.target_scale_)

    def _make_resonator(self, **settings: Any) -> ResonatorEstimator:
        return ResonatorRegressor(**settings)

    def _likelihood(self, numbers: Any, of_all: Any, weight: Float[np.ndarray, "n"]) -> Any:
        return partial(target_log_likelihood, targets=numbers, weight=weight)

    def _make_task(self, numbers: Any, watched: Any) -> Task:
        return Regression(scale=self.target_scale_.tolist(), criterion=self.criterion)
