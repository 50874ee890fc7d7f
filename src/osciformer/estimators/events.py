"""When the next event of a sequence comes, and of which type it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import nn

from osciformer._optional import need
from osciformer._text import check_choice, name_some
from osciformer._types import Float, Tensor
from osciformer.config import EventModelConfig
from osciformer.data.inputs import is_table, split_pairs
from osciformer.data.ragged import offsets_of
from osciformer.data.series import TimeAxis
from osciformer.estimators.base import TrainedEstimator, draw_seed, estimator, split
from osciformer.estimators.queries import flatten_times, is_list_of_times, refuse_far_times
from osciformer.events import (
    Calibration,
    EventScores,
    EventSequences,
    EventStream,
    Futures,
    LogLikelihood,
    SequenceScores,
    calibrate,
    events_from_frame,
    log_likelihood,
    predict_last,
    rescaled_gaps,
    sample,
    score,
    score_sequences,
)
from osciformer.events.likelihood import Span
from osciformer.events.neural import (
    BlendConfig,
    BlendedEventProcess,
    NeuralEventProcess,
    make_event_model,
)
from osciformer.events.neural.blended import check_can_blend, companions_of
from osciformer.events.sequences import UNNAMED_UNIT
from osciformer.train.fitting import choose_device, undisturbed_random_state
from osciformer.train.sources import EventSource
from osciformer.train.tasks import EventLikelihood

# Predictions look ahead as far as that many times the longest gap of the training events.
HORIZON_GAPS = 100.0
# Errors of the integral over a gap, and of predicted distributions in probability and mean gaps.
_TOLERANCE, _PREDICTION_TOLERANCE = 1e-5, 1e-4
# Events of a padded batch outside training; all the states between them are held at once.
_EVENTS_AT_ONCE = 2048
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class NextEvents:
    """The event that follows the last one of each sequence; times are as those of the sequences."""

    ids: np.ndarray  #: Names of the sequences.
    last_time: np.ndarray  #: When their last events came.
    type: np.ndarray  #: Names of the likeliest types.
    type_probability: Float[np.ndarray, "n K"]  #: Of each type, whenever the event comes.
    #: After which the event has come with probability 1/2; the horizon if that is not reached.
    median_gap: Float[np.ndarray, "n"]
    mean_gap: Float[np.ndarray, "n"]  #: Expected gap, given that it is below the horizon.
    median_time: np.ndarray  #: `last_time` and the median gap later.
    mean_time: np.ndarray  #: `last_time` and the mean gap later.
    survival: Float[np.ndarray, "n"]  #: Probability that no event comes before the horizon.
    type_names: tuple[str, ...]  #: Names of the K types.
    horizon: float  #: Largest gap that was considered.
    time_unit: str  #: Unit of the gaps.

    def __len__(self) -> int:
        return len(self.ids)

    def columns(self, *, id: str = "id") -> dict[str, np.ndarray]:
        """Return the predictions as columns by name, a row per sequence; `id` names the ids."""
        names = ("last_time", "type", "median_time", "mean_time", "median_gap", "mean_gap")
        columns = {name: getattr(self, name) for name in (*names, "survival")}
        for number, name in enumerate(self.type_names):
            columns[f"probability_{name}"] = self.type_probability[:, number]
        if id in columns:
            raise ValueError(f"id must not be {id!r}, a predicted column; choose another name")
        return {id: self.ids, **columns}

    def to_frame(self, library: str = "pandas", *, id: str = "id") -> Any:
        """Return the predictions as a table of `pandas`, `polars` or `pyarrow`."""
        check_choice("library", library, ("pandas", "polars", "pyarrow"))
        pa = need("pyarrow", extra="data")
        table = pa.table({name: pa.array(item) for name, item in self.columns(id=id).items()})
        if library == "pandas":
            need("pandas", extra="data")
            return table.to_pandas()
        return need("polars", extra="data").from_arrow(table) if library == "polars" else table


@estimator
class OsciFormerEventPredictor(TrainedEstimator):
    """A marked temporal point process: rates of events of each type, given those before.

    X is an `EventSequences`, a data frame with a row per event, or a list of `(times, types)`.
    Besides those below it has the keywords and attributes of `TrainedEstimator`.

    Args:
        head: What makes rates of the history: `mixture`, `softplus`, `decay` or `exponential`.
        dim: Width of the model.
        num_layers: Number of encoder blocks.
        num_heads: Number of heads.
        dropout: Dropout of the model.
        blend_with: Classical processes to blend the network with, by weights that the validation
            part decides: `renewal` (a histogram of gaps and a Markov chain of types), `repeat`
            (the same with "the last type again"), `hawkes`; or `auto`, all that make sense; None
            for none. It pays where there are few events, see `BlendedProcess`. They are fitted when
            training is done: `history_`, and the model after Ctrl-C, are the network's alone.
        layout: For data frames as X: arguments of `events_from_frame`, such as
            `dict(id="user", time="clicked_at", type="page", unit="h")`.
        model_options: Further settings of the model, by name: `encoder`, `encoder_options` and
            `num_components`, see `EventModelConfig`.

    Attributes:
        type_names_: Names of the K types.
        time_axis_: What the times mean.
        time_unit_: Name of their unit.
        horizon_: Largest gap that is predicted, 100 times the longest one in training.
        validation_index_: Positions in X of the sequences that `fit` kept for early stopping.

    Example:
        >>> times, types = [0.0, 1.0, 2.0, 3.0], [0, 1, 0, 1]
        >>> model = OsciFormerEventPredictor(dim=8, num_heads=2, max_epochs=2, random_state=0)
        >>> found = model.fit([(times, types)] * 12).predict([(times, types)])
        >>> found.type_probability.shape, found.median_gap.shape
        ((1, 2), (1,))
    """

    head: str = EventModelConfig.head
    dim: int = EventModelConfig.dim
    num_layers: int = EventModelConfig.num_layers
    num_heads: int = EventModelConfig.num_heads
    dropout: float = EventModelConfig.dropout
    blend_with: str | Sequence[str] | None = None
    layout: Mapping[str, Any] | None = None

    task: ClassVar[str] = "events"
    config_class: ClassVar[Any] = EventModelConfig

    def fit(self, X: Any, y: Any = None, *, validation_data: Any = None) -> Self:
        """Train on sequences of events.

        Args:
            X: The sequences; those with fewer than two events are left out.
            y: Not used.
            validation_data: Sequences for early stopping, in place of a part of X.
        """
        events = as_events(X, self.layout)
        _check_learnable(events)
        self.type_names_ = events.type_names
        self.time_axis_, self.time_unit_ = events.time_axis, events.time_unit
        companions = companions_of(self.blend_with, events.num_types)
        seed = self._start()
        some = np.flatnonzero(events.lengths > 1)
        if validation_data is not None:
            validation = self._with_known_types(validation_data)
            self.validation_index_ = some[:0]
        else:
            generator = np.random.default_rng(seed)
            index, rest = split(np.zeros_like(some), self.validation_fraction, generator)
            some, self.validation_index_ = some[index], some[rest]
            validation = events[self.validation_index_]
        validation, events = validation[validation.lengths > 1], events[some]
        _check_learnable(events)
        self.horizon_ = HORIZON_GAPS * float(events.gaps.max())
        config = self._train_config(seed, len(events))
        with undisturbed_random_state():
            torch.manual_seed(seed)
            model_config = self._model_config(num_types=events.num_types)
            network = make_event_model(model_config).fit_times(events)
        if companions:
            check_can_blend(network, validation)

        order: dict[str, Any] = {"seed": seed, "num_workers": config.num_workers}
        source = EventSource(events, config.batch_size, **order)
        watched = None
        if len(validation):
            watched = EventSource(validation, config.batch_size, shuffle=False, **order)
        self._train(network, EventLikelihood(), source, watched, config)
        if companions:
            parts, size = (events, validation), self._batch_size(validation)
            with self._process():
                blend = BlendedEventProcess.fit(self.model_, companions, *parts, batch_size=size)
                self.model_ = blend.cpu()
        return self

    @property
    def blend_weights_(self) -> dict[str, float]:
        """Weight of the `network`, and of each classical process of `blend_with` by its name."""
        self._check_fitted()
        is_blend = isinstance(self.model_, BlendedEventProcess)
        return self.model_.named_weights if is_blend else {"network": 1.0}

    def predict(self, X: Any, *, horizon: float | None = None) -> NextEvents:
        """Return the next event of each sequence: its type, and median and mean of its time.

        The horizon is the largest gap to consider; `horizon_` if not given.
        """
        events = self._validate(X, need_events=True)
        horizon = float(self.horizon_ if horizon is None else horizon)
        settings = dict.fromkeys(("tolerance", "negligible"), _PREDICTION_TOLERANCE)
        gaps, chances = np.empty((3, len(events))), np.empty((len(events), events.num_types))
        with self._process() as process:
            for batch in events.batches(self._batch_size(events)):
                index = np.asarray(batch.index)
                found = predict_last(process, batch.to(process.device), horizon=horizon, **settings)
                numbers = torch.stack((found.median, found.mean, found.survival))
                gaps[:, index] = numbers[..., 0].cpu().numpy()
                chances[index] = found.type_probability[:, 0].cpu().numpy()
        median, mean, survival = gaps
        last, positions = events.times[events.offsets[1:] - 1], np.arange(len(events))
        return NextEvents(
            ids=events.ids,
            last_time=events.decode_times(last, positions),
            type=np.array(events.type_names)[chances.argmax(axis=1)],
            type_probability=chances,
            median_gap=median,
            mean_gap=mean,
            median_time=events.decode_times(last + median, positions),
            mean_time=events.decode_times(last + mean, positions),
            survival=survival,
            type_names=events.type_names,
            horizon=horizon,
            time_unit=self.time_unit_,
        )

    def log_likelihood(self, X: Any, *, span: Span = "events") -> LogLikelihood:
        """Return the log-likelihood of sequences, with its error and the unit of time.

        Args:
            X: Sequences.
            span: `events`, 2 to N given the first; `window`, all in the observed window.
        """
        return self._apply(log_likelihood, X, span=span)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the log-likelihood in nats per event, of events 2 to N of each sequence."""
        found = self.log_likelihood(X)
        if not found.num_scored:
            raise ValueError("X has nothing to score: no sequence has a second event")
        return found.micro

    def evaluate(self, X: Any, *, horizon: float | None = None) -> EventScores:
        """Return likelihood, accuracy of the next type and errors of the next time."""
        return self._scores(score, X, horizon)

    def evaluate_sequences(self, X: Any, *, horizon: float | None = None) -> SequenceScores:
        """Return what `evaluate` does, of each sequence, so that sequences can be resampled."""
        return self._scores(score_sequences, X, horizon)

    def calibration(self, X: Any, *, span: Span = "events") -> Calibration:
        """Return the test of time rescaling: integrals of the right rate are exponential."""
        return calibrate(self._apply(rescaled_gaps, X, span=span))

    def intensity(self, X: Any, times: Any) -> np.ndarray | list[np.ndarray]:
        """Return the rates of all types at any times, given the events strictly before.

        Args:
            X: Sequences.
            times: One array [M] for all sequences, or a list with one each; numbers or dates.

        Returns:
            Events per unit of time, [n, M, K] if the times are shared, otherwise a list of [M, K].
        """
        events = self._validate(X)
        is_list = is_list_of_times(times, len(events), "sequence")
        flat, offsets = flatten_times(events, times if is_list else [times] * len(events))
        asked = np.split(flat, offsets[1:-1])
        rates: list[Any] = [None] * len(events)
        with self._process() as process, torch.no_grad():
            for batch in events.batches(self._batch_size(events)):
                index = np.asarray(batch.index)
                width = max(1, *(len(asked[k]) for k in index))
                # Short lists are padded with their own times, which are cheap to answer twice.
                padded = np.stack([np.resize(asked[k], width) for k in index])
                queries = torch.from_numpy(padded).to(process.device)
                found = process.intensity(batch.to(process.device), queries).cpu().numpy()
                for k, row in zip(index, found, strict=True):
                    rates[k] = row[: len(asked[k])]
        return rates if is_list else np.stack(rates)

    def sample(
        self,
        X: Any,
        *,
        until: Any,
        relative: bool = False,
        num_futures: int = 1,
        max_events: int = 10_000,
        random_state: Any = None,
        progress: bool = False,
    ) -> Futures:
        """Return futures of sequences, drawn event by event from what has happened.

        Args:
            X: Sequences with an event or more each.
            until: Where futures end: a number or a date, or one per sequence [n].
            relative: Count `until` from the last event of each sequence.
            num_futures: Futures of each sequence.
            max_events: Largest number of events of a future; one with more is an error.
            random_state: Seed, or a NumPy `RandomState`, or None.
            progress: Show a bar.

        Returns:
            `sequences`, and in `source` the position in X of the one that each continues.
        """
        events = self._validate(X, need_events=True)
        last = events.times[events.offsets[1:] - 1] if relative else None
        ends = np.broadcast_to(np.asarray(until), (len(events),))
        end, _ = flatten_times(events, list(ends[:, None]), relative_to=last)
        size = max(1, self._batch_size(events) // max(1, num_futures))
        generator = torch.Generator().manual_seed(draw_seed(random_state))
        total, words = num_futures * len(events), {"unit": "future", "desc": "sampling"}
        tqdm = need("tqdm", extra="train").tqdm
        bar = tqdm(total=total, dynamic_ncols=True, disable=not progress, **words)
        parts: list[Futures] = []

        def show(done: int, _: int) -> None:
            bar.update(sum(len(part.source) for part in parts) + done - bar.n)

        with self._process() as process, bar:
            for first in range(0, len(events), size):
                index = np.arange(first, min(first + size, len(events)))
                part = sample(
                    process,
                    events.batch(index),
                    until=torch.from_numpy(end[index]),
                    generator=generator,
                    num_futures=num_futures,
                    max_events=max_events,
                    progress=show,
                )
                parts.append(replace(part, source=first + part.source))
        return _join(parts, events)

    def stream(self, *, num_sequences: int = 1, context: int | None = None) -> EventStream:
        """Return a session that takes events as they come and answers in between.

        Args:
            num_sequences: Sequences that run side by side.
            context: How many of the last events are kept; all of them if not given.
        """
        self._check_fitted()
        size: dict[str, Any] = {"num_sequences": num_sequences, "context": context}
        names: dict[str, Any] = {"type_names": self.type_names_, "time_unit": self.time_unit_}
        return EventStream(self.model_, **size, **names)

    def _validate(self, X: Any, *, need_events: bool = False) -> EventSequences:
        """Return X as sequences of the known types; called once, by public methods."""
        self._check_fitted()
        events = self._with_known_types(X)
        empty = events.ids[events.lengths == 0]
        if need_events and len(empty):
            raise ValueError(
                f"{len(empty)} sequences have no event to start from, the first is {empty[0]!s}; "
                "leave them out"
            )
        return events

    def _with_known_types(self, X: Any) -> EventSequences:
        """Return X as sequences with the types and the unit of time of training."""
        events = as_events(X, self.layout, self.type_names_)
        kind, other = self.time_axis_.kind, events.time_axis.kind
        if other not in (kind, "number"):
            raise ValueError(f"the model was fitted with times of kind {kind!r}; X has {other!r}")
        if len({self.time_unit_, events.time_unit} - {UNNAMED_UNIT}) > 1:
            raise ValueError(
                f"the model was fitted with times in {self.time_unit_}, and those of X are in "
                f"{events.time_unit}; read X in the same unit, or use its method rescale"
            )
        return _match_types(events, self.type_names_)

    def _scores(self, function: Callable[..., _Answer], X: Any, horizon: float | None) -> _Answer:
        horizon = self.horizon_ if horizon is None else horizon
        settings = {"horizon": horizon, "prediction_tolerance": _PREDICTION_TOLERANCE}
        return self._apply(function, X, **settings)

    def _apply(self, function: Callable[..., _Answer], X: Any, **settings: Any) -> _Answer:
        """Return what a function says of the process and X, with the tolerance of networks."""
        events = self._validate(X)
        settings |= {"tolerance": _TOLERANCE, "batch_size": self._batch_size(events)}
        with self._process() as process:
            return function(process, events, **settings)

    def _batch_size(self, events: EventSequences) -> int:
        """Return how many sequences to take at a time, so that memory is bounded."""
        longest = max(1, int(events.lengths.max()))
        return max(1, min(self._prediction_batch, _EVENTS_AT_ONCE // longest))

    @contextmanager
    def _process(self) -> Iterator[NeuralEventProcess | BlendedEventProcess]:
        """Give the model where it is to compute, and put it back on the CPU."""
        process = self.model_.to(choose_device(self.accelerator)).eval()
        try:
            yield process
        finally:
            process.cpu()

    @classmethod
    def _model_from_dict(cls, config: Mapping[str, Any]) -> nn.Module:
        if "companions" in config:
            return BlendedEventProcess.from_config(BlendConfig.from_dict(config))
        return make_event_model(EventModelConfig.from_dict(config))

    def _state(self) -> dict[str, Any]:
        return {
            **super()._state(),
            "type_names": list(self.type_names_),
            "time_axis": self.time_axis_.to_dict(),
            "time_unit": self.time_unit_,
            "task": {"horizon": self.horizon_},
        }

    def _restore(self, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super()._restore(content, weights)
        self.type_names_ = tuple(map(str, content["type_names"]))
        self.time_axis_ = TimeAxis.from_dict(content["time_axis"])
        self.time_unit_ = str(content["time_unit"])
        self.horizon_ = float(content["task"]["horizon"])
        given, num_types = len(self.type_names_), self.model_.num_types
        if given != num_types:
            raise ValueError(f"there are {given} names of {num_types} types")


def as_events(
    X: Any, layout: Mapping[str, Any] | None = None, type_names: Sequence[str] | None = None
) -> EventSequences:
    """Return X, also a data frame or a list of `(times [N], types [N])`, as sequences of events."""
    if isinstance(X, EventSequences):
        found = X
    elif isinstance(X, list | tuple):
        found = EventSequences.from_arrays(*split_pairs(X, "types", "sequences"))
    elif is_table(X):
        if not isinstance(layout, Mapping | None):
            form = "dict(id='user', time='hour', type='page')"
            raise TypeError(f"layout must be a dict such as {form}; got {layout!r}")
        settings = dict(layout or {})
        if type_names is not None and settings.get("type", "type") is not None:
            settings |= {"type_names": tuple(type_names), "num_types": len(type_names)}
        found = events_from_frame(X, **settings)
    else:
        raise TypeError(
            "X must be an EventSequences, a data frame with a row per event, or a list of (times, "
            f"types) pairs; got {type(X).__name__}"
        )
    if len(found) == 0:
        raise ValueError("X holds no sequences; pass at least one")
    refuse_far_times(found, found.times, found.offsets)
    return found


def _check_learnable(events: EventSequences) -> None:
    """Refuse sequences from which nothing about waiting times can be learned."""
    if not (events.lengths > 1).any():
        raise ValueError(
            f"none of the {len(events)} sequences has a second event, and the first one of a "
            "sequence is not predicted; check which column says what belongs to one sequence"
        )
    if not (events.gaps > 0).any():
        raise ValueError(
            "all events of each sequence are at one time, so that there is no waiting time to "
            "learn; check the column of times, and its unit"
        )


def _match_types(events: EventSequences, names: Sequence[str]) -> EventSequences:
    """Return events with types counted as in training; types without names are already."""
    if tuple(events.type_names) == tuple(names):
        return events
    is_unnamed = events.type_names == tuple(map(str, range(events.num_types)))
    known = [str(number) for number in range(len(names))] if is_unnamed else names
    position = {name: number for number, name in enumerate(known)}
    occurring = [events.type_names[k] for k in np.unique(events.types)]
    unknown = [name for name in occurring if name not in position]
    if unknown:
        raise ValueError(
            f"X has types that were not there in fit: {name_some(unknown)}; the model knows "
            f"{name_some(list(names))}. Leave such events out, or fit again with data that have "
            "them"
        )
    codes = np.array([position.get(name, 0) for name in events.type_names], dtype=np.int64)
    return events.replace(types=codes[events.types], num_types=len(names), type_names=tuple(names))


def _join(parts: Sequence[Futures], events: EventSequences) -> Futures:
    """Return the futures of consecutive parts of sequences together, named as these are."""

    def joined(name: str) -> Any:
        return np.concatenate([getattr(part.sequences, name) for part in parts])

    source = np.concatenate([part.source for part in parts])
    sequences = events.replace(
        times=joined("times"),
        types=joined("types"),
        offsets=offsets_of(joined("lengths")),
        ids=events.ids[source],
        starts=joined("starts"),
        ends=joined("ends"),
        origins=None if events.origins is None else events.origins[source],
    )
    return Futures(
        sequences,
        source,
        np.concatenate([part.is_cut for part in parts]),
        sum(part.num_candidates for part in parts),
        sum(part.num_raised for part in parts),
    )
