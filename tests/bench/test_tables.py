"""Tables of models: the protocol, the problems, and toy runs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.signal import lombscargle

from osciformer.bench import documents
from osciformer.bench.__main__ import main
from osciformer.bench.documents import Document
from osciformer.bench.tables import (
    dynamics,
    harness,
    heart_rate,
    imdb,
    models,
    sine,
    spirals,
    uea,
    xor,
)
from osciformer.bench.tables.harness import Table, find_table, run_cell
from osciformer.bench.tables.models import Fitted, Model, find_model, peak, spectra
from osciformer.bench.tables.problem import Part, Problem, rmse, split_in_three
from osciformer.data import IrregularSeries

GRID = ({"shift": 1.0}, {"shift": 0.0}, {"shift": 2.0})


def labelled(labels) -> Part:
    arrays = [np.arange(2.0)] * len(labels)
    return Part(IrregularSeries.from_arrays(arrays, arrays, labels=np.array(labels)))


class Spy:
    """A toy problem of constants, and a model that remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []
        self.fits: list[tuple[float, int]] = []
        self.fails = False
        self.table = Table(
            name="toy",
            module="toy",
            summary="Toy.",
            rows=("case",),
            load=self.load,
            tasks="regression",
            sizes={"quick": {}, "small": {}, "full": {}},
            note="",
            own={"spy": Model(self.fit, GRID, ("regression",))},
            seeds=2,
        )

    def load(self, case, seed, size) -> Problem:
        tests = {"test": labelled([100.0, 102.0])}
        return Problem("regression", labelled([4.0, 6.0]), labelled([5.0, 5.5]), tests)

    def fit(self, problem, chosen, seed) -> Fitted:
        if self.fails:
            raise ValueError("no memory")
        if chosen["shift"] == 2.0:
            raise FloatingPointError("the loss is not finite")
        self.fits.append((chosen["shift"], seed))
        answer = problem.train.truth.mean() + chosen["shift"]

        def predict(part):
            self.seen.append(part.truth)
            return np.full(part.truth.shape, answer)

        return Fitted(predict, {"epochs": 3})


@pytest.fixture
def in_this_process(monkeypatch):
    def one_by_one(jobs, work, settings, *, is_ready=None, **_):
        waiting = list(jobs)
        while waiting:
            job = waiting.pop(next((n for n, job in enumerate(waiting) if is_ready(job)), 0))
            try:
                yield job, work(job, settings)
            except Exception as error:
                yield job, {"error": str(error)}

    monkeypatch.setattr(documents, "run_jobs", one_by_one)


@pytest.fixture
def spy(in_this_process, monkeypatch):
    found = Spy()
    monkeypatch.setattr(harness, "find_table", lambda module: found.table)
    return found


def run(table, folder, *arguments):
    files = ["-o", str(folder / "out.json"), "--table", str(folder / "out.md")]
    status = table.main([*files, *arguments])
    return status, json.loads((folder / "out.json").read_text())["rows"]


def test_validation_chooses_and_tests_are_scored_once_a_seed(spy, tmp_path):
    status, rows = run(spy.table, tmp_path, "--models=spy")
    assert status == 0
    trials = [row for row in rows if row["trial"] is not None]
    assert [row["validation"] for row in trials] == [0.79057, 0.35355, None]
    assert all("scores" not in row for row in trials)
    finals = [row for row in rows if row["trial"] is None]
    assert [(row["seed"], row["chosen"]["shift"]) for row in finals] == [(0, 0.0), (1, 0.0)]
    # The best trial on the tests would be another one, and no trial has met them.
    assert finals[0]["scores"]["test"]["rmse"] == pytest.approx(np.sqrt((95**2 + 97**2) / 2), 1e-4)
    assert spy.fits == [(1.0, 0), (0.0, 0), (0.0, 0), (0.0, 1)]
    met = [bool((truth > 50).any()) for truth in spy.seen]
    assert met == [False, False, False, True, False, True]


def test_a_stopped_run_goes_on_and_failed_jobs_are_tried_again(spy, tmp_path):
    spy.fails = True
    assert run(spy.table, tmp_path, "--models=spy")[0] == 1
    spy.fails = False
    assert run(spy.table, tmp_path, "--models=spy", "--seeds=1")[0] == 1  # that of another seed
    count = len(spy.fits)
    status, rows = run(spy.table, tmp_path, "--models=spy")
    assert (status, len(rows)) == (0, 5)
    assert spy.fits[count:] == [(0.0, 1)]


