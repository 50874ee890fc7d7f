"""Parts of what an event predictor is asked, and of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from osciformer._optional import need
from osciformer._types import Bool, Float, Int, Tensor
from osciformer.data.ragged import offsets_of
from osciformer.estimators.next_events import NextEvents
from osciformer.events.prediction import Futures, predict_last, sample
from osciformer.events.process import EventProcess
from osciformer.events.sequences import EventSequences


def padded_queries(
    times: Float[np.ndarray, "Q"], offsets: Int[np.ndarray, "n+1"], index: Int[np.ndarray, "B"]
) -> tuple[Float[Tensor, "B M"], Int[np.ndarray, "q"], Bool[np.ndarray, "B M"]]:
    """Return the query times of some sequences side by side, their rows, and where they stand.

    Args:
        times: Query times of all sequences, one after another.
        offsets: Where those of each sequence begin.
        index: The sequences.

    Example:
        >>> padded_queries(np.array([1.0, 2.0, 3.0]), np.array([0, 2, 3]), np.array([1, 0]))[0]
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
def rates_at(
    process: EventProcess,
    events: EventSequences,
    times: Float[np.ndarray, "Q"],
    offsets: Int[np.ndarray, "n+1"],
    *,
    batch_size: int,
) -> Float[np.ndarray, "Q K"]:
    """Return the rates of all types at times of each sequence.

    Args:
        process: Whose rates.
        events: The sequences.
        times: Query times of all sequences, one after another.
        offsets: Where those of each sequence begin.
        batch_size: Sequences per batch.
    """
    rates = np.empty((len(times), events.num_types))
    for batch in events.batches(batch_size):
        assert batch.index is not None
        asked, rows, is_asked = padded_queries(times, offsets, batch.index.numpy())
        found = process.intensity(batch.to(process.device), asked.to(process.device))
        rates[rows] = found.cpu().numpy()[is_asked]
    return rates


def predict_following(
    process: EventProcess,
    events: EventSequences,
    *,
    horizon: float,
    tolerance: float,
    batch_size: int,
    time_unit: str,
) -> NextEvents:
    """Return what follows the last event of each sequence.

    Args:
        process: What predicts it.
        events: Sequences with an event or more each.
        horizon: Largest gap to consider.
        tolerance: Of probabilities, and of gaps in mean gaps.
        batch_size: Sequences per batch.
        time_unit: Name of the unit of the gaps.
    """
    count, last = len(events), events.times[events.offsets[1:] - 1]
    gaps, chances = np.empty((3, count)), np.empty((count, events.num_types))
    for batch in events.batches(batch_size):
        assert batch.index is not None
        index = batch.index.numpy()
        found = predict_last(
            process,
            batch.to(process.device),
            horizon=horizon,
            tolerance=tolerance,
            negligible=tolerance,
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


def draw_futures(
    process: EventProcess,
    events: EventSequences,
    until: Float[np.ndarray, "n"],
    *,
    part_size: int,
    generator: torch.Generator,
    num_futures: int,
    max_events: int,
    is_shown: bool,
) -> Futures:
    """Return futures of sequences, a part of these at a time, named as they are.

    Args:
        process: Where they are drawn from.
        events: The sequences.
        until: Where the futures of each one end.
        part_size: Sequences per part.
        generator: Source of randomness.
        num_futures: Futures of each sequence.
        max_events: Largest number of events of a future.
        is_shown: Whether to show a bar.
    """
    parts = []
    with _progress_bar(num_futures * len(events), is_shown) as show:
        for first in range(0, len(events), part_size):
            index = np.arange(first, min(first + part_size, len(events)))

            def report(done: int, _: int, before: int = num_futures * first) -> None:
                show(before + done)

            parts.append(
                sample(
                    process,
                    events.batch(index),
                    until=torch.from_numpy(until[index]),
                    generator=generator,
                    num_futures=num_futures,
                    max_events=max_events,
                    progress=report,
                )
            )
    return _join(parts, events, part_size)


def _join(parts: Sequence[Futures], events: EventSequences, part_size: int) -> Futures:
    """Return the futures of consecutive parts of sequences together, named as these are.

    Args:
        parts: Futures of the first sequences, of the following ones, and so on.
        events: The sequences that they continue.
        part_size: Sequences per part.
    """
    drawn = [part.sequences for part in parts]
    source = np.concatenate([k * part_size + part.source for k, part in enumerate(parts)])
    lengths = np.concatenate([item.lengths for item in drawn])
    sequences = EventSequences(
        np.concatenate([item.times for item in drawn]),
        np.concatenate([item.types for item in drawn]),
        offsets_of(lengths),
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
    """Give a function that is told how many futures are drawn, and shows it if that is wanted.

    Args:
        total: Number of futures.
        is_shown: Whether to show a bar.
    """
    if not is_shown:
        yield lambda done: None
        return
    bar: Any = need("tqdm", extra="train").tqdm(
        total=total, unit="future", desc="sampling", dynamic_ncols=True
    )

    def show(done: int) -> None:
        bar.update(done - bar.n)

    with bar:
        yield show
