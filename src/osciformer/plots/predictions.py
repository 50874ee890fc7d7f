"""Pictures of what a trained model says about single series, as matplotlib figures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer._text import name_some
from osciformer._types import Float, Int
from osciformer.config import TASKS
from osciformer.data.inputs import chunks
from osciformer.data.ragged import offsets_of
from osciformer.data.series import IrregularSeries, concatenate
from osciformer.events.sequences import UNNAMED_UNIT, EventSequences
from osciformer.plots.axes import COLOURS, SEEN, STYLES, legend_below, panels, plain, with_unit

MOST_SERIES = 4  # side by side
MOST_PANELS = 4  # variables or types, one above the other, if none are named
_MOST_LINES = 8  # classes or types in one panel
_NUM_CUTS = 120  # ends of a series at which classes and values are predicted
_NUM_POINTS = 300  # of a curve
_HISTORY = 4.0  # how much of the past is drawn, in horizons of the forecast
_LINE = 18  # letters of a line beside an axis
_BAND = COLOURS[0]


def plot_predictions(
    model: Any, X: Any, *, variables: Sequence[str] | None = None, time: str = "time"
) -> Any:
    """Return a figure of what a fitted model says about some series or sequences of events.

    Forecasts are drawn after the history, and imputations over it, with intervals between the
    quantiles of the model. Probabilities of classes, and values of a regression, are drawn along
    time: at each observation, the prediction if the series ended there. For events it is the rate
    of each type.

    Args:
        model: Any fitted estimator.
        X: One series to four, such as `X[3:4]`.
        variables: Names of the variables to draw; if not given, the four with most observations.
        time: Name of the time axis.
    """
    if getattr(model, "task", None) not in TASKS:
        raise TypeError(f"model must be a fitted estimator; got {type(model).__name__}")
    data = model._validate(X)
    if not 1 <= len(data) <= MOST_SERIES:
        wanted = f"X must hold 1 to {MOST_SERIES} series"
        raise ValueError(f"{wanted}; got {len(data)}. Choose some, as X[:{MOST_SERIES}]")
    if model.task == "events":
        if variables is not None:
            raise ValueError("variables are of series; events have types, which are all drawn")
        return _draw_events(model, data, time)
    data = concatenate(list(chunks(data))).replace(labels=None)
    if (data.lengths == 0).any():
        empty = name_some(data.ids[data.lengths == 0])
        raise ValueError(f"series {empty} has no rows that could be drawn; choose another one")
    if model.task in ("classification", "regression"):
        return _draw_along(model, data, variables, time)
    return _draw_answers(model, data, variables, time)


def _draw_answers(
    model: Any, data: IrregularSeries, variables: Sequence[str] | None, time: str
) -> Any:
    """Draw quantiles over observations: after their end, or among them."""
    targets = list(map(str, model.target_names_))
    names = _choose(data, targets, variables)
    figure, axes = panels(len(names), len(data))
    is_ahead, ends = model.task == "forecasting", model._ends(data)
    for place, one in enumerate(data):
        begin, end = one.times[0], one.times[-1]
        if is_ahead:
            begin = max(begin, ends[place] - _HISTORY * model.horizon_)
            steps = np.linspace(0, model.horizon_, _NUM_POINTS + 1)[1:]
            asked = ends[place] + steps
        else:
            asked = np.unique(np.append(np.linspace(begin, end, _NUM_POINTS), one.times))
        moments = asked if data.time_axis.kind != "number" else _moments(data, asked, place)
        (found,) = model.predict_quantiles(data[place : place + 1], [moments])
        x = _moments(data, asked, place)
        for name, axis in zip(names, axes[:, place], strict=True):
            _band(axis, x, found[:, targets.index(name)], tuple(map(float, model.quantiles)))
            kept = one.times >= begin
            values = one.values[kept, data.feature_names.index(name)]
            seen = ~np.isnan(values)
            axis.plot(
                _moments(data, one.times[kept][seen], place),
                values[seen],
                "o",
                color=SEEN,
                markersize=3,
                label="observed",
            )
            if is_ahead:
                now = _moments(data, ends[place : place + 1], place)[0]
                axis.axvline(now, color="0.6", linestyle=":", linewidth=1)
    _finish(figure, axes, names, data, time)
    return figure


def _draw_along(
    model: Any, data: IrregularSeries, variables: Sequence[str] | None, time: str
) -> Any:
    """Draw the prediction along time above the observations."""
    names = _choose(data, list(data.feature_names), variables)
    is_class = model.task == "classification"
    answers = []
    for place in range(len(data)):
        series, cuts = cut_along(data[place : place + 1], _NUM_CUTS)
        found = model.predict_proba(series) if is_class else model.predict(series)
        answers.append((cuts, found.reshape(len(cuts), -1)))
    if is_class:
        classes = model.classes_.tolist()
        final = np.stack([found[-1] for _, found in answers]).max(axis=0)
        top = np.sort(np.argsort(-final, kind="stable")[:_MOST_LINES])
        groups = [[1] if len(classes) == 2 else top.tolist()]
        titles = [f"probability of {plain(classes[1])}" if len(classes) == 2 else "probability"]
        labels = [plain(name) for name in classes]
    else:
        count = answers[0][1].shape[1]
        groups, labels = [[number] for number in range(count)], ["prediction"] * count
        titles = ["prediction"] if count == 1 else [f"target {number}" for number in range(count)]
    figure, axes = panels(len(groups) + len(names), len(data))
    for place, (cuts, found) in enumerate(answers):
        x = _moments(data, cuts, place)
        for axis, group in zip(axes[:, place], groups, strict=False):
            for number, column in enumerate(group):
                style = {"color": COLOURS[number], "linestyle": STYLES[number]}
                axis.plot(
                    x, found[:, column], drawstyle="steps-post", label=labels[column], **style
                )
                axis.plot(x[-1:], found[-1:, column], "o", color=COLOURS[number], markersize=4)
            if is_class:
                axis.set_ylim(-0.03, 1.03)
        for name, axis in zip(names, axes[len(groups) :, place], strict=True):
            values = data[place].values[:, data.feature_names.index(name)]
            seen = ~np.isnan(values)
            when = _moments(data, data[place].times[seen], place)
            axis.plot(when, values[seen], "o-", color=SEEN, markersize=3, linewidth=0.6)
    _finish(figure, axes, [*titles, *names], data, time)
    return figure


def _draw_events(model: Any, data: EventSequences, time: str) -> Any:
    """Draw the rates of types along time, with a row of events for each type below."""
    names = [plain(name) for name in data.type_names]
    is_sum = len(names) > _MOST_LINES
    figure, axes = panels(2, len(data), heights=(3.0, 0.5 + 0.22 * (1 if is_sum else len(names))))
    for place, one in enumerate(data):
        known = [t for t in (one.start, *one.times, one.end) if t is not None]
        begin, end = min(known, default=0.0), max(known, default=0.0)
        if not end > begin:
            raise ValueError(f"sequence {one.id!s} has no length that could be drawn")
        after = np.nextafter(one.times, np.inf)
        grid = np.concatenate(
            [np.linspace(begin, end, _NUM_POINTS), one.times, after[after <= end]]
        )
        grid = np.unique(grid)
        x = _moments(data, grid, place)
        asked = x if data.time_axis.kind == "number" else grid
        (rates,) = model.intensity(data[[place]], [asked])
        types = 0 * one.types if is_sum else one.types
        rates = rates.sum(axis=1, keepdims=True) if is_sum else rates
        rows = ["all types"] if is_sum else names
        for number, name in enumerate(rows):
            style = {"color": COLOURS[number], "linestyle": STYLES[number], "linewidth": 1.2}
            axes[0, place].plot(x, rates[:, number], label=name, **style)
            when = _moments(data, one.times[types == number], place)
            height = np.full(len(when), number)
            axes[1, place].plot(when, height, "|", color=COLOURS[number], markersize=8)
        axes[0, place].set_ylim(bottom=0)
        axes[1, place].set(ylim=(len(rows) - 0.4, -0.6), yticks=range(len(rows)), yticklabels=rows)
    unit = data.time_unit
    per = "events per unit of time" if unit == UNNAMED_UNIT else f"events per {plain(unit)}"
    _finish(figure, axes, [per, "events"], data, time)
    for axis in axes[1]:
        axis.set_ylabel("")
    return figure


def _choose(data: IrregularSeries, known: list[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the variables to draw: those wanted, or the ones with most observations."""
    if wanted is not None:
        absent = [name for name in wanted if name not in known]
        if absent or not wanted:
            raise ValueError(f"variables must be among {name_some(known)}; got {list(wanted)}")
        return list(wanted)
    counts = (~np.isnan(data.values)).sum(axis=0)
    places = [data.feature_names.index(name) for name in known]
    top = np.argsort(-counts[places], kind="stable")[:MOST_PANELS]
    return [known[number] for number in np.sort(top)]