def test_answers_that_are_not_finite_are_a_failed_job(spy, tmp_path):
    spy.table.load("case", 0, {})
    model = Model(lambda *_: Fitted(lambda part: np.full(part.truth.shape, np.nan), {}), ({},))
    spy.table = dataclasses.replace(spy.table, own={"spy": model})
    status, rows = run(spy.table, tmp_path, "--models=spy", "--seeds=1")
    assert status == 1
    assert rows[0]["error"] == "its answers to a test part are not finite"


def test_a_score_without_its_trials_says_so(spy, tmp_path):
    job = {"case": "case", "model": "spy", "seed": 1, "trial": None}
    settings = {"suite": "toy", "size": "small", "file": str(tmp_path / "none.json")}
    with pytest.raises(RuntimeError, match="trials are not all there; run the command again"):
        run_cell(job, settings)
    assert not spy.table.is_ready(Document(tmp_path / "none.json", {}), job)


def test_an_unknown_model_is_named_with_near_ones(capsys):
    with pytest.raises(ValueError, match=r"no model 'gru_x' for regression.*gru_d"):
        find_model("gru_x", "regression", {})
    with pytest.raises(ValueError, match="no model 'contiformer' for forecasting"):
        find_model("contiformer", "forecasting", {})  # it cannot be read between rows
    with pytest.raises(SystemExit):
        main(["xor", "-o", "x.json", "--models", "lstn"])
    assert "unknown: lstn; choose among osciformer" in capsys.readouterr().err


def test_a_table_of_another_size_is_not_continued(spy, tmp_path):
    run(spy.table, tmp_path, "--models=constant")
    with pytest.raises(SystemExit, match="give another --output"):
        run(spy.table, tmp_path, "--models=constant", "--size=full")


@pytest.mark.parametrize("is_event", [False, True], ids=["equidistant", "event"])
def test_parity_is_that_of_the_bits_between_the_events(is_event):
    series = xor.make_streams(300, 5, is_event=is_event)
    lengths = []
    for one, label in zip(series, series.labels, strict=True):
        at = np.rint(one.times * 32).astype(int)
        values = one.values[:, 0].astype(int)
        bits = np.repeat(values[:-1], np.diff(at))  # each lasts until the next event
        bits = np.append(bits, values[-1])
        assert at[0] == 1
        assert len(bits) == at[-1]
        assert bits.sum() % 2 == label
        if is_event:  # each but the last is a change
            assert (np.diff(values)[:-1] != 0).all()
        else:
            assert len(values) == len(bits)
        lengths.append(len(bits))
    assert (min(lengths), max(lengths)) == (2, 31)
    assert 0.4 < series.labels.mean() < 0.6


def test_longer_streams_begin_where_those_of_training_end():
    tests = xor.load("event", 0, xor.SUITE.sizes["full"] | {"train": 9, "test": 200}).tests
    assert list(tests) == ["2 to 31 bits", "32 to 63 bits", "64 to 127 bits"]
    last = [np.array([one.times[-1] * 32 for one in part.series]) for part in tests.values()]
    assert [
        (at.min() >= low, at.max() <= high)
        for at, (low, high) in zip(last, ((2, 31), (32, 63), (64, 127)), strict=True)
    ] == [(True, True)] * 3


def test_a_wave_is_three_harmonics_a_parabola_and_noise():
    series = sine.make_waves(20, 3, classes=25, rows=400, is_class=False)
    classes = sine.make_waves(20, 3, classes=25, rows=400, is_class=True)
    residuals = []
    for one, frequency in [
        *zip(series, series.labels, strict=True),
        *zip(classes, 10 + 4 * classes.labels, strict=True),
    ]:
        turn = 2 * np.pi * frequency * one.times
        waves = [np.cos(turn), np.sin(turn), np.sin(2 * turn), np.sin(4 * turn)]
        found, *_ = np.linalg.lstsq(
            np.stack([*waves, (one.times - 0.5) ** 2], axis=1), one.values[:, 0], rcond=None
        )
        assert np.hypot(*found[:2]) == pytest.approx(0.5, abs=0.05)
        assert found[2:4] == pytest.approx([0.2, 0.1], abs=0.05)
        assert abs(found[4]) == pytest.approx(1.0, abs=0.2)
        residuals.append(one.values[:, 0] - found @ np.stack([*waves, (one.times - 0.5) ** 2]))
    assert np.concatenate(residuals).std() == pytest.approx(0.1, rel=0.05)


def test_spectra_are_those_of_scipy():
    series = sine.make_waves(3, 0, classes=5, rows=50, is_class=True)
    found = spectra(series, 0.5, 60)[:, 0]
    omega = 2 * np.pi * 0.5 * np.arange(1, 61)
    for one, mine in zip(series, found, strict=True):
        values = one.values[:, 0].astype(float)
        theirs = lombscargle(one.times, values, omega, normalize=True, floating_mean=True)
        np.testing.assert_allclose(mine, theirs, atol=2e-4)


