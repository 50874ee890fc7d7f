"""`osciformer plot`: the picture shows the data and what the model says of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from osciformer.data import IrregularSeries, from_frame
from osciformer.estimators import ResonatorClassifier
from osciformer.plots import plot_predictions
from osciformer.plots.axes import plain

Call = Callable[..., Any]
TASKS = ("classification", "regression", "forecasting", "imputation", "events")


def table_of(task: str, tables: Path) -> Path:
    return tables / ("narrow.csv" if task in ("forecasting", "events") else "wide.parquet")


@pytest.mark.parametrize("task", TASKS)
def test_a_picture_of_each_task(
    task: str, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    output, flags = tmp_path / "picture.png", ["--series=3", "--series=1"]
    outcome = cli("plot", runs / task, table_of(task, tables), "-o", output, *flags)
    assert outcome.code == 0, outcome.err
    assert output.read_bytes().startswith(b"\x89PNG")
    assert f"{task}, series 3, 1" in outcome.out


@pytest.fixture(scope="module")
def opened(runs: Path, tables: Path) -> Callable[[str], tuple[Any, Any]]:
    def open_run(task: str) -> tuple[Any, Any]:
        from osciformer.cli.predict import Model

        model = Model.load(runs / task, accelerator="cpu")
        table = table_of(task, tables)
        if task == "events":
            return model.estimator, model.open_events(table)
        return model.estimator, model.open_series(table, None, None, None, None)

    return open_run


def lines_of(axis: Any, label: str) -> np.ndarray:
    """Return the points [M, 2] of the line of a label."""
    (line,) = [line for line in axis.lines if line.get_label() == label]
    return np.asarray(line.get_xydata(), dtype=float)


def test_forecasts_follow_the_history(opened: Any) -> None:
    model, data = opened("forecasting")
    one = data[4:5]
    axes = plot_predictions(model, one, time="hour").axes
    assert [axis.get_ylabel() for axis in axes] == ["a", "b"]
    assert axes[-1].get_xlabel() == "hour"
    seen, median = lines_of(axes[0], "observed"), lines_of(axes[0], "median")
    values = one.values[:, 0]
    end = one.times[~np.isnan(one.values).all(axis=1)][-1]
    shown = ~np.isnan(values) & (one.times >= end - 4 * model.horizon_)
    np.testing.assert_allclose(seen, np.stack([one.times, values], axis=1)[shown], rtol=1e-6)
    assert median[:, 0].min() > end
    assert median[-1, 0] == pytest.approx(end + model.horizon_)
    asked = median[[50, -1], 0]
    expected = np.concatenate(model.predict(one, [asked]))[:, 0]
    np.testing.assert_allclose(median[[50, -1], 1], expected, rtol=1e-4, atol=1e-5)
    names = [text.get_text() for text in axes[0].figure.legends[0].get_texts()]
    assert names == ["90% interval", "50% interval", "median", "observed"]


def test_imputations_go_through_the_series(opened: Any) -> None:
    model, data = opened("imputation")
    one = data[4:5]
    (axis,) = plot_predictions(model, one).axes  # `b` is not a target
    median = lines_of(axis, "median")
    assert median[[0, -1], 0].tolist() == [one.times[0], one.times[-1]]
    (expected,) = model.predict(one)
    rows = np.searchsorted(median[:, 0], one.times)
    np.testing.assert_allclose(median[rows, 1], expected[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_predictions_along_time_are_those_of_shorter_series(task: str, opened: Any) -> None:
    model, data = opened(task)
    one = data[4:5]
    axes = plot_predictions(model, one).axes
    assert len(axes) == 3
    line = np.asarray(axes[0].lines[0].get_xydata(), dtype=float)
    np.testing.assert_allclose(line[:, 0], one.times)
    for number in (1, len(one.times) - 1):
        rows = slice(0, number + 1)
        offsets = np.array([0, number + 1])
        names = {"static_names": one.static_names}
        short = one.replace(
            times=one.times[rows], values=one.values[rows], offsets=offsets, **names
        )
        found = (
            model.predict_proba(short)[0, 1] if task == "classification" else model.predict(short)
        )
        assert line[number, 1] == pytest.approx(float(np.squeeze(found)), abs=1e-5)


def test_rates_of_events_and_the_events(opened: Any) -> None:
    model, data = opened("events")
    rates, events = plot_predictions(model, data[4:5]).axes
    line = lines_of(rates, "a")
    expected = model.intensity(data[4:5], [line[:, 0]])[0][:, 0]
    np.testing.assert_allclose(line[:, 1], expected, rtol=1e-4)
    drawn = sum(len(item.get_xdata()) for item in events.lines)
    assert drawn == len(data[4])
    assert [text.get_text() for text in events.get_yticklabels()] == ["a", "b"]


def test_many_variables_odd_names_and_long_series_are_drawn(tmp_path: Path) -> None:
    """Nothing is cut off, no name is taken for a formula, and long series are soon done."""
    rng = np.random.default_rng(0)
    names = ["_x", "$\\frac$", "a\nb\x1b", "long " * 20, "rare", "plain"]
    values = [rng.normal(size=(300, 6)) + (k % 3) for k in range(12)]
    for table in values:
        table[5:, 4] = np.nan
    times = [np.sort(rng.uniform(0, 9, 300)) for _ in values]
    labels = [["_one", "$two", "three"][k % 3] for k in range(12)]
    ids = [f"${k}$" for k in range(12)]
    X = IrregularSeries.from_arrays(times, values, labels=labels, feature_names=names, ids=ids)
    model = ResonatorClassifier(families=("summary",), random_state=0).fit(X)
    figure = plot_predictions(model, X[:2])
    assert len(figure.axes) == 2 * (1 + 4)
    assert "rare" not in [axis.get_ylabel() for axis in figure.axes]
    assert len(figure.axes[0].lines[0].get_xdata()) <= 120
    figure.savefig(tmp_path / "odd.png")
    check_all_is_inside(figure)
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert shown == {plain(name) for name in ("_one", "$two", "three")}
    figure = plot_predictions(model, X[:1], variables=["rare"])
    assert len(figure.axes) == 2


def check_all_is_inside(figure: Any) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    whole = figure.bbox
    for part in (*figure.axes, *figure.legends):
        box = part.get_tightbbox(canvas.get_renderer())
        assert box.x0 >= -1
        assert box.y0 >= -1
        assert box.x1 <= whole.x1 + 1
        assert box.y1 <= whole.y1 + 1


@pytest.mark.parametrize("hours", [0.01, 1.5, 40, 71, 1000, 20000])
@pytest.mark.parametrize("count", [1, 3])
def test_dates_of_any_span_fit_the_axis(hours: float, count: int) -> None:
    import pandas as pd

    moments = pd.Timestamp("2024-03-30 07:00") + pd.to_timedelta(np.linspace(0, hours, 9), unit="h")
    frame = pd.DataFrame({"who": np.repeat(range(6), 9), "day": list(moments) * 6})
    frame["x"] = np.arange(54.0) % 7
    frame["ill"] = frame.who % 2
    X = from_frame(frame, id="who", time="day", label="ill")
    model = ResonatorClassifier(families=("summary",), random_state=0).fit(X)
    figure = plot_predictions(model, X[:count])
    check_all_is_inside(figure)
    labels = figure.axes[-1].get_xticklabels()
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    assert len(boxes) >= 2
    for left, right in pairwise(boxes):
        assert left.x1 <= right.x0


def test_bad_calls_are_refused(
    cli: Call, runs: Path, tables: Path, tmp_path: Path, opened: Any
) -> None:
    run, table, output = runs / "classification", tables / "wide.parquet", tmp_path / "x.png"
    for flags, code, message in (
        (["--series=nobody"], 1, "no series 'nobody'"),
        (["--variables=c"], 1, "variables must be among 'a', 'b'; got ['c']"),
        ([f"--series={k}" for k in range(5)], 1, "X must hold 1 to 4 series; got 5"),
    ):
        outcome = cli("plot", run, table, "-o", output, *flags)
        assert outcome.code == code
        assert message in outcome.err
    outcome = cli("plot", run, table, "-o", tmp_path / "x.csv")
    assert outcome.code == 2
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="got object"):
        plot_predictions(object(), opened("regression")[1])
