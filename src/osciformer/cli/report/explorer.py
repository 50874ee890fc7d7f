"""A few series explained: what was observed, what was predicted from it, and what decided it."""

from __future__ import annotations

from typing import Any

import numpy as np

from osciformer.cli.report.charts import Plain, length, numbers, text
from osciformer.config import SERIES_TASKS
from osciformer.events.sequences import UNNAMED_UNIT
from osciformer.explain import leave_one_out
from osciformer.inspection import LayerAttention, attend_series
from osciformer.plots.axes import with_unit
from osciformer.plots.predictions import cut_along

NUM_SERIES = 3  # that are explained if none are named
_MOST_STEPS = 40  # of time, at which predictions and attention are shown
_MOST_OUTPUTS = 4
_MOST_RESPONSES = 10  # variables whose resonators are shown
_MOST_ROWS = 1000  # of a series whose attention is shown: weights of all pairs are computed
_MOST_KEYS = 100  # rows that are shown of those that a row attends to
_COPIED_ROWS = 50_000  # of all altered copies of a series: of longer ones there are fewer
_FEWEST_COPIES, _MOST_LEFT_OUT = 12, 500
_MOST_PERIODS = 12  # of tables
_MOST_TYPES = 8
_CURVE = 160  # points of a curve
_AHEAD = 24  # points of a forecast