def test_a_peak_is_between_the_lines_of_the_grid():
    generator, true = np.random.default_rng(0), np.array([2.1, 3.27, 4.6])
    times = [np.sort(generator.uniform(0, 10, 200)) for _ in true]
    values = [np.sin(2 * np.pi * f * t) for f, t in zip(true, times, strict=True)]
    part = Part(IrregularSeries.from_arrays(times, values, labels=true))
    problem = Problem("regression", part, part, {"test": part})
    found = peak(0.05, 120, first=20, unit=2.0).fit(problem, {}, 0).predict(part)
    np.testing.assert_allclose(found, 2.0 * true, atol=0.01)


def test_spirals_are_of_both_families_and_least_squares_finds_them():
    true, noisy, scale, shift = spirals.make_spirals(spirals.TOTAL, 0)
    assert (true.min(), true.max()) == (0.0, 1.0)
    points = (true - shift) / scale
    is_inward = points[:, -1, 1] > 5
    assert 100 < is_inward.sum() < 200
    # An outward one by hand: the radius about (5, 0) is a + b theta.
    one = points[~is_inward][0] - [5.0, 0.0]
    radius = one[:, 0] * np.cos(spirals.ANGLES) + one[:, 1] * np.sin(spirals.ANGLES)
    slope, start = np.polyfit(spirals.ANGLES, radius, 1)
    np.testing.assert_allclose(radius, start + slope * spirals.ANGLES, atol=1e-12)
    assert slope == pytest.approx(0.3, abs=0.1)
    # An inward one: about (-5, 0) it is a + 50 b / z.
    one = points[is_inward][0] + [5.0, 0.0]
    angle = 6 * np.pi + 1 - spirals.ANGLES
    radius = one[:, 0] * np.cos(angle) + one[:, 1] * np.sin(angle)
    slope, start = np.polyfit(50 / angle, radius, 1)
    np.testing.assert_allclose(radius, start + slope * 50 / angle, atol=1e-12)
    assert ((noisy - true) / scale).std() == pytest.approx(0.05, rel=0.02)
    for number in range(4):
        found = spirals.fit_curve(spirals.ANGLES[:75:2], true[number, :75:2])
        np.testing.assert_allclose(found, true[number], atol=1e-9)


def test_a_model_of_spirals_sees_some_noisy_points_of_the_first_half():
    problem = spirals.load("spirals", 0, spirals.SUITE.sizes["small"])
    assert set(problem.train.series.lengths) == {75}
    test = problem.tests["extrapolation"]
    assert set(test.series.lengths) == {50}
    assert test.series.times.max() < test.asked.times.min()
    generator = np.random.default_rng(0)
    draws = [problem.thin(problem.train.series, generator) for _ in range(2)]
    assert all(set(draw.lengths) == {50} for draw in draws)
    assert (draws[0].times.reshape(-1, 50) == draws[0].times[:50]).all()
    assert (draws[0].times != draws[1].times).any()


def test_training_asks_what_tests_ask(monkeypatch):
    problem = spirals.load("spirals", 0, spirals.SUITE.sizes["quick"])
    kept = {}
    make_draw = models._make_draw

    def keeping(parts, problem, model):
        kept["model"], kept["draw"] = model, make_draw(parts, problem, model)
        return kept["draw"]

    monkeypatch.setattr(models, "_make_draw", keeping)
    models.fit_network("gru_d", problem, {"learning_rate": 1e-3}, 0)
    model = kept["model"]
    some = problem.train.series.replace(ids=np.arange(len(problem.train.series)))[[3, 1]]
    inputs, asked = kept["draw"](model.transform_.transform(some), np.random.default_rng(0))
    assert inputs.lengths.tolist() == [50, 50]
    scaler = model.transform_.value_scaler
    found = asked.values * scaler.scale + scaler.center
    np.testing.assert_allclose(found, problem.train.asked[[3, 1]].values, atol=1e-5)


@pytest.mark.parametrize("name", dynamics.SYSTEMS)
def test_trajectories_are_those_of_scipy(name):
    system, count = dynamics.SYSTEMS[name], 2
    times, found = dynamics.make_trajectories(name, count, 7)
    generator = np.random.default_rng(7)
    first = generator.uniform(system.low, system.high, (count, len(system.low)))
    for at, states, start in zip(times, found, first, strict=True):
        wanted = solve_ivp(
            lambda _, x: [float(np.squeeze(part)) for part in system.rate(np.asarray(x)[:, None])],
            (0.0, system.span),
            start,
            method="DOP853",
            t_eval=at,
            **{"rtol": 1e-9, "atol": 1e-10},
        )
        np.testing.assert_allclose(states, wanted.y.T, atol=1e-5)


