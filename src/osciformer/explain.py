"""Which variables and times matter to a trained model: on the whole, and for one prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from osciformer._optional import need
from osciformer._types import Bool, Float, Int
from osciformer.config import SERIES_TASKS, VALUE_TASKS
from osciformer.data.inputs import chunks, take
from osciformer.data.ragged import offsets_of, series_of_rows
from osciformer.data.series import IrregularSeries, concatenate
from osciformer.estimators.labels import encode_classes, read_labels

__all__ = ["leave_one_out", "occlusion", "permutation_importance"]

_ABOUT = ("id", "part", "variable", "start", "end", "output")
_COLUMNS = (*_ABOUT, "prediction", "without", "effect", "low", "high")
_LEFT_OUT = ("id", "row", "variable", "time", "value", "output", "prediction", "without", "effect")
_ROUNDS = 1000  # of the bootstrap over series
_LEVELS = (0.025, 0.975)
_CALL_SERIES, _CALL_VALUES = 2048, 10**7  # altered series that share a call of `predict`


def permutation_importance(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    n_repeats: int = 5,
    max_samples: int = 1000,
    random_state: int = 0,
    verbose: int = 0,
) -> Any:
    """Return how much worse a model gets if a variable comes from another series.

    A series gets all observations of the variable from another one: at their times, shifted if the
    two do not overlap, or, if made together with others, in the row that is nearest in time.
    What a variable tells together with others counts for each of them, and what several tell alike
    for none.

    Args:
        model: A fitted classifier, regressor, forecaster or imputer.
        X: Series that were not in training.
        y: Their labels; those of X if not given. Forecasters and imputers need none: they are
            scored on values that are hidden, as in `score`.
        n_repeats: How often each variable is exchanged.
        max_samples: Most series that are used, drawn at random.
        random_state: Seed.
        verbose: 1 shows a progress bar.

    Returns:
        A pandas data frame with a row per variable, the most important first: `variable`, `kind`
        (`series` or `static`), `importance`, the mean increase of the loss, and `low` and `high`,
        its 95 % interval over series. The loss is `log_loss` in nats or `absolute_error`, in the
        unit of the target, or, of several targets, in spreads of each; the column `loss` says it.
    """
    _check(model, VALUE_TASKS)
    if n_repeats < 1 or max_samples < 2:
        given = f"{n_repeats} and {max_samples}"
        raise ValueError(f"n_repeats must be 1 or more, and max_samples 2 or more; got {given}")
    rng = np.random.default_rng(random_state)
    data = model._validate(X)
    if len(data) < 2:
        raise ValueError("X must hold at least two series; use occlusion for a single one")
    chosen = np.sort(rng.permutation(len(data))[:max_samples])
    labels = read_labels(data, y)[chosen] if model.task in SERIES_TASKS else None
    series = concatenate(list(chunks(take(data, chosen)))).replace(labels=None)
    if labels is not None:
        losses = _judge_labels(model, series, labels)
    else:
        series, losses = _judge_hidden(model, series, rng)
    names = [*series.feature_names, *series.static_names]
    (before,) = losses(series, 1)
    scored = np.isfinite(before)
    if not scored.any():
        raise ValueError("X has nothing to score: no value could be hidden")

    def exchanged() -> Iterator[IrregularSeries]:
        for column in range(len(names)):
            for _ in range(n_repeats):
                yield _exchange(series, _donors(len(series), rng), column)

    total = len(names) * n_repeats
    found = np.stack(list(_in_groups(exchanged(), losses, total, verbose)))
    worse = (found.reshape(len(names), n_repeats, -1).mean(axis=1) - before)[:, scored]
    share = rng.multinomial(worse.shape[1], np.full(worse.shape[1], 1 / worse.shape[1]), _ROUNDS)
    low, high = np.quantile(worse @ share.T / worse.shape[1], _LEVELS, axis=1)
    kinds = ["series"] * series.num_features + ["static"] * len(series.static_names)
    columns = {"variable": names, "kind": kinds, "importance": worse.mean(axis=1)}
    columns |= {"low": low, "high": high}
    columns["loss"] = "log_loss" if model.task == "classification" else "absolute_error"
    frame = need("pandas", extra="data").DataFrame(columns)
    return frame.sort_values("importance", ascending=False, ignore_index=True, kind="stable")


def occlusion(
    model: Any,
    X: Any,
    background: Any = None,
    *,
    n_windows: int = 10,
    n_samples: int = 20,
    random_state: int = 0,
    verbose: int = 0,
) -> Any:
    """Return how predictions change if parts of a series are left out, or come from others.

    The parts are each variable, each static feature, each window of time, and each variable in each
    window; rows that held nothing else go with them. Parts without any value are not listed.

    Args:
        model: A fitted classifier, regressor or forecaster.
        X: One series or a few, such as `X[3:4]`.
        background: Series whose like parts take the place of what is left out. Without them nothing
            does, and models that never met a series without a variable may be led astray.
        n_windows: Windows of equal length from the first row of a series to the last.
        n_samples: Most series of the background that are used, drawn at random.
        random_state: Seed of this draw.
        verbose: 1 shows a progress bar.

    Returns:
        A pandas data frame with a row per series, part and output: `id`; `part` (`variable`,
        `static`, `time` or `cell`, a variable in a window); `variable`, `start` and `end`, null
        where they do not apply; `output`, a class (of two, the second), the number of a target, or
        the variable that is forecast; `prediction`, the probability of the class, the value, or
        the forecast at the horizon of training; `without`, the same without the part, a mean over
        the background; `effect`, their difference: what the part adds; and `low` and `high`,
        between which 95 % of the background put it.
    """
    _check(model, (*SERIES_TASKS, "forecasting"))
    if n_windows < 1 or n_samples < 1:
        given = f"{n_windows} and {n_samples}"
        raise ValueError(f"n_windows and n_samples must be 1 or more; got {given}")
    data = concatenate(list(chunks(model._validate(X)))).replace(labels=None)
    fill = None
    if background is not None:
        others = model._validate(background)
        chosen = np.random.default_rng(random_state).permutation(len(others))[:n_samples]
        fill = concatenate(list(chunks(take(others, np.sort(chosen))))).replace(labels=None)
    copies = 1 if fill is None else len(fill)
    parts = [
        (place, part)
        for place in range(len(data))
        for part in _parts_of(data[place : place + 1], n_windows)
    ]
    outputs, predict = _predictor(model, data)
    places = iter([place for place, _ in parts])

    def altered() -> Iterator[IrregularSeries]:
        for place, part in parts:
            yield _replace(data.take([place] * copies), part, fill)

    def answer(group: IrregularSeries, count: int) -> Float[np.ndarray, "k n O"]:
        owner = np.repeat([next(places) for _ in range(count)], copies)
        return predict(group, owner).reshape(count, copies, -1)

    whole = predict(data, np.arange(len(data)))
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for (place, part), left in zip(
        parts, _in_groups(altered(), answer, len(parts), verbose), strict=True
    ):
        bounds = (None, None) if part.span is None else data.decode_times(part.span, [place] * 2)
        for output, before, after in zip(outputs, whole[place], left.T, strict=True):
            effect = before - after.mean()
            ends = np.quantile(before - after, _LEVELS)
            row = (data.ids[place], part.kind, part.variable, *bounds, output)
            row += (before, after.mean(), effect, *ends)
            for name, entry in zip(columns, row, strict=True):
                columns[name].append(entry)
    frame = need("pandas", extra="data").DataFrame(columns)
    return frame.drop(columns=["low", "high"]) if fill is None else frame


def leave_one_out(model: Any, X: Any, *, max_observations: int = 500, verbose: int = 0) -> Any:
    """Return how predictions change if single observations had not been made.

    Args:
        model: A fitted classifier, regressor or forecaster.
        X: One series or a few, such as `X[3:4]`.
        max_observations: Most observations of a series that are left out; the last ones.
        verbose: 1 shows a progress bar.

    Returns:
        A pandas data frame with a row per series, observation and output: `id`, `row` (its number
        within the series), `variable`, `time`, `value`, and `output`, `prediction`, `without` and
        `effect` as `occlusion` has them.
    """
    _check(model, (*SERIES_TASKS, "forecasting"))
    if max_observations < 1:
        raise ValueError(f"max_observations must be 1 or more; got {max_observations}")
    data = concatenate(list(chunks(model._validate(X)))).replace(labels=None)
    found = []  # of each observation: the series, the row within it, the column
    for place, one in enumerate(data):
        seen = np.argwhere(~np.isnan(one.values))[-max_observations:]
        found += [(place, *entry) for entry in seen.tolist()]
    outputs, predict = _predictor(model, data)
    places = iter([place for place, _, _ in found])

    def altered() -> Iterator[IrregularSeries]:
        for place, row, column in found:
            one = data.take([place])
            values = one.values.copy()
            values[row, column] = np.nan
            kept = np.arange(len(values)) != row if not _is_seen(values)[row] else slice(None)
            times, left = one.times[kept], values[kept]
            changes = {"times": times, "values": left, "offsets": np.array([0, len(times)])}
            yield one.replace(**changes, static_names=one.static_names)

    def answer(group: IrregularSeries, count: int) -> Float[np.ndarray, "k 1 O"]:
        return predict(group, np.array([next(places) for _ in range(count)]))[:, None]

    whole = predict(data, np.arange(len(data)))
    columns: dict[str, list[Any]] = {name: [] for name in _LEFT_OUT}
    answers = _in_groups(altered(), answer, len(found), verbose)
    for (place, row, column), (without,) in zip(found, answers, strict=True):
        at = int(data.offsets[place]) + row
        (moment,) = data.decode_times(data.times[at : at + 1], [place])
        about = data.ids[place], row, data.feature_names[column], moment, data.values[at, column]
        for output, before, after in zip(outputs, whole[place], without, strict=True):
            entries = (*about, output, before, after, before - after)
            for name, entry in zip(columns, entries, strict=True):
                columns[name].append(entry)
    return need("pandas", extra="data").DataFrame(columns)


def _check(model: Any, tasks: tuple[str, ...]) -> None:
    if getattr(model, "task", None) not in tasks:
        name = type(model).__name__
        raise TypeError(f"model must be a fitted estimator for {' or '.join(tasks)}; got {name}")


def _in_groups(
    variants: Iterable[IrregularSeries],
    answer: Callable[[IrregularSeries, int], np.ndarray],
    total: int,
    verbose: int,
) -> Iterator[np.ndarray]:
    """Yield the answer to each of `total` containers; many small ones share a call."""
    bar = need("tqdm", extra="train").tqdm(
        total=total, desc="explaining", unit="part", disable=verbose != 1
    )
    group: list[IrregularSeries] = []

    def settle() -> Iterator[np.ndarray]:
        yield from answer(concatenate(group), len(group))
        bar.update(len(group))
        group.clear()

    with bar:
        for variant in variants:
            group.append(variant)
            sizes = (sum(map(len, group)), sum(item.values.size for item in group))
            if sizes[0] >= _CALL_SERIES or sizes[1] >= _CALL_VALUES:
                yield from settle()
        if group:
            yield from settle()


def _judge_labels(
    model: Any, series: IrregularSeries, labels: np.ndarray
) -> Callable[[IrregularSeries, int], np.ndarray]:
    """Return what gives the losses [k, n] of k altered versions of all series."""
    count = len(series)
    if model.task == "classification":
        classes = encode_classes(labels, model.classes_)

        def losses(group: IrregularSeries, copies: int) -> Float[np.ndarray, "k n"]:
            chances = model.predict_log_proba(group).reshape(copies, count, -1)
            found: np.ndarray = -chances[:, np.arange(count), classes]
            return found

        return losses
    truth = model._scaled(labels)
    unit = model.target_scale_ if truth.shape[1] == 1 else 1.0

    def errors(group: IrregularSeries, copies: int) -> Float[np.ndarray, "k n"]:
        values = model.predict(group).reshape(copies, count, -1)
        scaled = (values - model.target_center_) / model.target_scale_
        found: np.ndarray = (np.abs(scaled - truth) * unit).mean(axis=2)
        return found

    return errors


def _judge_hidden(
    model: Any, series: IrregularSeries, rng: np.random.Generator
) -> tuple[IrregularSeries, Callable[[IrregularSeries, int], np.ndarray]]:
    """Return scaled series with values hidden, and the loss of them as `_judge_labels` does."""
    count, is_target = len(series), model._columns.is_target
    shown, asked = model._scoring()[0](model._scale(series), rng)
    truth, owner = asked.values[:, is_target], series_of_rows(asked.offsets)
    unit = model.transform_.value_scaler.scale[is_target] if is_target.sum() == 1 else 1.0
    known = np.bincount(owner, weights=(~np.isnan(truth)).sum(axis=1), minlength=count)

    def losses(group: IrregularSeries, copies: int) -> Float[np.ndarray, "k n"]:
        queries = asked.take(np.tile(np.arange(count), copies))
        found = model._median_of(model._answer(group, queries)).reshape(copies, *truth.shape)
        errors = np.nansum(np.abs(found - truth) * unit, axis=2)
        sums = [np.bincount(owner, weights=error, minlength=count) for error in errors]
        with np.errstate(invalid="ignore"):
            return np.stack(sums) / np.where(known > 0, known, np.nan)

    return shown, losses


def _donors(count: int, rng: np.random.Generator) -> Int[np.ndarray, "n"]:
    """Return another series for each: a random cycle through all of them."""
    order, donors = rng.permutation(count), np.empty(count, dtype=np.int64)
    donors[order] = np.roll(order, 1)
    return donors


def _exchange(
    series: IrregularSeries, donors: Int[np.ndarray, "n"], column: int
) -> IrregularSeries:
    """Return the series with a variable, or a static feature after them, from the donors."""
    is_it = np.arange(series.num_features) == column
    place = column - series.num_features if column >= series.num_features else None
    return _replace(series, _Part("", None, None, is_it, place), series.take(donors))


class _Part(NamedTuple):
    """A part of a series: variables, in all times or within a window, or a static feature."""

    kind: str
    variable: str | None
    span: tuple[float, float] | None
    columns: Bool[np.ndarray, "F"]
    static: int | None = None
    is_closed: bool = False  # whether the end of the span belongs to it

    def covers(self, times: Float[np.ndarray, "T"]) -> Bool[np.ndarray, "T F"]:
        """Return which values at some times belong to it."""
        low, high = self.span or (-np.inf, np.inf)
        inside = (times >= low) & (times < high)
        return np.outer(inside | (self.is_closed & (times == high)), self.columns)


def _replace(
    series: IrregularSeries, part: _Part, given: IrregularSeries | None
) -> IrregularSeries:
    """Return series without a part, or with that of another series [n] in its place.

    What was observed together with other variables is put into the row nearest in time, what was
    observed alone keeps its time: more rows, or others, would be unlike what the model has met.
    """
    if part.static is not None:
        assert series.static is not None
        static = series.static.copy()
        blank = np.float32(np.nan)
        static[:, part.static] = (
            blank if given is None or given.static is None else given.static[:, part.static]
        )
        return series.replace(static=static, static_names=series.static_names)
    own = np.where(part.covers(series.times), np.float32(np.nan), series.values)
    # When something was observed is a part of what it tells: rows that become blank go.
    kept = ~_is_seen(series.values) | _is_seen(own)
    times, values, owner = series.times[kept], own[kept], series_of_rows(series.offsets)[kept]
    nth = _repetition(times, owner)
    if given is not None:
        when = given.times + _shifts(series, given)
        new = np.where(part.covers(when), given.values, np.float32(np.nan))
        has = _is_seen(new)
        owner_new, is_shared = (
            series_of_rows(given.offsets),
            _is_seen(given.values[:, ~part.columns]),
        )
        when, new, owner_new, is_shared = (x[has] for x in (when, new, owner_new, is_shared))
        nth_new = _repetition(when, owner_new)
        each = np.arange(1, len(series))
        guests, seats = (
            np.flatnonzero(is_shared),
            np.flatnonzero(_is_seen(values[:, ~part.columns])),
        )
        for some, free in zip(
            np.split(guests, np.searchsorted(owner_new[guests], each)),
            np.split(seats, np.searchsorted(owner[seats], each)),
            strict=True,
        ):
            seated, taken = _seat(when[some], times[free])
            when[some[seated]], nth_new[some[seated]] = times[free[taken]], nth[free[taken]]
        times, values = np.concatenate([times, when]), np.concatenate([values, new])
        owner, nth = np.concatenate([owner, owner_new]), np.concatenate([nth, nth_new])
    order = np.lexsort((nth, times, owner))
    keys = np.stack([owner, times, nth])[:, order]
    begins = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))[: len(order)]
    merged = values[order][begins]
    met, second = np.cumsum(begins)[~begins] - 1, values[order][~begins]
    merged[met] = np.where(np.isnan(second), merged[met], second)
    lengths = np.bincount(owner[order][begins], minlength=len(series))
    return series.replace(times=times[order][begins], values=merged, offsets=offsets_of(lengths))


def _is_seen(values: Float[np.ndarray, "T F"]) -> Bool[np.ndarray, "T"]:
    """Return which rows hold any value."""
    return (~np.isnan(values)).any(axis=1)


def _seat(
    wanted: Float[np.ndarray, "m"], offered: Float[np.ndarray, "N"]
) -> tuple[Int[np.ndarray, "k"], Int[np.ndarray, "k"]]:
    """Return which of rising times get which of those offered: in order, one each, the nearest.

    If fewer are offered than wanted, evenly chosen ones get one.

    Example:
        >>> _seat(np.array([0.1, 0.2, 5.0]), np.array([0.0, 1.0, 2.0, 6.0]))
        (array([0, 1, 2]), array([0, 1, 3]))
    """
    count = min(len(wanted), len(offered))
    chosen = np.linspace(0, max(len(wanted) - 1, 0), count).round().astype(np.int64)
    nearest = np.searchsorted(0.5 * (offered[1:] + offered[:-1]), wanted[chosen])
    step = np.arange(count)
    places = np.maximum.accumulate(nearest - step) + step  # no two at one place
    return chosen, np.minimum(places, len(offered) - count + step)


def _repetition(times: Float[np.ndarray, "T"], owner: Int[np.ndarray, "T"]) -> np.ndarray:
    """Return how many rows of the same series and time come before each row."""
    places = np.arange(len(times))
    begins = np.append(True, (np.diff(times) != 0) | (np.diff(owner) != 0))[: len(times)]
    return places - np.maximum.accumulate(np.where(begins, places, 0))


def _shifts(series: IrregularSeries, given: IrregularSeries) -> Float[np.ndarray, "T"]:
    """Return what to add to the times of the donors' rows: 0, unless two series do not overlap."""
    (start, end), (start_given, end_given) = _ends(series), _ends(given)
    is_apart = (start > end_given) | (start_given > end)
    shift = np.where(is_apart, start - start_given, 0.0)
    return np.repeat(shift, given.lengths)


