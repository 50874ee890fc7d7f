"""`osciformer inspect`: what the page holds is what the model says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from osciformer.cli.predict import Model
from osciformer.cli.report import sections, write_report
from osciformer.cli.report.page import assemble
from osciformer.data import IrregularSeries, from_frame, save_npz
from osciformer.estimators import (
    OsciFormerClassifier,
    OsciFormerRegressor,
    ResonatorRegressor,
)
from osciformer.inspection import LayerSpectrum

Call = Callable[..., Any]
NETWORK = {"series", "training", "spectra", "resonance"}
SECTIONS = {
    "classification": NETWORK | {"scores", "classes", "periods"},
    "regression": NETWORK | {"scores"},
    "forecasting": NETWORK | {"scores"},
    "imputation": NETWORK | {"scores"},
    "events": NETWORK | {"scores"},
}
MOST_BYTES = 3_000_000


def content_of(page: Path) -> dict[str, Any]:
    """Return what a page shows."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def table_of(task: str, tables: Path) -> Path:
    return tables / ("narrow.csv" if task in ("forecasting", "events") else "wide.parquet")


@pytest.mark.parametrize("task", SECTIONS)
def test_a_page_for_each_task(
    task: str, cli: Call, runs: Path, tables: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    flags = ["--series=3", "--series=5", "-o", page]
    outcome = cli("inspect", runs / task, table_of(task, tables), *flags)
    assert outcome.code == 0, outcome.err
    assert "open it in a browser" in outcome.out
    assert page.stat().st_size < MOST_BYTES
    content = content_of(page)
    sections = {item["id"]: item for item in content["sections"]}
    assert set(sections) == SECTIONS[task]
    assert [item["id"] for item in sections["series"]["series"]] == ["3", "5"]
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert "Permission is hereby granted" in text  # of the scripts inside


def test_resonators_alone_have_periods_and_no_spectra(
    cli: Call, tables: Path, tmp_path: Path
) -> None:
    flags = ["--task=regression", "--model=resonator", "--id=who", "--time=hour", "--target=score"]
    run, page = tmp_path / "run", tmp_path / "page.html"
    fitted = cli("fit", tables / "wide.parquet", *flags, "--features=a,b", "-o", run)
    assert f"osciformer inspect {run} TABLE -o report.html" in fitted.out
    assert cli("inspect", run, tables / "wide.parquet", "-o", page).code == 0
    content = content_of(page)
    assert {item["id"] for item in content["sections"]} == {"series", "scores", "periods"}
    assert len(content["sections"][0]["series"]) == 3
    assert content["sections"][0]["series"][0]["response"]["periods"]


def test_without_labels_there_are_no_scores(
    cli: Call, runs: Path, tables: Path, frame: Any, tmp_path: Path
) -> None:
    table, page = tmp_path / "bare.parquet", tmp_path / "page.html"
    frame.drop(columns=["ill"]).to_parquet(table)
    outcome = cli("inspect", runs / "classification", table, "-o", page)
    assert outcome.code == 0, outcome.err
    content = content_of(page)
    assert {item["id"] for item in content["sections"]} == NETWORK | {"periods"}
    assert all("truth" not in item for item in content["sections"][0]["series"])


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_predictions_without_an_observation_are_those_of_the_model(
    task: str, runs: Path, tables: Path, tmp_path: Path
) -> None:
    model = Model.load(runs / task, accelerator="cpu")
    data = model.open_series(table_of(task, tables), None, None, None, None)
    write_report(model, tmp_path / "page.html", data, chosen=data[3:4])
    shown = content_of(tmp_path / "page.html")["sections"][0]["series"][0]

    def say(series: IrregularSeries) -> float:
        predict = model.estimator.predict_proba if task == "classification" else None
        found = model.estimator.predict(series) if predict is None else predict(series)[:, 1]
        return float(np.ravel(found)[0])

    one = data[3]
    assert shown["final"][0] == pytest.approx(say(data[3:4]), rel=2e-3)
    assert shown["along"][0][-1] == pytest.approx(say(data[3:4]), rel=2e-3)
    for name in ("a", "b"):
        item = next(item for item in shown["variables"] if item["name"] == name)
        row, column = item["row"][-1], data.feature_names.index(name)
        values = one.values.copy()
        values[row, column] = np.nan
        kept = ~np.isnan(values).all(axis=1)
        times = one.times[kept]
        left = data[3:4].replace(
            times=times,
            values=values[kept],
            offsets=np.array([0, len(times)]),
            static_names=data.static_names,
        )
        assert item["without"][-1][0] == pytest.approx(say(left), rel=2e-3)


def test_imputations_without_an_observation_are_those_of_the_model(
    runs: Path, tables: Path, tmp_path: Path
) -> None:
    model = Model.load(runs / "imputation", accelerator="cpu")
    data = model.open_series(table_of("imputation", tables), None, None, None, None)
    write_report(model, tmp_path / "page.html", data, chosen=data[3:4])
    shown = content_of(tmp_path / "page.html")["sections"][0]["series"][0]["variables"][0]
    one = data[3:4]
    values = one.values.copy()
    values[shown["row"][1], 0] = np.nan
    hidden = one.replace(values=values, static_names=one.static_names)
    quantiles = model.estimator.predict_quantiles(hidden, [one.times[[shown["row"][1]]]])[0][0, 0]
    expected = [quantiles[len(quantiles) // 2], quantiles[0], quantiles[-1]]
    assert shown["hidden"][1] == pytest.approx(expected, rel=2e-3, abs=1e-4)


def test_many_classes_targets_and_long_series_stay_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    times = [np.sort(rng.uniform(0, 9, 1010 if k == 3 else 12)) for k in range(24)]
    values = [rng.normal(size=(len(t), 4)) for t in times]
    X = IrregularSeries.from_arrays(times, values)
    tiny = {"dim": 8, "num_layers": 1, "num_heads": 2, "max_epochs": 1, "random_state": 0}
    labels = np.array([f"class {k % 6}" for k in range(24)])
    model = OsciFormerClassifier(**tiny, resonators=False).fit(X, labels)
    wrapped = Model(model, "classification", {}, {})
    assert write_report(wrapped, tmp_path / "a.html", X, labels, X[2:4]) < MOST_BYTES
    short, long = content_of(tmp_path / "a.html")["sections"][0]["series"]
    assert len(short["outputs"]) == 4
    assert "attention" in short
    assert "attention" not in long
    assert sum(map(bool, long["variables"][0].get("without", []))) <= 500
    X = X[4:]
    other = OsciFormerRegressor(**tiny, resonators=False).fit(X, rng.normal(size=(20, 6)))
    wrapped = Model(other, "regression", {}, {})
    assert write_report(wrapped, tmp_path / "b.html", X[:9], chosen=X[:1]) < MOST_BYTES


def test_no_text_of_the_data_ends_the_script_that_holds_it() -> None:
    evil = "</script><script>alert(1)</script><!--\u2028"
    page = assemble({"facts": [["Target", evil]], "sections": []})
    plain = assemble({"facts": [], "sections": []})
    for tag in ("<script", "</script", "<!--"):
        assert page.count(tag) == plain.count(tag)
    assert evil not in page


def oscillators(layer: str, role: str, heads: int, channels: int) -> LayerSpectrum:
    omega = np.arange(1.0, 1.0 + heads * channels).reshape(heads, channels)
    return LayerSpectrum(layer, role, omega, 0.1 + 0 * omega, 0 * omega, 9.0, None)


def views_of(
    spectra: list[LayerSpectrum], monkeypatch: pytest.MonkeyPatch
) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(sections, "find_spectra", lambda _: spectra)
    made = sections.make_sections(SimpleNamespace(task="forecasting"), None, None, None, {})
    return {item["id"]: item for item in made}


def test_only_keys_have_a_resonance(monkeypatch: pytest.MonkeyPatch) -> None:
    values, bank = oscillators("1", "values", 1, 2), oscillators("bank", "resonators", 1, 2)
    assert set(views_of([values, bank], monkeypatch)) == {"spectra"}
    found = views_of([oscillators("1", "keys", 1, 2), values, bank], monkeypatch)
    assert found["resonance"]["choices"][0]["options"] == ["layer 1, keys"]


def test_a_head_or_channel_that_is_not_there_is_said_to_be_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spectra = [oscillators("1", "keys", 2, 4), oscillators("2", "keys", 1, 3)]
    found = views_of(spectra, monkeypatch)
    for key, of in (("1,2", "spectra"), ("1,1,0", "resonance")):
        view = found[of]["views"][key]
        assert "charts" not in view
        assert view["tables"][0]["title"].startswith("No such head in this layer.")
        assert len(view["tables"][0]["rows"]) == 3
    assert found["spectra"]["views"]["0,2"]["charts"][0]["title"] == "Layer 1, keys, head 2"
    assert found["resonance"]["choices"][2]["options"] == ["fastest", "2", "3", "slowest"]
    views = found["resonance"]["views"]
    titles = [views[f"0,1,{place}"]["charts"][0]["title"] for place in range(4)]
    assert [title.split(":")[0] for title in titles] == [
        f"Head 2, channel {channel}" for channel in (3, 2, 1, 0)
    ]
    assert views["1,0,3"]["tables"][0]["title"].startswith("No such channel in this layer.")


def test_labels_of_a_file_are_not_the_truth_of_imputations(
    cli: Call, runs: Path, frame: Any, tmp_path: Path
) -> None:
    series = from_frame(frame[["who", "hour", "a", "b", "ill"]], id="who", time="hour", label="ill")
    save_npz(series, tmp_path / "labelled.npz")
    page = tmp_path / "page.html"
    outcome = cli("inspect", runs / "imputation", tmp_path / "labelled.npz", "-o", page)
    assert outcome.code == 0, outcome.err
    assert all("truth" not in item for item in content_of(page)["sections"][0]["series"])
    model = Model.load(runs / "imputation", accelerator="cpu")
    write_report(model, page, series.replace(labels=None), series.labels)
    assert all("truth" not in item for item in content_of(page)["sections"][0]["series"])


def test_long_names_with_the_same_start_keep_their_own_responses(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    times = [np.sort(rng.uniform(0, 9, 12)) for _ in range(20)]
    values = [rng.normal(size=(12, 2)) for _ in times]
    names = ["x" * 70 + end for end in "ab"]
    X = IrregularSeries.from_arrays(times, values, feature_names=names)
    y = np.array([v.mean() for v in values])
    wrapped = Model(ResonatorRegressor(random_state=0).fit(X, y), "regression", {}, {})
    write_report(wrapped, tmp_path / "page.html", X, chosen=X[:1])
    shown = content_of(tmp_path / "page.html")["sections"][0]["series"][0]
    assert {item["column"] for item in shown["variables"]} == {0, 1}
    first, second = sorted(shown["response"]["variables"], key=lambda item: item["column"])
    assert (first["column"], second["column"]) == (0, 1)
    assert first["name"] == second["name"]
    assert first["z"] != second["z"]


def test_bad_calls_are_refused(cli: Call, runs: Path, tables: Path, tmp_path: Path) -> None:
    run, table, page = runs / "classification", tables / "wide.parquet", tmp_path / "page.html"
    for flags, code, message in (
        (["--series=nobody", "-o", page], 1, "no series 'nobody'"),
        (["-o", tmp_path / "page.png"], 2, "must end in .html"),
        ([*(f"--series={k}" for k in range(7)), "-o", page], 2, "may be given 6 times; got 7"),
    ):
        outcome = cli("inspect", run, table, *flags)
        assert outcome.code == code
        assert message in outcome.err
    outcome = cli("inspect", runs / "events", tables / "narrow.csv", "--target=a", "-o", page)
    assert outcome.code == 2
    assert list(tmp_path.iterdir()) == []