def test_forecasts_are_asked_after_what_is_seen():
    problem = dynamics.load("lorenz", 0, dynamics.SUITE.sizes["quick"])
    for part in (problem.train, problem.validation, *problem.tests.values()):
        pairs = zip(part.series, part.asked, strict=True)
        assert all(seen.times[-1] < asked.times[0] for seen, asked in pairs)
        lengths = part.series.lengths + part.asked.lengths
        assert (lengths == dynamics.ROWS).all()
    last = find_model("last", "forecasting", {}).fit(problem, {}, 0)
    test = problem.tests["test"]
    by_hand = np.concatenate(
        [
            np.repeat(one.values[-1:], len(asked.times), axis=0)
            for one, asked in zip(test.series, test.asked, strict=True)
        ]
    )
    assert rmse(test.truth, last.predict(test)) == pytest.approx(rmse(test.truth, by_hand))


def test_heart_rates_are_means_over_their_windows():
    generator = np.random.default_rng(0)
    signals = generator.normal(size=(2, 60_001, 2)).astype(np.float32)
    rates = generator.uniform(60, 120, (2, 481))
    rates[0, 40] = np.nan
    found = heart_rate.Recordings(signals, rates, 125)
    windows, targets = heart_rate.cut_windows(found, heart_rate.STARTS, 4)
    assert windows.shape == (2, 150, 1000, 2)
    assert windows[1, 149, 999, 0] == pytest.approx(signals[1, 447 * 125 + 3996 :][:4, 0].mean())
    assert targets[1, 3] == pytest.approx(rates[1, 9:41].mean())
    assert targets[0, 3] == pytest.approx(rates[0, 9:40].mean())


@pytest.fixture
def toy_recordings(tmp_path, monkeypatch):
    """Pulses of one frequency each, and their rates."""
    rates = np.linspace(50, 130, 20)
    at = np.arange(60_001) / 125
    pulse = np.sin(2 * np.pi * rates[:, None] / 60 * at).astype(np.float32)
    numerics = np.repeat(rates[:, None, None], 481, axis=1)
    stored = {"pleth": pulse, "ecg_ii": pulse, "numerics": numerics, "fs": 125}
    np.savez(tmp_path / "bidmc.npz", **stored)
    monkeypatch.setenv("OSCIFORMER_DATA", str(tmp_path))


def test_patients_of_the_split_by_recording_are_new(toy_recordings):
    size = heart_rate.SUITE.sizes["quick"]
    known, new = (heart_rate.load(case, 0, size) for case in ("pooled", "recording"))
    assert set(known.tests["test"].truth) & set(known.train.truth)
    assert not set(new.tests["test"].truth) & set(new.train.truth)
    finest = heart_rate.load("recording", 0, {**size, "decimation": 16})
    peak = find_model("peak", "regression", heart_rate.SUITE.own).fit(finest, {}, 0)
    assert rmse(finest.train.truth, peak.predict(finest.train)) < 0.2


def test_thirds_are_disjoint_and_all():
    parts = split_in_three(53, np.random.default_rng(0), (0.6, 0.15))
    assert [len(part) for part in parts] == [32, 8, 13]
    assert sorted(np.concatenate(parts)) == list(range(53))


