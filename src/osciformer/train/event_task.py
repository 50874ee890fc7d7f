"""Training of neural point processes: the log-likelihood of events as a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from osciformer._types import Float, Tensor
from osciformer.events.likelihood import LikelihoodTerms
from osciformer.events.sequences import EventBatch
from osciformer.train.scores import Scores
from osciformer.train.tasks import Task


@dataclass(frozen=True)
class EventLikelihood(Task):
    """Negative log-likelihood of the events of sequences, each given those before it.

    The model returns `LikelihoodTerms`, as `NeuralEventProcess` does. The loss is in nats per
    scored event; the unit of time is that of the data.

    Attributes:
        monitor: Metric that picks the best epoch.
    """

    monitor: str = "log_likelihood"
    metrics = ("log_likelihood", "macro_log_likelihood")

    def loss(
        self, output: LikelihoodTerms, batch: EventBatch
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return minus the log-likelihood of the scored events, and how many there are."""
        total = -output.per_sequence.sum()
        return total, output.scored.sum().to(total.dtype)

    def new_scores(self) -> Scores:
        """Return an empty collection of log-likelihoods."""
        return LikelihoodScores()


class LikelihoodScores(Scores):
    """Micro and macro average of the log-likelihood; a sequence that came twice counts once."""

    def __init__(self) -> None:
        self._parts: list[Float[np.ndarray, "B 4"]] = []

    def add(self, output: LikelihoodTerms, batch: EventBatch) -> None:
        """Take the sequences of a batch into account."""
        assert batch.index is not None
        columns = (
            batch.index,
            output.per_sequence.detach(),
            output.scored.sum(dim=1),
            output.num_events,
        )
        self._parts.append(np.stack([c.cpu().double().numpy() for c in columns], axis=1))

    def state(self) -> Float[np.ndarray, "n 4"]:
        """Return position, log-likelihood, scored events and events of each sequence."""
        return np.concatenate([np.empty((0, 4)), *self._parts])

    @staticmethod
    def result(states: Sequence[Any]) -> dict[str, float]:
        """Return both averages, as of `LogLikelihood`; NaN if nothing was scored."""
        rows = np.concatenate(states)
        _, first = np.unique(rows[:, 0], return_index=True)
        rows = rows[first]
        total, scored, count = (column[rows[:, 2] > 0] for column in rows.T[1:])
        if not len(total):
            return dict.fromkeys(EventLikelihood.metrics, float("nan"))
        return {
            "log_likelihood": float(total.sum() / scored.sum()),
            "macro_log_likelihood": float((total / count).mean()),
        }
