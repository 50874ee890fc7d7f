"""The sections about a model as a whole: training, scores, spectra, periods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer.cli.evaluate import Interval, Judged
from osciformer.cli.report.charts import (
    Plain,
    axis,
    chart,
    heat,
    length,
    line,
    section,
    short,
    table,
    text,
)
from osciformer.cli.undefined import shown
from osciformer.config import QUERY_TASKS
from osciformer.inspection import (
    attend_classes,
    find_spectra,
    probe_channel,
    summarise_spectra,
)
from osciformer.inspection.spectra import NEAR_CRITICAL
from osciformer.plots.axes import with_unit

_MOST_CHANNELS = 6  # of a head that are probed
_MOST_POINTS = 500
_MOST_CLASSES = 20
_MOST_VARIABLES = 20
_NUM_PHASES = 25


def make_sections(
    estimator: Any, data: Any, truth: Any, judged: Judged | None, scores: Mapping[str, Interval]
) -> Iterator[Plain]:
    """Yield the sections that suit the model, in order."""
    if getattr(estimator, "history_", None):
        yield _training(estimator)
    if judged is not None:
        yield _scores(estimator, judged, scores)
    spectra = find_spectra(estimator)
    if spectra:
        yield _spectra(spectra)
    keys = [item for item in spectra if item.role == "keys"]  # the others have no logits
    if keys:
        yield _resonance(keys)
    if estimator.task == "classification" and truth is not None:
        found = attend_classes(estimator, data, truth)
        if found.layers:
            yield _attention_by_class(found)
    resonator = getattr(estimator, "resonator_", None) or estimator
    if hasattr(resonator, "importance"):
        yield _periods(resonator)


def _training(estimator: Any) -> Plain:
    history = estimator.history_
    epochs = [row["epoch"] + 1 for row in history]
    best = estimator.best_epoch_ + 1
    names = [name for name in history[0] if name.startswith("val_") and name != "val_loss"]
    x = axis("epoch", whole=True, min=1)
    rule = {"rules": [{"x": best, "label": "kept"}]}

    def curve(name: str, title: str, **style: Any) -> Plain:
        return line(title, epochs, [row.get(name, np.nan) for row in history], dots=True, **style)

    losses = [curve("train_loss", "training", colour=0)]
    if "val_loss" in history[0]:
        losses.append(curve("val_loss", "validation", colour=1, dash=True))
    about = f"The weights of epoch {best} of {len(history)} are those of the model."
    loss = chart("Loss", x, axis("loss"), losses, about, **rule)
    views: dict[tuple[int, ...], Plain] = {}
    for number, name in enumerate(names):
        title = name.removeprefix("val_").replace("_", " ")
        drawn = curve(name, title, colour=1)
        other = chart(f"Validation: {title}", x, axis(title), [drawn], about, **rule)
        views[(number,)] = {"charts": [loss, other]}
    choices = [("Score", [name.removeprefix("val_").replace("_", " ") for name in names])]
    return section(
        "training", "Training", about, views or {(): {"charts": [loss]}}, choices if names else ()
    )


def _scores(estimator: Any, judged: Judged, scores: Mapping[str, Interval]) -> Plain:
    rows = [(n, shown(s.value), f"{shown(s.low)} to {shown(s.high)}") for n, s in scores.items()]
    charts: list[Plain] = []
    task, found, truth = estimator.task, judged.found, judged.truth
    if task == "classification" and found is not None and truth is not None:
        charts = _class_charts(found, truth, estimator.classes_)
    elif task == "regression" and found is not None and truth is not None:
        charts = _value_charts(found, truth)
    elif task in QUERY_TASKS:
        levels = [float(level) for level in estimator.quantiles]
        ideal = line("as it should be", [0, 1], [0, 1], colour=6, dash=True)
        points = line("found", levels, found, colour=0, dots=True)
        about = "Part of the hidden values below each predicted quantile."
        charts = [
            chart(
                "Calibration", axis("level"), axis("part of values below"), [ideal, points], about
            )
        ]
    what = judged.title or f"{judged.num_series} series"
    about = f"On {what} of the table that was given."
    about += " If these series were in training, the scores are too good."
    tables = [table(("score", "value", "95 % interval"), rows, "Scores with 95 % intervals")]
    return section("scores", "Scores", about, {(): {"charts": charts, "tables": tables}})


def _class_charts(chance: np.ndarray, truth: np.ndarray, classes: np.ndarray) -> list[Plain]:
    charts = []
    if len(classes) == 2 and 0 < truth.sum() < len(truth):
        metrics = need("sklearn.metrics", extra="train")
        false, true, _ = metrics.roc_curve(truth, chance[:, 1])
        some = np.unique(np.linspace(0, len(false) - 1, 150).round().astype(int))
        drawn = [
            line("chance", [0, 1], [0, 1], colour=6, dash=True),
            line("model", false[some], true[some], colour=0),
        ]
        labels = axis("false positives", min=0, max=1), axis("true positives", min=0, max=1)
        about = "Part of the positives that are found, by part of the negatives taken for such."
        charts.append(chart("ROC", *labels, drawn, about))
        bins = np.array_split(np.argsort(chance[:, 1], kind="stable"), min(10, len(truth)))
        said = [chance[part, 1].mean() for part in bins]
        hits = [truth[part].mean() for part in bins]
        drawn = [
            line("as it should be", [0, 1], [0, 1], colour=6, dash=True),
            line("model", said, hits, colour=0, dots=True),
        ]
        labels = axis("predicted probability"), axis(f"part that is {text(classes[1])}")
        about = f"{len(bins)} groups of nearly equal size, by predicted probability."
        charts.append(chart("Calibration", *labels, drawn, about))
    if len(classes) <= _MOST_CLASSES:
        counts = np.zeros((len(classes), len(classes)))
        np.add.at(counts, (chance.argmax(axis=1), truth), 1)
        names = list(map(text, classes.tolist()))
        sides = axis("predicted", cells=names), axis("true", cells=names)
        about = "Number of series of each class, by the class that was predicted."
        charts.append(heat("Confusion", *sides, counts, "series", about, numbers=True))
    return charts


def _value_charts(found: np.ndarray, truth: np.ndarray) -> list[Plain]:
    charts = []
    for number, (said, real) in enumerate(zip(found.T, truth.T, strict=True)):
        ends = [min(real.min(), said.min()), max(real.max(), said.max())]
        drawn = [
            line("as it should be", ends, ends, colour=6, dash=True),
            line("series", real[:_MOST_POINTS], said[:_MOST_POINTS], colour=0, dots="only"),
        ]
        title = "Predicted against true" + (f", target {number}" if found.shape[1] > 1 else "")
        charts.append(chart(title, axis("true value"), axis("predicted"), drawn))
    return charts


def _summary(spectra: Any) -> Plain:
    rows = summarise_spectra(spectra).to_dict("records")
    head = ("layer", "head", "channels", "under", "near critical", "over", "period", "ζ")
    numbers = ("underdamped", "near_critical", "overdamped")
    listed = [
        (
            f"{row['layer']}, {row['role']}",
            str(row["head"]),
            str(row["channels"]),
            *(f"{row[name]:.0%}" for name in numbers),
            row["period"],
            row["zeta"],
        )
        for row in rows
    ]
    title = f"Damping regimes and medians; near critical is |ζ − 1| < {NEAR_CRITICAL}"
    return table(head, listed, title)


def _absent(what: str, summary: Plain) -> Plain:
    """Return the view of a head or channel that a layer does not have."""
    return {"tables": [{**summary, "title": f"No such {what} in this layer. {summary['title']}"}]}


def _spectra(spectra: Any) -> Plain:
    views: dict[tuple[int, ...], Plain] = {}
    summary = _summary(spectra)
    most = max(len(item.omega) for item in spectra)
    for number, item in enumerate(spectra):
        x = axis(with_unit("period", item.unit), log=True)
        top = max(1.25, 1.1 * float(item.zeta.max()))
        y = axis("damping ratio ζ", min=0, max=top)
        heads = [
            line(f"head {k + 1}", item.period[k], item.zeta[k], colour=k % 8, dots="only", mark=k)
            for k in range(len(item.omega))
        ]
        about = (
            "Each mark is an oscillator. Below ζ = 1 it swings, above it creeps back; with a small"
            " ζ it rings long and answers to its own period alone."
        )
        bands = [{"from": 1 - NEAR_CRITICAL, "to": 1 + NEAR_CRITICAL, "label": "near critical"}]
        for chosen in range(most + 1):
            some, title = heads, item.name.capitalize()
            if chosen:
                some, title = heads[chosen - 1 : chosen], f"{title}, head {chosen}"
            drawn = chart(title, x, y, some, about, bands=bands)
            view = {"charts": [drawn], "tables": [summary]}
            views[number, chosen] = view if some else _absent("head", summary)
    choices = [
        ("Layer", [item.name for item in spectra]),
        ("Head", ["all", *(str(k + 1) for k in range(most) if most > 1)]),
    ]
    about = "The periods and damping that the oscillators of the network have learned."
    return section("spectra", "Spectra", about, views, choices)


def _resonance(keys: Any) -> Plain:
    views: dict[tuple[int, ...], Plain] = {}
    summary = _summary(keys)
    most = max(len(item.omega) for item in keys)
    places = min(_MOST_CHANNELS, max(item.omega.shape[1] for item in keys))
    phase = np.linspace(np.pi, -np.pi, _NUM_PHASES)  # the first row is the top one
    for number, item in enumerate(keys):
        for head, place in np.ndindex(most, places):
            if head >= len(item.omega):
                views[number, head, place] = _absent("head", summary)
                continue
            order = np.argsort(-item.omega[head], kind="stable")
            some = np.linspace(0, len(order) - 1, min(places, len(order))).round().astype(int)
            if place >= len(some):
                views[number, head, place] = _absent("channel", summary)
                continue
            charts = _probe_charts(item, head, int(order[some[place]]), phase)
            views[number, head, place] = {"charts": charts}
    choices = [
        ("Layer", [item.name for item in keys]),
        ("Head", [str(k + 1) for k in range(most)]),
        ("Channel", ["fastest", *map(str, range(2, places)), "slowest"][:places]),
    ]
    about = (
        "What a channel makes of a query that is a cosine: its logit is large where the cosine has"
        " the channel's own frequency and the right phase. |H| is the transfer function of the"
        f" oscillator. Of each head up to {_MOST_CHANNELS} channels are shown, from fast to slow."
    )
    return section("resonance", "Resonance", about, views, choices)


def _probe_charts(item: Any, head: int, channel: int, phase: np.ndarray) -> list[Plain]:
    w = item.omega[head, channel] * np.geomspace(10.0, 0.1, 61)
    probe = probe_channel(item, head, channel, drive_omega=w)
    period = 2 * np.pi / w
    own = float(item.period[head, channel])
    x = axis(with_unit("period of the cosine", item.unit), log=True)
    rules = [{"x": own, "label": "own period"}]
    sizes = [
        line("largest logit", period, probe.best / probe.best.max(), colour=0),
        line("|H|", period, np.abs(probe.gain) / np.abs(probe.gain).max(), colour=1, dash=True),
    ]
    angles = [
        line("best phase", period, probe.best_phase, colour=0),
        line("arg H", period, np.angle(probe.gain), colour=1, dash=True),
    ]
    title = (
        f"Head {head + 1}, channel {channel}: period {length(own, item.unit)}, ζ {probe.zeta:.3g}"
    )
    cells = axis(x["label"], cells=[short(p) for p in period[::2]])
    turns = axis("phase, radians", cells=[f"{p:.2f}" for p in phase])
    return [
        chart(title, x, axis("part of the peak", min=0, max=1.15), sizes, rules=rules),
        chart("Phase", x, axis("radians", min=-3.3, max=3.3), angles, rules=rules),
        heat(
            "Logit by period and phase",
            cells,
            turns,
            probe.attention(phase)[::2],
            "logit",
            diverging=True,
        ),
    ]


def _attention_by_class(found: Any) -> Plain:
    middle = 0.5 * (found.edges[1:] + found.edges[:-1])
    views: dict[tuple[int, ...], Plain] = {}
    for number, layer in enumerate(found.layers):
        drawn = [
            line(name, middle, weights, colour=k % 8, dash=k % 2 == 1, dots=True)
            for k, (name, weights) in enumerate(
                zip(found.classes, found.weights[number], strict=True)
            )
        ]
        x = axis(with_unit("time before the last row", found.unit))
        about = "Mean weight of the rows in each stretch of time, in the answer of the last row."
        title = f"Layer {layer}, mean over heads and series"
        views[(number,)] = {"charts": [chart(title, x, axis("weight", min=0), drawn, about)]}
    choices = [("Layer", [str(layer) for layer in found.layers])]
    about = (
        "How far back the network looks. It also has statistics of the series and, by default, the"
        " variable encoder (setting variables), which attention does not show; what single"
        " observations add counts all of them."
    )
    return section("classes", "Attention by class", about, views, choices)


def _periods(resonator: Any) -> Plain:
    rows = resonator.importance()
    unit = resonator.time_axis_.unit
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["variable"]] = totals.get(row["variable"], 0.0) + row["importance"]
    names = sorted(totals, key=lambda name: -totals[name])[:_MOST_VARIABLES]
    bars = line("share", range(len(names)), [totals[name] for name in names], colour=0)
    about = "Parts of 1 of all that features add to predictions, as the resonators weigh them."
    x = axis("variable", cells=[text(name or "the series") for name in names])
    charts = [chart("By variable", x, axis("share", min=0), [bars], about, bars=True)]
    periods = sorted({row["period"] for row in rows if row["period"]})
    if periods:
        shares = np.zeros((len(periods), len(names)))
        for row in rows:
            if row["period"] and row["variable"] in names:
                place = periods.index(row["period"]), names.index(row["variable"])
                shares[place] += row["importance"]
        x = axis(with_unit("period", unit), cells=[short(p) for p in periods])
        y = axis("variable", cells=[text(name or "the series") for name in names])
        title = "By variable and period"
        about = "Features without a period, such as means and counts, are not in this map."
        charts.append(heat(title, x, y, shares, "share", about))
    top = [
        (row["feature"], str(row["output"]), f"{row['weight']:+.3g}")
        for row in resonator.explain(top=10)
    ]
    effects = table(
        ("feature", "output", "change by one standard deviation"), top, "The heaviest features"
    )
    what = "Which variables the resonators look at, and at which periods."
    return section(
        "periods", "Variables and periods", what, {(): {"charts": charts, "tables": [effects]}}
    )
