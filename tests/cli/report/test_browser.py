"""The page in a real browser: it draws, it answers, and it can be read by all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from osciformer.cli.predict import Model
from osciformer.cli.report import write_report
from osciformer.cli.report.page import assemble
from osciformer.data import from_frame
from osciformer.estimators import OsciFormerClassifier
from osciformer.explain import leave_one_out

Open = Callable[..., Any]
EVIL = "</script><script>window.hacked=1</script>"
PICTURE = "<img src=x onerror=window.hacked=2>"
PHONE = 390
CHARTS = """JSON.stringify([...document.querySelectorAll('SCOPE canvas')].map((canvas) =>
    Chart.getChart(canvas).data.datasets.map((set) => [set.data, set.pointBackgroundColor])))"""

PRESS = """((place) => {
    const canvas = document.querySelectorAll('#series canvas')[1];
    const { x, y } = Chart.getChart(canvas).getDatasetMeta(0).data[place];
    const box = canvas.getBoundingClientRect();
    const at = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
    canvas.dispatchEvent(new MouseEvent('click', at));
})"""


def charts_of(page: Any, scope: str) -> str:
    """Return what the charts of a section show."""
    found: str = page.run(CHARTS.replace("SCOPE", scope))
    return found


def choose(page: Any, scope: str, label: str, index: int) -> None:
    page.run(f"""(() => {{
        const boxes = [...document.querySelectorAll('{scope} label')];
        const select = boxes.find((box) => box.firstChild.textContent === '{label}').lastChild;
        select.selectedIndex = {index};
        select.dispatchEvent(new Event('change'));
    }})()""")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Return a page on series with dates and hostile names, the model, and its data."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"who": np.repeat(np.arange(16), 9)})
    start = pd.Timestamp("2024-03-30 07:00")
    frame["day"] = [start + pd.Timedelta(hours=h) for h in np.tile(np.arange(9.0) * 7, 16)]
    frame[EVIL] = rng.normal(size=len(frame)) + frame.who % 2
    frame["b"] = np.where(rng.random(len(frame)) < 0.5, np.nan, rng.normal(size=len(frame)))
    frame["ill"] = np.where(frame.who % 2, PICTURE, "well")
    frame["who"] = [f"{PICTURE}{k}" for k in frame.who]
    X = from_frame(frame, id="who", time="day", label="ill")
    settings = {"dim": 8, "num_layers": 2, "num_heads": 2, "max_epochs": 2, "random_state": 0}
    model = OsciFormerClassifier(**settings).fit(X)
    page = tmp_path_factory.mktemp("page") / "page.html"
    wrapped = Model(model, "classification", {}, {"time": "day"})
    write_report(wrapped, page, X, X.labels, X[:3])
    return page, model, X


@pytest.fixture
def page(made: Any, open_page: Open) -> Any:
    return open_page(made[0])


@pytest.mark.parametrize(("width", "is_dark"), [(1200, False), (PHONE, True)])
def test_it_opens_without_errors_or_a_network_and_fits(
    width: int, is_dark: bool, made: Any, open_page: Open
) -> None:
    page = open_page(made[0], width, is_dark=is_dark)
    assert page.problems() == []
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.querySelectorAll('canvas').length") >= 10
    drawn = page.run(
        "[...document.querySelectorAll('canvas')].every((canvas) => canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0))"
    )
    assert drawn


@pytest.mark.parametrize("task", ["regression", "forecasting", "imputation", "events"])
def test_the_page_of_each_task_opens(
    task: str, cli: Any, runs: Path, tables: Path, tmp_path: Path, open_page: Open
) -> None:
    table = tables / ("narrow.csv" if task in ("forecasting", "events") else "wide.parquet")
    assert cli("inspect", runs / task, table, "-o", tmp_path / "page.html").code == 0
    page = open_page(tmp_path / "page.html", PHONE)
    before = charts_of(page, "#series")
    choose(page, "#series", "Series", 1)
    assert charts_of(page, "#series") != before
    assert page.problems() == []
    assert page.run("document.documentElement.scrollWidth") <= PHONE


@pytest.mark.parametrize(
    ("section", "label"),
    [
        ("series", "Series"),
        ("series", "Variable"),
        ("series", "Layer"),
        ("series", "Head"),
        ("training", "Score"),
        ("spectra", "Layer"),
        ("spectra", "Head"),
        ("resonance", "Layer"),
        ("resonance", "Head"),
        ("resonance", "Channel"),
        ("classes", "Layer"),
    ],
)
def test_a_selector_changes_the_plots(section: str, label: str, page: Any) -> None:
    before = charts_of(page, f"#{section}")
    choose(page, f"#{section}", label, 1)
    changed = charts_of(page, f"#{section}")
    assert changed != before
    choose(page, f"#{section}", label, 0)
    assert charts_of(page, f"#{section}") == before
    assert page.problems() == []


def test_an_observation_is_taken_out_and_put_back(made: Any, page: Any) -> None:
    _, model, X = made
    found = leave_one_out(model, X[:1])
    top = found.loc[found.effect.abs().idxmax()]
    said = "document.querySelector('.readout').textContent"
    assert "Without" not in page.run(said)
    names = page.run(
        "[...document.querySelectorAll('#series select')[1].options].map(o => o.value)"
    )
    choose(page, "#series", "Variable", 1 - names.index(top.variable))  # the other one
    button = "document.querySelector('[data-take=\"0\"]')"
    page.run(f"{button}.click()")
    told = page.run(said)
    assert f"Without {top.variable}" in told
    shown = page.run("document.querySelectorAll('#series select')[1].value")
    assert shown == top.variable
    before, after = (float(word.rstrip(".")) for word in told.split(" from ")[1].split(" to "))
    assert before == pytest.approx(top.prediction, rel=2e-3)
    assert after == pytest.approx(top.without, rel=2e-3)
    assert page.run(f"{button}.getAttribute('aria-pressed')") == "true"
    page.run(f"{button}.click()")
    assert "Without" not in page.run(said)
    # The mark of an observation does the same.
    page.run(f"{PRESS}(0)")
    page.wait(f"{said}.includes('Without')")  # events wait for the next frame


def one_series(path: Path, count: int, **others: Any) -> Path:
    """Write a page on one series with a variable whose last observation alone was tried."""
    x, without = list(range(count)), [None] * (count - 1) + [[1.0]]
    one = {"id": "a", "span": [0, count], "steps": [count], "outputs": ["prediction"]}
    one |= {"keys": [0], "along": [[2.0]], "final": [2.0], **others}
    item = {"name": "constructor", "column": 0, "row": x, "x": x, "y": x, "without": without}
    section = {"id": "series", "title": "", "about": "", "task": "regression"}
    section |= {"time": {"label": "time", "date": False}, "series": [{**one, "variables": [item]}]}
    path.write_text(assemble({"facts": [], "sections": [section]}), encoding="utf-8")
    return path


def test_a_long_series_is_drawn(tmp_path: Path, open_page: Open) -> None:
    page = open_page(one_series(tmp_path / "page.html", 130_000))
    assert page.problems() == []


def test_an_observation_that_was_not_tried_is_said_to_be_so(
    tmp_path: Path, open_page: Open
) -> None:
    other = {"name": "other", "column": 1, "z": [[0, 1]]}
    response = {"x": [0], "periods": ["1", "2"], "variables": [other]}
    page = open_page(one_series(tmp_path / "page.html", 3, response=response))
    said = "document.querySelector('.readout').textContent"
    page.run(f"{PRESS}(2)")
    page.wait(f"{said}.includes('go from 2 to 1')")
    page.run(f"{PRESS}(0)")
    page.wait(f"{said}.endsWith('constructor 0 at 0 was not tried.')")
    assert "The response of constructor was left out" in page.run("document.body.textContent")
    assert page.problems() == []


def test_time_plays_forward(page: Any) -> None:
    slider, clock = "document.querySelector('input[type=range]')", "#series output"
    page.run(f"{slider}.value = 0; {slider}.dispatchEvent(new Event('input'))")
    text = f"document.querySelector('{clock}').textContent"
    assert page.run(text) == "2024-03-30 07:00:00"
    assert page.run(f"{slider}.getAttribute('aria-valuetext')") == "2024-03-30 07:00:00"
    weights = json.loads(charts_of(page, "#series"))[2][0][0]
    assert [point["y"] for point in weights] == [1]  # the first row sees itself alone
    page.run("document.querySelector('.player button').click()")
    page.wait(f"{text} >= '2024-03-30 21:00:00'")
    page.run("document.querySelector('.player button').click()")
    assert page.run("document.querySelector('.player button').textContent") == "▶ Play"


def test_names_of_the_data_are_shown_as_text(made: Any, page: Any) -> None:
    assert page.run("typeof window.hacked") == "undefined"
    assert page.run("document.querySelectorAll('img').length") == 0
    shown = page.run("document.getElementById('series').textContent")
    assert EVIL in shown
    assert f"{PICTURE}0" in shown


def test_dark_mode_changes_the_colours_also_while_open(page: Any) -> None:
    colours = """JSON.stringify([getComputedStyle(document.body).backgroundColor,
        Chart.getChart(document.querySelector('canvas')).options.scales.x.ticks.color])"""
    light = page.run(colours)
    feature = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.send("Emulation.setEmulatedMedia", features=feature)
    differs = "a.every((colour, k) => colour !== b[k])"
    page.wait(f"((a, b) => {differs})({light}, JSON.parse({colours}))")
    # Paper is light, whatever the screen.
    page.send("Emulation.setEmulatedMedia", features=feature, media="print")
    page.wait(f"{colours} === {light!r}")
    assert page.send("Page.printToPDF")["data"].startswith("JVBERi")  # %PDF-


def test_charts_and_controls_have_names_and_tables(page: Any) -> None:
    nameless = page.run("""[...document.querySelectorAll('canvas, select, input, section, nav')]
        .filter((node) => !(node.getAttribute('aria-label') || node.labels?.[0]?.textContent
            || document.getElementById(node.getAttribute('aria-labelledby'))?.textContent))
        .map((node) => node.outerHTML.slice(0, 200))""")
    assert nameless == []
    assert page.run("[...document.querySelectorAll('canvas')].every(c => c.role === 'img')")
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait("[...document.querySelectorAll('figure details')].every(d => d.querySelector('td'))")
    assert page.problems() == []


def test_the_keyboard_reaches_what_a_mouse_does(page: Any) -> None:
    def press(key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            page.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    seen = []
    for _ in range(16):
        press("Tab", 9)
        seen.append(page.run("document.activeElement.tagName + document.activeElement.className"))
    assert seen[0] == "Askip"
    assert {"SELECT", "BUTTON", "INPUT"} <= set(seen)
    page.run("document.querySelector('input[type=range]').focus()")
    before = page.run("document.querySelector('#series output').textContent")
    press("ArrowLeft", 37)
    assert page.run("document.querySelector('#series output').textContent") < before
    outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
