"""What the estimators of series share: reading X, scaling, columns, and training on series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from osciformer._text import name_some
from osciformer._types import Float, Int, Tensor
from osciformer.config import TaskConfig
from osciformer.data.batches import Batch, collate
from osciformer.data.parquet_series import ParquetSeries
from osciformer.data.series import IrregularSeries, TimeAxis, concatenate
from osciformer.data.tables import Layout, as_table, from_frame
from osciformer.data.transforms import SeriesTransform
from osciformer.estimators.base import TrainedEstimator, estimator
from osciformer.train.fitting import choose_device, predict, undisturbed_random_state
from osciformer.train.sources import Draw, SeriesSource, StreamSource
from osciformer.train.tasks import Task

SeriesData = IrregularSeries | ParquetSeries
# Series from which the time scale is learned.
SAMPLE_SIZE = 1000


class Numbered(NamedTuple):
    """Series, and their numeric targets if the task has any."""

    data: SeriesData
    numbers: np.ndarray | None = None


def chunks(data: SeriesData) -> Iterator[IrregularSeries]:
    """Yield the series, in order, a bounded part at a time if they are on disk."""
    if isinstance(data, ParquetSeries):
        yield from data.chunks()
    else:
        yield data


def labels_of(data: SeriesData) -> np.ndarray | None:
    """Return the labels that the data themselves have, or None."""
    if isinstance(data, ParquetSeries):
        return data.labels() if data.layout.labels else None
    return data.labels


def as_series(
    X: Any,
    layout: Layout | Mapping[str, Any] | None = None,
    feature_names: Sequence[str] | None = None,
) -> SeriesData:
    """Return X, also a data frame or a list of `(times [N], values [N, F])`, as series.

    Labels may be absent from a frame. Without `feature_names` all that the layout leaves are read.

    Example:
        >>> as_series([([0.0, 1.0], [[1.0], [2.0]]), ([0.5], [[3.0]])])
        IrregularSeries(2 series, 3 observations of 1 feature, lengths 1 to 2)
    """
    if isinstance(X, IrregularSeries | ParquetSeries):
        found: SeriesData = X
    elif isinstance(X, list | tuple):
        times, values = split_pairs(X, "values", "series")
        found = IrregularSeries.from_arrays(times, values, empty="keep")
    elif is_table(X):
        found = _from_table(X, layout, feature_names)
    else:
        raise TypeError(
            "X must be an IrregularSeries, a ParquetSeries, a data frame with a layout, or a list "
            f"of (times, values) pairs; got {type(X).__name__}. A padded array can be read with "
            "osciformer.data.IrregularSeries.from_padded"
        )
    if len(found) == 0:
        raise ValueError("X holds no series; pass at least one")
    return found


def is_table(X: Any) -> bool:
    """Return whether X is a data frame, an Arrow table, or a mapping of columns."""
    return hasattr(X, "columns") or hasattr(X, "__arrow_c_stream__") or isinstance(X, Mapping)


def split_pairs(pairs: Sequence[Any], second: str, what: str) -> tuple[list[Any], list[Any]]:
    """Return the parts of a list of pairs `(times, second)`."""
    if len(pairs) == 0:
        raise ValueError(f"X holds no {what}; pass at least one")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            kind = type(pair).__name__
            raise TypeError(f"X must be a list of (times, {second}) pairs; item {number} is {kind}")
    return [first for first, _ in pairs], [last for _, last in pairs]


def _from_table(
    frame: Any, layout: Layout | Mapping[str, Any] | None, feature_names: Sequence[str] | None
) -> IrregularSeries:
    if layout is None:
        raise ValueError(
            "a data frame needs a layout that names its columns, such as "
            "layout=dict(id='patient', time='hour', label='outcome')"
        )
    if not isinstance(layout, Layout):
        layout = Layout(**layout)
    table = as_table(frame)
    if not set(layout.labels) <= set(table.column_names):
        layout = layout.replace(label=None)
    if feature_names is not None:
        layout = layout.replace(values=tuple(feature_names))
    return from_frame(table, layout)


def _check_same_names(what: str, wanted: Sequence[str], got: Sequence[str]) -> None:
    """Refuse features that are not those of training, in the same order."""
    wanted, got = list(wanted), list(got)
    if wanted == got:
        return
    absent = [name for name in wanted if name not in got]
    extra = [name for name in got if name not in wanted]
    problems = []
    if absent:
        problems.append(f"{name_some(absent)} are missing")
    if extra:
        problems.append(f"{name_some(extra)} were not there in fit")
    if not problems:
        problems.append(f"they come in another order, {name_some(got)}")
    raise ValueError(
        f"the model was fitted with {len(wanted)} {what}, {name_some(wanted)}; in X "
        f"{' and '.join(problems)}. Pass the same {what} in the same order; NaN stands for a "
        "missing value"
    )


def _check_same_times(wanted: TimeAxis, got: TimeAxis) -> None:
    """Refuse times in another unit than in training."""
    if (wanted.kind, wanted.unit, wanted.origin) != (got.kind, got.unit, got.origin):
        raise ValueError(
            f"the model was fitted with times of kind {wanted.kind!r}, unit {wanted.unit!r} and "
            f"origin {wanted.origin!r}; X has {got.kind!r}, {got.unit!r} and {got.origin!r}. Read "
            "X with the same layout as in fit"
        )


def check_weight(sample_weight: Any, count: int) -> Float[np.ndarray, "n"] | None:
    """Return sample weights as float32 [n]."""
    if sample_weight is None:
        return None
    weight = np.asarray(sample_weight, dtype=np.float32)
    if weight.shape != (count,):
        raise ValueError(
            f"sample_weight must be [{count}], one per series; got {list(weight.shape)}"
        )
    if not (np.isfinite(weight) & (weight >= 0)).all() or weight.sum() == 0:
        raise ValueError("sample_weight must be finite, not negative, and not all zero")
    return weight


def _learn_scales(
    data: SeriesData, transform: SeriesTransform, generator: np.random.Generator
) -> IrregularSeries:
    """Fit the transform in one pass, and return a sample of the series."""
    parts = []
    share = -(-SAMPLE_SIZE // (data.num_blocks if isinstance(data, ParquetSeries) else 1))
    for chunk in chunks(data):
        transform.partial_fit(chunk)
        chosen = generator.permutation(len(chunk))[:share]
        parts.append(chunk[np.sort(chosen)].replace(labels=None))
    assert transform.statistics is not None
    if transform.statistics.features.count.sum() == 0:
        raise ValueError(
            f"all values of all {len(data)} series are missing (NaN); check the value columns"
        )
    return concatenate(parts)


@estimator
class SeriesEstimator(TrainedEstimator):
    """Keywords that all estimators of series have, besides those of `TrainedEstimator`.

    Args:
        dim: Width of the model.
        num_layers: Number of encoder blocks.
        num_heads: Number of heads.
        dropout: Dropout of the model.
        layout: For data frames as X: a `Layout`, or a dict of its arguments.
        model_options: Further settings of the model, by name: `observation_dropout` (part of the
            observed values that is hidden at random in training), `carry` (give each token the last
            known value of each feature and its age as well), `backbone` (`osciformer`, or a
            baseline: `transformer`, `gru_d`), `backbone_options` (settings of it, by name),
            `scaling` of the values (`standard`, `robust`, `asinh` or `none`) and `clip` (bound on
            the absolute scaled input, against outliers; None for no bound).

    Attributes:
        transform_: The fitted scaling.
        n_features_in_: Number of features F.
        feature_names_in_: Their names.
        static_names_in_: Names of the static features.
        time_axis_: What the times mean.
    """

    dim: int = TaskConfig.dim
    num_layers: int = TaskConfig.num_layers
    num_heads: int = TaskConfig.num_heads
    dropout: float = TaskConfig.dropout
    layout: Layout | Mapping[str, Any] | None = None

    def _data_state(self) -> dict[str, Any]:
        return {
            "transform": self.transform_.to_dict(),
            "feature_names": list(map(str, self.feature_names_in_)),
            "static_names": list(self.static_names_in_),
            "time_axis": self.time_axis_.to_dict(),
        }

    def _restore_data(self, content: Mapping[str, Any]) -> None:
        axis = TimeAxis.from_dict(content["time_axis"])
        self._remember_columns(content["feature_names"], content["static_names"], axis)
        self.transform_ = SeriesTransform.from_dict(content["transform"])

    def _validate_training(self, X: Any) -> SeriesData:
        """Return X as series, and remember its columns."""
        data = as_series(X, self.layout)
        first = next(chunks(data))
        self._remember_columns(first.feature_names, first.static_names, first.time_axis)
        return data

    def _remember_columns(self, features: Any, static: Any, time_axis: TimeAxis) -> None:
        self.feature_names_in_ = np.array([str(name) for name in features], dtype=object)
        self.static_names_in_ = tuple(static)
        self.n_features_in_ = len(self.feature_names_in_)
        self.time_axis_ = time_axis

    def _validate(self, X: Any) -> SeriesData:
        """Return X as series with the columns of training; called once, by public methods."""
        self._check_fitted()
        return self._with_same_columns(X)

    def _with_same_columns(self, X: Any) -> SeriesData:
        data = as_series(X, self.layout, tuple(map(str, self.feature_names_in_)))
        first = next(chunks(data))
        _check_same_names("features", list(self.feature_names_in_), first.feature_names)
        _check_same_names("static features", self.static_names_in_, first.static_names)
        _check_same_times(self.time_axis_, first.time_axis)
        return data

    def _fit_series(
        self,
        train: Numbered,
        validation: Numbered | None,
        split: tuple[Int[np.ndarray, "t"], Int[np.ndarray, "v"]],
        *,
        task: Task,
        seed: int,
        generator: np.random.Generator,
        sample_weight: Any,
        clip: float | None,
        make_draw: Callable[[IrregularSeries], Draw] | None = None,
        **of_data: Any,
    ) -> None:
        """Train on the first part of the split, and stop early by validation, or the other part.

        `make_draw` takes a sample of the series; `of_data` are settings of the model.
        """
        weight = check_weight(sample_weight, len(train.data))
        index, rest = split
        config = self._train_config(seed, len(index))
        if validation is None and len(rest):
            validation = _part(train, rest)
        train = _part(train, index)
        settings = self.settings()
        self.transform_ = SeriesTransform(settings["scaling"], clip=clip)
        sample = _learn_scales(train.data, self.transform_, generator)
        draw = None if make_draw is None else make_draw(sample)
        model = self._build_model(seed, sample, **of_data)
        shared: dict[str, Any] = {
            "draw": draw,
            "seed": seed,
            "num_workers": config.num_workers,
            "pin_memory": choose_device(config.accelerator).type == "cuda",
        }
        self._train(
            model,
            task,
            self._source(
                train,
                config.batch_size,
                weight=None if weight is None else weight[index],
                **shared,
            ),
            None
            if validation is None
            else self._source(validation, config.batch_size, shuffle=False, **shared),
            config,
        )

    def _source(
        self, part: Numbered, batch_size: int, **settings: Any
    ) -> SeriesSource | StreamSource:
        """Return the batches of scaled series."""
        settings["labels"] = part.numbers
        if isinstance(part.data, ParquetSeries):
            prepare = self.transform_.transform
            return StreamSource(part.data, batch_size, prepare=prepare, **settings)
        return SeriesSource(self.transform_.transform(part.data), batch_size, **settings)

    def _build_model(self, seed: int, sample: IrregularSeries, **of_data: Any) -> nn.Module:
        sizes = {"input_dim": self.n_features_in_, "static_dim": len(self.static_names_in_)}
        config = self._model_config(**sizes, **of_data)
        batch = collate(sample)
        with undisturbed_random_state():
            torch.manual_seed(seed)
            model: Any = self.model_class(config)
            model.fit_time_scale(batch.times, batch.mask)
        return model

    def _outputs_of(self, source: SeriesSource | StreamSource) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch with the model's output; the model is on the CPU afterwards."""
        device = choose_device(self.accelerator)
        precision = self.settings()["precision"]
        yield from predict(self.model_, source.epoch(0), device=device, precision=precision)
        self.model_.cpu()


def _part(whole: Numbered, index: Int[np.ndarray, "m"]) -> Numbered:
    data, numbers = whole
    chosen = data.select(index) if isinstance(data, ParquetSeries) else data[index]
    return Numbered(chosen, None if numbers is None else numbers[index])