def _ends(series: IrregularSeries) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Return the first and last time of each series; NaN, which overlaps all, without rows."""
    start = np.full(len(series), np.nan)
    some = series.lengths > 0
    start[some] = series.times[series.offsets[:-1][some]]
    return start, start + series.spans


def _parts_of(one: IrregularSeries, n_windows: int) -> Iterator[_Part]:
    """Yield the parts of the one series of a container that hold any value."""
    names = one.feature_names
    every, each = np.ones(len(names), dtype=bool), np.eye(len(names), dtype=bool)
    for place, name in enumerate(one.static_names):
        if one.static is not None and not np.isnan(one.static[0, place]):
            yield _Part("static", name, None, ~every, place)
    found = [_Part("variable", name, None, it) for name, it in zip(names, each, strict=True)]
    if len(one.times):
        edges = np.linspace(one.times[0], one.times[-1], n_windows + 1 if one.spans[0] > 0 else 2)
        spans = [(low, high) for low, high in pairwise(edges.tolist())]
        is_last = [span is spans[-1] for span in spans]
        for span, last in zip(spans, is_last, strict=True):
            found.append(_Part("time", None, span, every, is_closed=last))
        for span, last in zip(spans, is_last, strict=True):
            for name, it in zip(names, each, strict=True):
                found.append(_Part("cell", name, span, it, is_closed=last))
    seen = ~np.isnan(one.values)
    yield from (part for part in found if (part.covers(one.times) & seen).any())


def _predictor(
    model: Any, data: IrregularSeries
) -> tuple[list[Any], Callable[[IrregularSeries, np.ndarray], np.ndarray]]:
    """Return names of outputs, and what predicts them [k, O] for altered series of `data`."""
    if model.task == "classification":
        skipped = 1 if len(model.classes_) == 2 else 0
        names = model.classes_.tolist()[skipped:]
        return names, lambda group, _: model.predict_proba(group)[:, skipped:]
    if model.task == "regression":
        count = len(model.target_scale_)
        return list(range(count)), lambda group, _: model.predict(group).reshape(-1, count)
    ahead = data.decode_times(model._ends(data) + model.horizon_, np.arange(len(data)))

    def forecast(group: IrregularSeries, places: np.ndarray) -> Float[np.ndarray, "k O"]:
        return np.concatenate(model.predict(group, list(ahead[places][:, None])))

    return list(map(str, model.target_names_)), forecast