def choose(estimator: Any, data: Any, found: Any, truth: Any) -> np.ndarray:
    """Return positions of series to explain: a high prediction, the most wrong one, a typical one.

    Args:
        estimator: The fitted estimator.
        data: Series in memory, or sequences of events.
        found: Predictions for them [n, K], or None.
        truth: Classes [n] or values [n, K], or None.
    """
    usable = np.flatnonzero(data.lengths >= min(3, data.lengths.max(initial=0)))
    lengths = np.minimum(data.lengths[usable], _MOST_ROWS)
    if estimator.task not in SERIES_TASKS or found is None:
        return usable[np.argsort(-lengths, kind="stable")[:NUM_SERIES]]
    said = found[usable, -1] if found.shape[1] <= 2 else found[usable].max(axis=1)
    if truth is None:
        wrong = -said
    elif estimator.task == "classification":
        wrong = 1.0 - found[usable, truth[usable]]
    else:
        wrong = np.abs(found - truth)[usable].sum(axis=1)
    order = np.argsort(-said, kind="stable")
    wanted = [order[0], np.argmax(wrong), order[len(order) // 2], *order]
    return usable[list(dict.fromkeys(wanted))[:NUM_SERIES]]


def explore(estimator: Any, data: Any, truths: list[Any], time: str) -> Plain | None:
    """Return the section of single series; None if there are none with rows.

    Args:
        estimator: The fitted estimator.
        data: The series or sequences to explain.
        truths: What is true of each, or None.
        time: Name of the time axis.
    """
    if estimator.task == "events":
        series = [_sequence(estimator, data[[place]]) for place in range(len(data))]
        unit = data.time_unit if data.time_unit != UNNAMED_UNIT else None
    else:
        series = [
            _series(estimator, data[place : place + 1], truth) for place, truth in enumerate(truths)
        ]
        unit = data.time_axis.unit if data.time_axis.kind == "duration" else None
    series = [item for item in series if item is not None]
    if not series:
        return None
    about = {
        "classification": "Probabilities at each moment are those if the series ended there.",
        "regression": "Predictions at each moment are those if the series ended there.",
        "forecasting": "At each moment, the forecast from what was observed until then.",
        "imputation": "The curve is what the model says at any time, from all observations. Taking"
        " one out shows what it would say in its place; there is no playing forward, as the model"
        " looks both ways.",
        "events": "Rates of each type along time. What attention looks at and what single events"
        " add is not shown: the encoder of events never forms the weights of all pairs.",
    }[estimator.task]
    return {
        "id": "series",
        "title": "Series explained",
        "about": about,
        "task": estimator.task,
        "time": {"label": with_unit(text(time), unit), "date": data.time_axis.kind == "datetime"},
        "series": series,
    }


def _moments(data: Any, times: Any) -> Any:
    """Return times of the one series as numbers to draw: dates in milliseconds since 1970."""
    times = np.asarray(times, dtype=np.float64)
    if data.time_axis.kind == "duration":
        return numbers(times, 8)
    moments = data.decode_times(times, np.zeros(times.shape, dtype=np.int64))
    if data.time_axis.kind == "datetime":
        return moments.astype("datetime64[ms]").astype(np.int64).tolist()
    return numbers(moments, 8)


def _series(estimator: Any, one: Any, truth: Any) -> Plain | None:
    """Return one series explained."""
    if len(one.times) == 0:
        return None
    content: Plain = {"id": text(one.ids[0]), "span": _moments(one, one.times[[0, -1]])}
    if truth is not None:
        content["truth"] = ", ".join(text(item) for item in np.atleast_1d(truth))
    variables: dict[str, Plain] = {}
    for column, name in enumerate(one.feature_names):
        seen = np.flatnonzero(~np.isnan(one.values[:, column]))
        if len(seen):
            found = {"name": text(name), "column": column, "row": seen.tolist()}
            found |= {"x": _moments(one, one.times[seen]), "y": numbers(one.values[seen, column])}
            variables[name] = found
    content["variables"] = list(variables.values())
    if estimator.task == "imputation":
        _fill(estimator, one, content, variables)
    else:
        ends = _follow(estimator, one, content)
        _leave_out(estimator, one, content, variables)
        _attend(estimator, one, ends, content)
    _resonate(estimator, one, content, variables)
    return content


def _follow(estimator: Any, one: Any, content: Plain) -> np.ndarray:
    """Put in what is predicted as time goes on, and return the times of the steps."""
    shorter, ends = cut_along(one, _num_copies(one, _MOST_STEPS))
    content["steps"] = _moments(one, ends)
    if estimator.task == "forecasting":
        return _forecast(estimator, one, shorter, ends, content)
    if estimator.task == "classification":
        chance = estimator.predict_proba(shorter)
        classes = estimator.classes_.tolist()
        top = np.sort(np.argsort(-chance[-1], kind="stable")[:_MOST_OUTPUTS])
        places = np.array([1]) if len(classes) == 2 else top
        content["outputs"] = [f"probability of {text(classes[place])}" for place in places]
        found, keys = chance[:, places], [classes[place] for place in places]
    else:
        found = estimator.predict(shorter).reshape(len(ends), -1)[:, :_MOST_OUTPUTS]
        keys = list(range(found.shape[1]))
        content["outputs"] = ["prediction" if len(keys) == 1 else f"target {k}" for k in keys]
    content["keys"] = keys
    content["along"] = numbers(found.T)
    return ends


def _forecast(estimator: Any, one: Any, shorter: Any, ends: Any, content: Plain) -> Any:
    ahead = np.linspace(0.0, estimator.horizon_, _AHEAD + 1)[1:]
    answers = estimator.predict_quantiles(shorter, [ahead] * len(ends), relative=True)
    since = estimator._ends(shorter)
    names = list(map(str, estimator.target_names_))
    content["outputs"] = [text(name) for name in names[:_MOST_OUTPUTS]]
    content["keys"] = names[:_MOST_OUTPUTS]
    middle = estimator._levels.index(0.5)
    content["ahead"] = [
        {
            "x": _moments(one, start + ahead),
            "quantiles": numbers(
                [answer[:, : len(content["keys"]), k].T for k in (0, middle, -1)], 3
            ),
        }
        for start, answer in zip(since, answers, strict=True)
    ]
    content["levels"] = [estimator._levels[0], estimator._levels[-1]]
    content["span"] = _moments(one, [one.times[0], since[-1] + estimator.horizon_])
    return ends


def _leave_out(estimator: Any, one: Any, content: Plain, variables: dict[str, Plain]) -> None:
    """Put in what would have been predicted without each observation."""
    most = _num_copies(one, _MOST_LEFT_OUT)
    found = leave_one_out(estimator, one, max_observations=most)
    by_output = dict(list(found.groupby("output", sort=False)))
    kept = [by_output[key] for key in content["keys"] if key in by_output]
    if not kept:
        return
    content["final"] = numbers([part.prediction.iloc[0] for part in kept])
    columns = zip(kept[0].variable, kept[0].row, *(part.without for part in kept), strict=True)
    without = {(name, row): values for name, row, *values in columns}
    for name, item in variables.items():
        entries = [without.get((name, row)) for row in item["row"]]
        item["without"] = [entry and numbers(entry) for entry in entries]


def _fill(estimator: Any, one: Any, content: Plain, variables: dict[str, Plain]) -> None:
    """Put in the curves of an imputation, and what is said in place of each observation."""
    names = list(map(str, estimator.target_names_))
    shown = names[:_MOST_OUTPUTS]
    grid = np.unique(np.append(np.linspace(one.times[0], one.times[-1], _CURVE), one.times))
    (answer,) = estimator._predict(one, [_asked(one, grid)])
    middle = estimator._levels.index(0.5)
    content["outputs"], content["keys"] = [text(name) for name in shown], shown
    content["levels"] = [estimator._levels[0], estimator._levels[-1]]
    content["filled"] = {
        "x": _moments(one, grid),
        "quantiles": numbers([answer[:, : len(shown), k].T for k in (0, middle, -1)]),
    }
    most = _num_copies(one, _MOST_LEFT_OUT)
    for number, name in enumerate(shown):
        column = one.feature_names.index(name)
        seen = np.flatnonzero(~np.isnan(one.values[:, column]))[-max(1, most // len(shown)) :]
        if len(seen) == 0:
            continue
        copies = one.take(np.zeros(len(seen), dtype=np.int64))
        values = copies.values.reshape(len(seen), len(one.times), -1).copy()
        values[np.arange(len(seen)), seen, column] = np.nan
        copies = copies.replace(
            values=values.reshape(-1, one.num_features), static_names=one.static_names
        )
        asked = [_asked(one, one.times[[row]]) for row in seen]
        found = np.stack(estimator._predict(copies, asked))[:, 0, number]
        item = variables[name]
        said = dict(zip(seen.tolist(), found[:, [middle, 0, -1]].tolist(), strict=True))
        item["hidden"] = [numbers(said[row]) if row in said else None for row in item["row"]]


def _num_copies(one: Any, most: int) -> int:
    """Return how many altered copies of a series a page has the time for."""
    return int(np.clip(_COPIED_ROWS // len(one.times), _FEWEST_COPIES, most))


def _asked(one: Any, times: np.ndarray) -> np.ndarray:
    """Return times of the one series or sequence as `predict` takes them."""
    if one.time_axis.kind != "number":
        return times
    found: np.ndarray = one.decode_times(times, np.zeros(len(times), dtype=np.int64))
    return found


def _attend(estimator: Any, one: Any, ends: np.ndarray, content: Plain) -> None:
    """Put in the rows that the last row at each step attends to, layer by layer and head by head.

    Weights are in thousandths.
    """
    if len(one.times) > _MOST_ROWS:
        return
    rows = np.searchsorted(one.times, ends, side="right") - 1
    layers = []
    for item in attend_series(estimator, one):
        heads = []
        for weights in item.weights[:, rows]:
            steps = []
            for w in weights:
                keys = np.sort(np.argsort(-w, kind="stable")[:_MOST_KEYS])
                keys = keys[w[keys] > 0]
                steps.append([keys.tolist(), np.rint(1000 * w[keys]).astype(int).tolist()])
            heads.append(steps)
        layer: Plain = {"name": str(item.layer), "heads": heads}
        if item.queries is not None:
            layer["periods"] = _heard(item, one.time_axis.unit)
        layers.append(layer)
    if layers:
        content["attention"], content["times"] = layers, _moments(one, one.times)


def _heard(layer: LayerAttention, unit: str | None) -> list[list[list[str]]]:
    """Return at which periods the last row listens, rows of a table for each head."""
    last = len(layer.times) - 1
    sizes = np.abs(layer.contributions(last)) * layer.weights[:, last].T[:, :, None]  # [N, H, C]
    shares = sizes.sum(axis=0)
    shares = shares / np.maximum(shares.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    omega = layer.internals.key_omega.detach().double().numpy() / layer.scale
    heads = []
    for share, frequency in zip(shares, omega, strict=True):
        top = np.argsort(-share, kind="stable")[:_MOST_PERIODS]
        rows = [[length(2 * np.pi / frequency[k], unit), f"{share[k]:.1%}"] for k in top]
        heads.append(rows)
    return heads


def _resonate(estimator: Any, one: Any, content: Plain, variables: dict[str, Plain]) -> None:
    """Put in how oscillators respond along the series, and what counts at which period."""
    resonator = getattr(estimator, "resonator_", None) or estimator
    if not hasattr(resonator, "response") or len(one.times) < 2:
        return
    unit = one.time_axis.unit
    shares = resonator.importance(one)
    content["periods"] = [
        [
            text(row["variable"] or "the series"),
            "-" if row["period"] is None else length(row["period"], unit),
            f"{row['importance']:.1%}",
        ]
        for row in shares[:_MOST_PERIODS]
    ]
    if one.spans[0] == 0:
        return
    known = [name.period for name in resonator.features_.names() if name.period]
    gaps = np.diff(one.times)
    ends = (min(known), max(known)) if known else (2 * gaps[gaps > 0].min(), one.spans[0])
    periods = np.geomspace(*ends, 12)
    found = resonator.response(one, periods=periods, num_times=60)  # [M, F, K]
    # First those whose observations count most, then those that the resonators weigh most.
    effects = {
        name: sum(abs(entry[0] - content["final"][0]) for entry in item["without"] if entry)
        for name, item in variables.items()
        if "without" in item
    }
    named = [*sorted(effects, key=lambda name: -effects[name])[: _MOST_RESPONSES - 3]]
    named += [row["variable"] for row in shares if row["variable"] in found.variables]
    some = list(dict.fromkeys(named))[:_MOST_RESPONSES]
    content["response"] = {
        "x": _moments(one, found.times),
        "periods": [length(period, unit) for period in periods],
        "variables": [
            {
                "name": text(name),
                "column": one.feature_names.index(name),
                "z": numbers(found.amplitude[:, found.variables.index(name)], 2),
            }
            for name in some
        ],
    }


def _sequence(estimator: Any, one: Any) -> Plain | None:
    """Return one sequence of events with its rates."""
    if len(one.times) < 2 or one.times[-1] <= one.times[0]:
        return None
    after = np.nextafter(one.times, np.inf)
    grid = np.unique(np.concatenate([np.linspace(one.times[0], one.times[-1], _CURVE), after]))
    grid = grid[grid <= one.times[-1]]
    (rates,) = estimator.intensity(one, [_asked(one, grid)])
    order = np.argsort(-rates.mean(axis=0), kind="stable")[:_MOST_TYPES]
    return {
        "id": text(one.ids[0]),
        "span": _moments(one, one.times[[0, -1]]),
        "steps": _moments(one, np.unique(one.times)),
        "rates": {"x": _moments(one, grid), "y": numbers(rates[:, order].T)},
        "outputs": [text(one.type_names[place]) for place in order],
        "events": [
            {"name": text(one.type_names[k]), "x": _moments(one, one.times[one.types == k])}
            for k in order
        ],
        "variables": [],
    }
