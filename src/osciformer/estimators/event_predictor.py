"""When the next event of a sequence comes, and of which type it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from osciformer.data.series import TimeAxis
from osciformer.estimators import event_inputs, queries
from osciformer.estimators.event_answers import draw_futures, predict_following, rates_at
from osciformer.estimators.next_events import NextEvents
from osciformer.estimators.splits import random_split
from osciformer.estimators.trained import TrainedEstimator, check_random_state
from osciformer.events.likelihood import LogLikelihood, Span, log_likelihood
from osciformer.events.neural import EventModelConfig, NeuralEventProcess, make_event_model
from osciformer.events.neural.blended import (
    BlendConfig,
    BlendedEventProcess,
    check_can_blend,
    companions_of,
)
from osciformer.events.prediction import Futures
from osciformer.events.scores import (
    Calibration,
    EventScores,
    SequenceScores,
    calibrate,
    rescaled_gaps,
    score,
    score_sequences,
)
from osciformer.events.sequences import EventSequences
from osciformer.events.stream import EventStream
from osciformer.train.config import TrainConfig
from osciformer.train.event_source import EventSource
from osciformer.train.event_task import EventLikelihood
from osciformer.train.fitting import choose_device
from osciformer.train.quiet import undisturbed_random_state

# Predictions look ahead as far as that many times the longest gap of the training events.
HORIZON_GAPS = 100.0
# Error of the integral over a gap; and of a step of a predicted distribution, in probability and in
# mean gaps. Networks in single precision are not worth asking for much less.
_TOLERANCE, _PREDICTION_TOLERANCE = 1e-5, 1e-4
# Events of a padded batch outside training; all the states between them are held at once.
_EVENTS_AT_ONCE = 2048


@dataclass(eq=False, repr=False, kw_only=True)
class OsciFormerEventPredictor(TrainedEstimator):
    """A marked temporal point process: rates of events of each type, given those before.

    It is trained by the likelihood of events 2 to N of each sequence. Besides those below it has
    the arguments and attributes of `TrainedEstimator`; all are keywords. X is an `EventSequences`,
    a data frame with a row per event, or a list of pairs `(times, types)`. Defaults of the model
    are those of `EventModelConfig`.

    Args:
        encoder: What reads the history: `osciformer`, or a baseline, see `EventModelConfig`.
        head: What makes rates of it: `mixture`, `softplus`, `decay` or `exponential`.
        dim: Width of the model.
        num_layers: Number of encoder blocks.
        num_heads: Number of heads.
        dropout: Dropout of the model.
        num_components: Components of the `mixture`.
        encoder_options: Further settings of the encoder, by name.
        blend_with: Classical processes to blend the network with, by weights that the validation
            part decides: `renewal` (a histogram of gaps and a Markov chain of types), `repeat`
            (the same with "the last type again"), `hawkes`; or `auto`, all that make sense; None
            for none. It pays where there are few events, see `BlendedProcess`. They are fitted when
            training is done: `history_`, and the model after Ctrl-C, are the network's alone.
        layout: For data frames as X: arguments of `events_from_frame`, such as
            `dict(id="user", time="clicked_at", type="page", unit="h")`.

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

    encoder: str = EventModelConfig.encoder
    head: str = EventModelConfig.head
    dim: int = EventModelConfig.dim
    num_layers: int = EventModelConfig.num_layers
    num_heads: int = EventModelConfig.num_heads
    dropout: float = EventModelConfig.dropout
    num_components: int = EventModelConfig.num_components
    encoder_options: Mapping[str, Any] | None = None
    blend_with: str | Sequence[str] | None = None
    layout: Mapping[str, Any] | None = None

    def fit(self, X: Any, y: Any = None, *, validation_data: Any = None) -> Self:
        """Train on sequences of events.

        Args:
            X: The sequences. Those with fewer than two events have nothing to be predicted, and
                are left out.
            y: Not used.
            validation_data: Sequences for early stopping, in place of a part of X.
        """
        events = event_inputs.as_events(X, self.layout)
        self._check_validation_fraction()
        event_inputs.check_learnable(events)
        self.type_names_ = events.type_names
        self.time_axis_, self.time_unit_ = events.time_axis, events.time_unit
        seed = self._draw_seed()
        some = np.flatnonzero(events.lengths > 1)
        if validation_data is not None:
            validation = self._known_types(validation_data)
            self.validation_index_ = some[:0]
        else:
            generator = np.random.default_rng(seed)
            index, rest = random_split(len(some), self.validation_fraction, generator)
            some, self.validation_index_ = some[index], some[rest]
            validation = events[self.validation_index_]
        validation, events = validation[validation.lengths > 1], events[some]
        event_inputs.check_learnable(events)
        self.horizon_ = HORIZON_GAPS * float(events.gaps.max())
        companions = companions_of(self.blend_with, events.num_types)
        config = self._train_config(seed, len(events))
        network = self._build(seed, events)
        if companions:
            check_can_blend(network, validation)
        self._train(
            network,
            EventLikelihood(),
            self._source(events, config, shuffle=True),
            self._source(validation, config, shuffle=False) if len(validation) else None,
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

    def _source(self, events: EventSequences, config: TrainConfig, *, shuffle: bool) -> EventSource:
        return EventSource(
            events,
            config.batch_size,
            shuffle=shuffle,
            seed=config.seed,
            num_workers=self.num_workers,
        )

    def _build(self, seed: int, events: EventSequences) -> NeuralEventProcess:
        config = EventModelConfig(
            num_types=events.num_types,
            encoder=self.encoder,  # type: ignore[arg-type]
            head=self.head,  # type: ignore[arg-type]
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            dropout=self.dropout,
            num_components=self.num_components,
            encoder_options=dict(self.encoder_options or {}),
        )
        with undisturbed_random_state():
            torch.manual_seed(seed)
            return make_event_model(config).fit_times(events)

    def predict(self, X: Any, *, horizon: float | None = None) -> NextEvents:
        """Return the next event of each sequence: its type, and median and mean of its time.

        Args:
            X: Sequences with an event or more each.
            horizon: Largest gap to consider; `horizon_` if not given.
        """
        events = self._look_again(X)
        event_inputs.refuse_empty(events)
        with self._process() as process:
            return predict_following(
                process,
                events,
                horizon=self.horizon_ if horizon is None else horizon,
                tolerance=_PREDICTION_TOLERANCE,
                batch_size=self._batch_size(events),
                time_unit=self.time_unit_,
            )

    def log_likelihood(self, X: Any, *, span: Span = "events") -> LogLikelihood:
        """Return the log-likelihood of sequences, with its error and the unit of time.

        Args:
            X: Sequences.
            span: `events`, 2 to N given the first; `window`, all in the observed window.
        """
        events = self._look_again(X)
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
        events = self._look_again(X)
        with self._process() as process:
            return score(process, events, **self._scoring(events, horizon))

    def evaluate_sequences(self, X: Any, *, horizon: float | None = None) -> SequenceScores:
        """Return the same of each sequence, so that sequences can be resampled.

        Args:
            X: Sequences.
            horizon: As of `evaluate`.
        """
        events = self._look_again(X)
        with self._process() as process:
            return score_sequences(process, events, **self._scoring(events, horizon))

    def _scoring(self, events: EventSequences, horizon: float | None) -> dict[str, Any]:
        return {
            "horizon": self.horizon_ if horizon is None else horizon,
            "prediction_tolerance": _PREDICTION_TOLERANCE,
            **self._integration(events),
        }

    def _integration(self, events: EventSequences) -> dict[str, Any]:
        return {"tolerance": _TOLERANCE, "batch_size": self._batch_size(events)}

    def calibration(self, X: Any, *, span: Span = "events") -> Calibration:
        """Return the test of time rescaling: integrals of the right rate are exponential.

        Args:
            X: Sequences.
            span: As of `log_likelihood`.
        """
        events = self._look_again(X)
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
        events = self._look_again(X)
        is_list = len(times) > 0 and np.ndim(times[0]) > 0
        if is_list and len(times) != len(events):
            raise ValueError(
                f"times must be one array for all sequences, or a list of {len(events)} arrays, "
                f"one per sequence; got {len(times)}"
            )
        flat, offsets = queries.flatten_times(events, times if is_list else [times] * len(events))
        with self._process() as process:
            rates = rates_at(process, events, flat, offsets, batch_size=self._batch_size(events))
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
        events = self._look_again(X)
        event_inputs.refuse_empty(events)
        last = events.times[events.offsets[1:] - 1]
        ends = np.broadcast_to(np.asarray(until), (len(events),))
        end, _ = queries.flatten_times(
            events, list(ends[:, None]), relative_to=last if relative else None
        )
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        with self._process() as process:
            return draw_futures(
                process,
                events,
                end,
                part_size=max(1, self._batch_size(events) // max(1, num_futures)),
                generator=torch.Generator().manual_seed(seed),
                num_futures=num_futures,
                max_events=max_events,
                is_shown=progress,
            )

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

    def _look_again(self, X: Any) -> EventSequences:
        self._check_fitted()
        return self._known_types(X)

    def _known_types(self, X: Any) -> EventSequences:
        """Return X as sequences with the types and the unit of time of training."""
        events = event_inputs.as_events(X, self.layout, self.type_names_)
        event_inputs.check_same_time((self.time_axis_, self.time_unit_), events)
        return event_inputs.with_types(events, self.type_names_)

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