def cut_along(one: IrregularSeries, most: int) -> tuple[IrregularSeries, Float[np.ndarray, "k"]]:
    """Return the one series up to each of its times, or to `most` of them, and these times."""
    cuts = np.unique(one.times)
    cuts = cuts[np.unique(np.linspace(0, len(cuts) - 1, most).round().astype(np.int64))]
    lengths: Int[np.ndarray, "k"] = np.searchsorted(one.times, cuts, side="right")
    rows = np.concatenate([np.arange(length) for length in lengths])
    copies = one.take(np.zeros(len(cuts), dtype=np.int64))
    changes = {"times": one.times[rows], "values": one.values[rows], "offsets": offsets_of(lengths)}
    return copies.replace(**changes, static_names=one.static_names), cuts


def _moments(
    data: IrregularSeries | EventSequences, times: Float[np.ndarray, "T"], place: int
) -> np.ndarray:
    """Return times of one series as they are drawn: numbers in their unit, or dates."""
    if data.time_axis.kind == "duration":
        return np.asarray(times)
    return data.decode_times(times, np.full(len(times), place))


def _band(
    axis: Any, x: np.ndarray, found: Float[np.ndarray, "M L"], levels: tuple[float, ...]
) -> None:
    """Draw the median, and an interval for each level below it that has a counterpart above."""
    mixed = need("matplotlib.colors", extra="plot").to_rgb(_BAND)
    for number in range(len(levels) // 2):
        low, high = levels[number], levels[-1 - number]
        if low < 0.5 < high:
            label, ends = f"{high - low:.0%} interval", (found[:, number], found[:, -1 - number])
            # Opaque, so that the legend has the colours of the picture.
            part = 0.6 * (number + 1) / (len(levels) // 2 + 1)
            shade = [1.0 - part * (1.0 - channel) for channel in mixed]
            axis.fill_between(x, *ends, color=shade, linewidth=0, label=label)
    median = found[:, levels.index(0.5)]
    axis.plot(x, median, color=_BAND, linewidth=1.4, label="median")


def _finish(
    figure: Any, axes: Any, titles: Sequence[str], data: IrregularSeries | EventSequences, time: str
) -> None:
    """Label axes and series, and explain lines once."""
    kind, unit = data.time_axis.kind, data.time_axis.unit
    label = with_unit(plain(time), unit if kind == "duration" else None)
    if kind == "datetime":
        label += ", UTC" if data.time_axis.timezone else ""
        dates = need("matplotlib.dates", extra="plot")
        for axis in axes[-1]:
            few, many = (3, 8) if axes.shape[1] == 1 else (2, 5)
            locator = dates.AutoDateLocator(minticks=few, maxticks=many)
            axis.xaxis.set(
                major_locator=locator, major_formatter=dates.ConciseDateFormatter(locator)
            )
    for axis, name in zip(axes[:, 0], titles, strict=True):
        axis.set_ylabel("\n".join(textwrap.wrap(plain(name), _LINE)))
    for axis, id in zip(axes[0], data.ids.tolist(), strict=True):
        axis.set_title(plain(id), fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel(label)
    legend_below(figure, axes[0, 0])
