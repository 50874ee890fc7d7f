"""When the next event of a sequence comes, and of which type it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn

from osciformer._optional import need
from osciformer._text import check_choice, name_some
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.config import EventModelConfig, TrainConfig
from osciformer.data.ragged import offsets_of
from osciformer.data.series import TimeAxis
from osciformer.estimators.base import TrainedEstimator, check_random_state, estimator, split
from osciformer.estimators.queries import flatten_times, is_list_of_times
from osciformer.estimators.series import is_table, split_pairs
from osciformer.events import (
    Calibration,
    EventProcess,
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
# Error of the integral over a gap; and of a step of a predicted distribution, in probability and in
# mean gaps. Networks in single precision are not worth asking for much less.
_TOLERANCE, _PREDICTION_TOLERANCE = 1e-5, 1e-4
# Events of a padded batch outside training; all the states between them are held at once.
_EVENTS_AT_ONCE = 2048


@dataclass(frozen=True)
class NextEvents:
    """The event that follows the last one of each sequence.

    Times are numbers, dates (UTC) or durations, as those of the sequences; gaps are numbers in
    `time_unit`.

    Attributes:
        ids: Names of the sequences.
        last_time: When their last events came.
        type: Names of the likeliest types.
        type_probability: Probability of each type, whenever the event comes.
        median_gap: After which the event has come with probability 1/2; the horizon if that is not
            reached.
        mean_gap: Expected gap, given that the event comes before the horizon.
        median_time: `last_time` and the median gap later.
        mean_time: `last_time` and the mean gap later.
        survival: Probability that no event comes before the horizon.
        type_names: Names of the K types.
        horizon: Largest gap that was considered.
        time_unit: Unit of the gaps.
    """

    ids: np.ndarray
    last_time: np.ndarray
    type: np.ndarray
    type_probability: Float[np.ndarray, "n K"]
    median_gap: Float[np.ndarray, "n"]
    mean_gap: Float[np.ndarray, "n"]
    median_time: np.ndarray
    mean_time: np.ndarray
    survival: Float[np.ndarray, "n"]
    type_names: tuple[str, ...]
    horizon: float
    time_unit: str

    def __len__(self) -> int:
        return len(self.ids)

    def columns(self, *, id: str = "id") -> dict[str, np.ndarray]:
        """Return the predictions as columns by name, a row per sequence.

        Args:
            id: Name of the column of ids.
        """
        names = ("last_time", "type", "median_time", "mean_time", "median_gap", "mean_gap")
        columns = {name: getattr(self, name) for name in (*names, "survival")}
        for number, name in enumerate(self.type_names):
            columns[f"probability_{name}"] = self.type_probability[:, number]
        return {id: self.ids, **columns}

    def to_frame(self, library: str = "pandas", *, id: str = "id") -> Any:
        """Return the predictions as a table.

        Args:
            library: `pandas`, `polars` or `pyarrow`: whose table to return.
            id: Name of the column of ids.
        """
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

    It is trained by the likelihood of events 2 to N of each sequence. Besides those below it has
    the arguments and attributes of `TrainedEstimator`; all are keywords. X is an `EventSequences`,
    a data frame with a row per event, or a list of pairs `(times, types)`.

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
        model_options: Further settings of the model, by name: `encoder` (what reads the history:
            `osciformer`, or a baseline, see `EventModelConfig`), `encoder_options` (settings of it,
            by name) and `num_components` of the `mixture`.

    Attributes:
        type_names_: Names of the K types.
        time_axis_: What the times mean.
        time_unit_: Name of their unit.
        horizon_: Largest gap that is predicted, 100 times the longest one in training.
        blend_weights_: Weight of the `network`, and of each process of `blend_with` by its name.
        validation_index_: Positions in X of the sequences that were kept for early stopping; only
            after `fit`.

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
            X: The sequences. Those with fewer than two events have nothing to be predicted, and
                are left out.
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
        self._train(
            network,
            EventLikelihood(),
            _source(events, config, shuffle=True),
            _source(validation, config, shuffle=False) if len(validation) else None,
            config,
        )
        if companions:
            with self._process():
                size = self._batch_size(validation)
                self.model_ = BlendedEventProcess.fit(
                    self.model_, companions, events, validation, batch_size=size
                ).cpu()
        return self

    @property
    def blend_weights_(self) -> dict[str, float]:
        """Weight of the `network`, and of each classical process of `blend_with` by its name."""
        self._check_fitted()
        is_blend = isinstance(self.model_, BlendedEventProcess)
        return self.model_.named_weights if is_blend else {"network": 1.0}

    def predict(self, X: Any, *, horizon: float | None = None) -> NextEvents:
        """Return the next event of each sequence: its type, and median and mean of its time.

        Args:
            X: Sequences with an event or more each.
            horizon: Largest gap to consider; `horizon_` if not given.
        """
        events = self._validate(X, need_events=True)
        horizon = self.horizon_ if horizon is None else horizon
        with self._process() as process:
            return _predict_following(
                process, events, horizon, self._batch_size(events), self.time_unit_
            )

    def log_likelihood(self, X: Any, *, span: Span = "events") -> LogLikelihood:
        """Return the log-likelihood of sequences, with its error and the unit of time.

        Args:
            X: Sequences.
            span: `events`, 2 to N given the first; `window`, all in the observed window.
        """
        events = self._validate(X)
        with self._process() as process:
            return log_likelihood(process, events, span=span, **self._integration(events))

    def score(self, X: Any, y: Any = None) -> float:
        """Return the log-likelihood in nats per event, of events 2 to N of each sequence."""
        found = self.log_likelihood(X)
        if not found.num_scored:
            raise ValueError("X has nothing to score: no sequence has a second event")
        return found.micro

    def evaluate(self, X: Any, *, horizon: float | None = None) -> EventScores:
        """Return likelihood, accuracy of the next type and errors of the next time.

        Args:
            X: Sequences.
            horizon: Where predicted gaps end; `horizon_` if not given.
        """
        events = self._validate(X)
        with self._process() as process:
            return score(process, events, **self._scoring(events, horizon))

    def evaluate_sequences(self, X: Any, *, horizon: float | None = None) -> SequenceScores:
        """Return the same of each sequence, so that sequences can be resampled.

        Args:
            X: Sequences.
            horizon: As of `evaluate`.
        """
        events = self._validate(X)
        with self._process() as process:
            return score_sequences(process, events, **self._scoring(events, horizon))

    def calibration(self, X: Any, *, span: Span = "events") -> Calibration:
        """Return the test of time rescaling: integrals of the right rate are exponential.

        Args:
            X: Sequences.
            span: As of `log_likelihood`.
        """
        events = self._validate(X)
        with self._process() as process:
            return calibrate(rescaled_gaps(process, events, span=span, **self._integration(events)))

    def intensity(self, X: Any, times: Any) -> np.ndarray | list[np.ndarray]:
        """Return the rates of all types at any times, given the events strictly before.

        Args:
            X: Sequences.
            times: One array [M] for all sequences, or a list of arrays, one per sequence; numbers
                in the unit of the sequences, or dates if they have such.

        Returns:
            Events per unit of time, [n, M, K] if the times are shared, otherwise a list with an
            [M, K] per sequence.
        """
        events = self._validate(X)
        is_list = is_list_of_times(times, len(events), "sequence")
        flat, offsets = flatten_times(events, times if is_list else [times] * len(events))
        with self._process() as process:
            rates = _rates_at(process, events, flat, offsets, self._batch_size(events))
        if is_list:
            return np.split(rates, offsets[1:-1])
        return rates.reshape(len(events), -1, events.num_types)

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
            The futures: `sequences` with the ids, types and time axis of X, and in `source` the
            position of the sequence that each one continues.
        """
        events = self._validate(X, need_events=True)
        last = events.times[events.offsets[1:] - 1]
        ends = np.broadcast_to(np.asarray(until), (len(events),))
        end, _ = flatten_times(events, list(ends[:, None]), relative_to=last if relative else None)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        part_size = max(1, self._batch_size(events) // max(1, num_futures))
        generator = torch.Generator().manual_seed(seed)
        parts = []
        with (
            self._process() as process,
            _progress_bar(num_futures * len(events), progress) as show,
        ):
            for first in range(0, len(events), part_size):
                index = np.arange(first, min(first + part_size, len(events)))

                def report(done: int, _: int, before: int = num_futures * first) -> None:
                    show(before + done)

                parts.append(
                    sample(
                        process,
                        events.batch(index),
                        until=torch.from_numpy(end[index]),
                        generator=generator,
                        num_futures=num_futures,
                        max_events=max_events,
                        progress=report,
                    )
                )
        return _join(parts, events, part_size)

    def stream(self, *, num_sequences: int = 1, context: int | None = None) -> EventStream:
        """Return a session that takes events as they come and answers in between.

        Args:
            num_sequences: Sequences that run side by side.
            context: How many of the last events are kept; all of them if not given.
        """
        self._check_fitted()
        return EventStream(
            self.model_,
            num_sequences=num_sequences,
            context=context,
            type_names=self.type_names_,
            time_unit=self.time_unit_,
        )

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
        _check_same_time(self.time_axis_, self.time_unit_, events)
        return _match_types(events, self.type_names_)

    def _scoring(self, events: EventSequences, horizon: float | None) -> dict[str, Any]:
        return {
            "horizon": self.horizon_ if horizon is None else horizon,
            "prediction_tolerance": _PREDICTION_TOLERANCE,
            **self._integration(events),
        }

    def _integration(self, events: EventSequences) -> dict[str, Any]:
        return {"tolerance": _TOLERANCE, "batch_size": self._batch_size(events)}

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

    def _data_state(self) -> dict[str, Any]:
        return {
            "type_names": list(self.type_names_),
            "time_axis": self.time_axis_.to_dict(),
            "time_unit": self.time_unit_,
        }

    def _restore_data(self, content: Mapping[str, Any]) -> None:
        self.type_names_ = tuple(map(str, content["type_names"]))
        self.time_axis_ = TimeAxis.from_dict(content["time_axis"])
        self.time_unit_ = str(content["time_unit"])
        if len(self.type_names_) != self.model_.num_types:
            raise ValueError(
                f"there are {len(self.type_names_)} names of {self.model_.num_types} types"
            )

    def _task_state(self) -> dict[str, Any]:
        return {"horizon": self.horizon_}

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        self.horizon_ = float(state["horizon"])


def as_events(
    X: Any, layout: Mapping[str, Any] | None = None, type_names: Sequence[str] | None = None
) -> EventSequences:
    """Return X, also a data frame or a list of `(times [N], types [N])`, as sequences of events.

    The layout holds arguments of `events_from_frame`; `type_names` are all that a frame may hold.

    Example:
        >>> as_events([([0.0, 1.0], [0, 1]), ([0.5], [1])])
        EventSequences(2 sequences, 3 events of 2 types, lengths 1 to 2, time in unit of the data)
    """
    if isinstance(X, EventSequences):
        found = X
    elif isinstance(X, list | tuple):
        found = EventSequences.from_arrays(*split_pairs(X, "types", "sequences"))
    elif is_table(X):
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


def _check_same_time(axis: TimeAxis, unit: str, events: EventSequences) -> None:
    """Refuse times in another unit than in training; a unit without a name passes."""
    if axis.kind != events.time_axis.kind and events.time_axis.kind != "number":
        raise ValueError(
            f"the model was fitted with times of kind {axis.kind!r}; X has "
            f"{events.time_axis.kind!r}"
        )
    if UNNAMED_UNIT not in (unit, events.time_unit) and unit != events.time_unit:
        raise ValueError(
            f"the model was fitted with times in {unit}, and those of X are in {events.time_unit}; "
            "read X in the same unit, or use its method rescale"
        )


def _match_types(events: EventSequences, names: Sequence[str]) -> EventSequences:
    """Return the same events with types counted as in training, matched by their names.

    Types without names are taken to be counted as in training.

    Example:
        >>> events = EventSequences([0.0, 1.0], [0, 1], [0, 2], type_names=["sell", "buy"])
        >>> _match_types(events, ["buy", "hold", "sell"]).types
        array([2, 0])
    """
    if tuple(events.type_names) == tuple(names):
        return events
    known = list(names)
    if events.type_names == tuple(map(str, range(events.num_types))):
        known = [str(number) for number in range(len(names))]
    position = {name: number for number, name in enumerate(known)}
    occurring = np.unique(events.types)
    unknown = [events.type_names[k] for k in occurring if events.type_names[k] not in position]
    if unknown:
        raise ValueError(
            f"X has types that were not there in fit: {name_some(unknown)}; the model knows "
            f"{name_some(list(names))}. Leave such events out, or fit again with data that have "
            "them"
        )
    codes = np.array([position.get(name, 0) for name in events.type_names], dtype=np.int64)
    return events.replace(types=codes[events.types], num_types=len(names), type_names=tuple(names))


def _source(events: EventSequences, config: TrainConfig, *, shuffle: bool) -> EventSource:
    return EventSource(
        events,
        config.batch_size,
        shuffle=shuffle,
        seed=config.seed,
        num_workers=config.num_workers,
    )


def _predict_following(
    process: EventProcess,
    events: EventSequences,
    horizon: float,
    batch_size: int,
    time_unit: str,
) -> NextEvents:
    """Return what follows the last event of each sequence, within a gap of `horizon`."""
    count, last = len(events), events.times[events.offsets[1:] - 1]
    gaps, chances = np.empty((3, count)), np.empty((count, events.num_types))
    for batch in events.batches(batch_size):
        assert batch.index is not None
        index = batch.index.numpy()
        found = predict_last(
            process,
            batch.to(process.device),
            horizon=horizon,
            tolerance=_PREDICTION_TOLERANCE,
            negligible=_PREDICTION_TOLERANCE,
        )
        for number, item in enumerate((found.median, found.mean, found.survival)):
            gaps[number, index] = item[:, 0].cpu().numpy()
        chances[index] = found.type_probability[:, 0].cpu().numpy()
    positions = np.arange(count)
    return NextEvents(
        ids=events.ids,
        last_time=events.decode_times(last, positions),
        type=np.array(events.type_names)[chances.argmax(axis=1)],
        type_probability=chances,
        median_gap=gaps[0],
        mean_gap=gaps[1],
        median_time=events.decode_times(last + gaps[0], positions),
        mean_time=events.decode_times(last + gaps[1], positions),
        survival=gaps[2],
        type_names=events.type_names,
        horizon=float(horizon),
        time_unit=time_unit,
    )


def _padded_queries(
    times: Float[np.ndarray, "Q"], offsets: Int[np.ndarray, "n+1"], index: Int[np.ndarray, "B"]
) -> tuple[Float[Tensor, "B M"], Int[np.ndarray, "q"], Bool[np.ndarray, "B M"]]:
    """Return the query times of some sequences side by side, their rows, and where they stand.

    Example:
        >>> _padded_queries(np.array([1.0, 2.0, 3.0]), np.array([0, 2, 3]), np.array([1, 0]))[0]
        tensor([[3., 3.],
                [1., 2.]], dtype=torch.float64)
    """
    counts = offsets[index + 1] - offsets[index]
    steps = np.arange(max(1, int(counts.max(initial=0))))
    is_asked = steps < counts[:, None]
    rows = offsets[index][:, None] + np.minimum(steps, np.maximum(counts, 1)[:, None] - 1)
    padded = np.append(times, 0.0)[np.minimum(rows, len(times))]
    return torch.from_numpy(padded), rows[is_asked], is_asked


@torch.no_grad()
def _rates_at(
    process: EventProcess,
    events: EventSequences,
    times: Float[np.ndarray, "Q"],
    offsets: Int[np.ndarray, "n+1"],
    batch_size: int,
) -> Float[np.ndarray, "Q K"]:
    """Return the rates of all types at times of each sequence."""
    rates = np.empty((len(times), events.num_types))
    for batch in events.batches(batch_size):
        assert batch.index is not None
        asked, rows, is_asked = _padded_queries(times, offsets, batch.index.numpy())
        found = process.intensity(batch.to(process.device), asked.to(process.device))
        rates[rows] = found.cpu().numpy()[is_asked]
    return rates


def _join(parts: Sequence[Futures], events: EventSequences, part_size: int) -> Futures:
    """Return the futures of consecutive parts of sequences together, named as these are."""
    drawn = [part.sequences for part in parts]
    source = np.concatenate([k * part_size + part.source for k, part in enumerate(parts)])
    sequences = EventSequences(
        np.concatenate([item.times for item in drawn]),
        np.concatenate([item.types for item in drawn]),
        offsets_of(np.concatenate([item.lengths for item in drawn])),
        ids=events.ids[source],
        type_names=events.type_names,
        starts=np.concatenate([item.starts for item in drawn]),  # type: ignore[arg-type]
        ends=np.concatenate([item.ends for item in drawn]),  # type: ignore[arg-type]
        time_unit=events.time_unit,
        time_axis=events.time_axis,
        origins=None if events.origins is None else events.origins[source],
    )
    return Futures(
        sequences,
        source,
        np.concatenate([part.is_cut for part in parts]),
        sum(part.num_candidates for part in parts),
        sum(part.num_raised for part in parts),
    )


@contextmanager
def _progress_bar(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Give a function that is told how many futures are drawn, and shows it if that is wanted."""
    if not is_shown:
        yield lambda done: None
        return
    bar: Any = need("tqdm", extra="train").tqdm(
        total=total, unit="future", desc="sampling", dynamic_ncols=True
    )
    with bar:
        yield lambda done: bar.update(done - bar.n)