@pytest.fixture
def toy_reviews(tmp_path, monkeypatch):
    """Reviews that say what they mean."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    generator = np.random.default_rng(0)
    filler = [" ".join(generator.choice(["a", "film", "with", "plot"], 4)) for _ in range(100)]
    labels = [n // 25 % 2 for n in range(100)]  # sorted by label, as in the file
    kinds = [3 * f"{('Bad', 'Good')[label]}! <br />" for label in labels]
    texts = [kind + words for kind, words in zip(kinds, filler, strict=True)]
    splits = ["train"] * 50 + ["test"] * 50
    table = arrow.table({"split": splits, "label": labels, "text": texts})
    parquet.write_table(table, tmp_path / "imdb.parquet")
    monkeypatch.setenv("OSCIFORMER_DATA", str(tmp_path))


def test_words_are_vectors_of_the_training_texts_and_parts_are_apart(toy_reviews):
    problem = imdb.load("imdb", 0, imdb.SUITE.sizes["quick"])
    parts = [problem.train, problem.validation, problem.tests["test"]]
    ids = [set(part.series.ids.tolist()) for part in parts]
    assert ids[0] | ids[1] == set(range(36))
    assert min(ids[2]) == 50
    assert 0.3 < problem.train.truth.mean() < 0.7
    assert {len(one.times) for part in parts for one in part.series} == {7}
    for name in ("tfidf", "tfidf_words"):
        fitted = find_model(name, "classification", imdb.SUITE.own).fit(problem, {}, 0)
        assert (fitted.predict(parts[2]) == parts[2].truth).all()
    first = [one.values[0] for one in problem.train.series]
    kind = {bool(c): v for c, v in zip(problem.train.truth, first, strict=True)}
    assert all((kind[bool(c)] == v).all() for c, v in zip(problem.train.truth, first, strict=True))
    assert np.linalg.norm(kind[True]) == pytest.approx(1.0, abs=1e-5)


MODELS = {
    "imdb": "osciformer_network,tfidf",
    "xor": "osciformer,osciformer_paper,boosting",
    "sine": "osciformer_network,lomb_scargle,peak",
    "spirals": "osciformer,least_squares,linear",
    "dynamics": "osciformer,last,constant",
    "hr": "osciformer_network,peak,resonator",
    "frequencies": "osciformer,lomb_scargle",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_toy_run_has_a_table_and_pictures(
    name, in_this_process, toy_recordings, toy_reviews, tmp_path, monkeypatch
):
    monkeypatch.setattr(models, "LEARNING_RATES", (1e-3, 1e-2))
    files = ["-o", str(tmp_path / "out.json"), "--table", str(tmp_path / "out.md")]
    table = find_table("heart_rate" if name == "hr" else name)
    rows = ",".join(table.rows[:2])
    arguments = ["--quick", f"--models={MODELS[name]}", f"--rows={rows}"]
    assert main([name, *files, *arguments, "--pictures", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["rows"]
    finals = [row for row in found if row["trial"] is None]
    text = (tmp_path / "out.md").read_text()
    for row in finals:
        (line,) = [
            x
            for x in text.split(f"## {row['case']}\n")[1].split("\n## ")[0].splitlines()
            if x.startswith(f"| {row['model']} |")
        ]
        assert row["size"] == "quick"
        if row["model"].startswith("osciformer"):
            assert row["chosen"].keys() == {"learning_rate"}
            assert {"epochs", "epoch_seconds", "parameters", "validation"} <= row.keys()
            assert f"{row['parameters']:,}" in line
    assert "Toy size" in text
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert f"table_{name}.png" in pictures
    if name == "spirals":
        assert "table_spirals_curves.png" in pictures


def test_cases_of_one_test_have_an_overview(spy, tmp_path):
    document = Document(tmp_path / "out.json", {})
    document.runs.append({"command": "toy"})
    table = dynamics.SUITE
    for number, case in enumerate(("lorenz", "sir", "goodwin")):
        for model in ("last", "constant")[: 1 + (case != "sir")]:
            row = {"scores": {"test": {"rmse": 0.5 + number}}, "chosen": {}}
            document.add({"case": case, "model": model, "seed": 0, "trial": None}, row)
    document.settings = {"size": "small"}
    text = "\n".join(table.tables_of(document))
    assert "| case | last | constant |\n| --- | --- | --- |\n| goodwin | 2.5 | 2.5 |" in text
    assert "| sir | 1.5 | - |\n| mean | 1.5 | - |" in text


def test_a_part_of_the_training_series_is_held_back_and_rows_are_dropped(monkeypatch):
    def get_toy(name, part, fold=None):
        labels = np.tile(["a", "b"], 10)
        values = np.arange(20.0)[:, None, None] + 100 * (part == "test") + np.zeros((1, 10, 1))
        return IrregularSeries.from_padded(values, labels=labels)

    monkeypatch.setattr(uea, "get_dataset", get_toy)
    problem = uea.load("Libras-30", 0, uea.SUITE.sizes["small"])
    parts = [problem.train, problem.validation, problem.tests["test"]]
    assert [len(part.series) for part in parts] == [16, 4, 20]
    assert [set(part.series.lengths) for part in parts] == [{7}] * 3
    assert sorted(problem.validation.truth) == ["a", "a", "b", "b"]
    series = [one.values[0, 0] for part in parts for one in part.series]
    assert sorted(series) == [*range(20), *range(100, 120)]
    assert (parts[2].series.times.reshape(20, 7) != np.arange(7)).any()
    other = uea.load("Libras-30", 1, uea.SUITE.sizes["small"])
    assert (other.tests["test"].series.times != parts[2].series.times).any()
