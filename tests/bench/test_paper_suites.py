"""The paper's demonstrations and ablations: their data, their references, and toy runs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from osciformer.bench import documents
from osciformer.bench.__main__ import SUITES, main
from osciformer.bench.documents import Document
from osciformer.bench.paper import ablations, chaos, regression, resonance
from osciformer.bench.paper.suite import Reader, make_optimizer, regimes, spectra_of
from osciformer.nn import OscillatorAttention, Spectrum


@pytest.fixture
def run_toy(monkeypatch, tmp_path):
    """Run a suite at toy size in this process; return its rows, its table and its pictures."""

    def in_this_process(jobs, work, settings, **_):
        for job in jobs:
            yield job, work(job, settings)

    monkeypatch.setattr(documents, "run_jobs", in_this_process)

    def run(name, rows):
        files = ["-o", str(tmp_path / "out.json"), "--table", str(tmp_path / "out.md")]
        files += ["--pictures", str(tmp_path)]
        assert main([name, *files, "--quick", f"--rows={rows}"]) == 0
        found = json.loads((tmp_path / "out.json").read_text())["rows"]
        return found, (tmp_path / "out.md").read_text(), list(tmp_path.glob("*.png"))

    return run


def test_help_lists_every_suite(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert {"resonance", "regression", "chaos", "ablations", "events", "layer"} <= set(SUITES)
    assert all(name in told for name in SUITES)


def test_a_series_rotates_at_the_frequency_of_its_class():
    times, values, labels = resonance.make_series(200, 0)
    omega = 2 * np.pi * (0.5 + 0.1 * labels.numpy())[:, None]
    rotation = (values[..., 0] + 1j * values[..., 1]).numpy()
    still = rotation * np.exp(-1j * omega * times.numpy())  # A e^{i phi} and noise
    assert np.abs(still - still.mean(axis=1, keepdims=True)).std() < 0.06
    assert (np.abs(still.mean(axis=1)) > 0.75).all()
    assert (np.abs(still.mean(axis=1)) < 1.25).all()


def test_frequencies_from_the_spectrum_are_those_of_the_series():
    times, values, labels = resonance.make_series(300, 0)
    one = labels == 20
    found = resonance.initial_omega("spectrum", 5, times[one], values[one])
    np.testing.assert_allclose(found, 2 * np.pi * 2.5, rtol=0.05)
    spread = resonance.initial_omega("spectrum", 41, times, values)
    np.testing.assert_allclose(spread, resonance.CLASSES, atol=2 * resonance.STEP)


def test_the_layer_answers_where_its_natural_frequencies_are():
    torch.manual_seed(0)
    layer = OscillatorAttention(8, 1, value="point", zeta_range=(0.002, 0.02))
    model = Reader(layer, 2, 41)
    omega = torch.linspace(5.0, 25.0, 8)
    for spectrum in spectra_of(model):
        spectrum.raw_omega.data.copy_(omega.log()[None])
    found = resonance.compare_with_theory(model, 2)
    assert found["inside"] == 8
    assert found["correlation_peak"] > 0.99
    assert found["median_distance"] < 0.5
    assert found["correlation_finite"] > found["correlation_H"] > 0.7


def test_a_finite_record_of_an_undamped_oscillator_has_the_spectrum_of_a_cosine():
    omega = torch.tensor([10.0], dtype=torch.float64)
    endless, finite = resonance.theory(omega, torch.tensor([0.0], dtype=torch.float64))
    asked, length = resonance.ASKED.numpy(), resonance.END
    # The transform of cos(10 s) on [0, 5], as two sincs.
    parts = [(np.exp(1j * x * length) - 1) / (1j * x) for x in (asked + 10, asked - 10)]
    np.testing.assert_allclose(finite[:, 0], np.abs(sum(parts)) / 2, atol=1e-4)
    np.testing.assert_allclose(endless[:, 0], 1 / np.abs(100 - asked**2))


@pytest.mark.parametrize(
    ("kind", "moves"), [("none", False), ("decoupled", True), ("l2", True)], ids=str
)
def test_weight_decay_reaches_spectra_if_it_is_told_to(kind, moves):
    layer = OscillatorAttention(4, 1)
    before = layer.key_spectrum.raw_zeta.detach().clone()
    settings = {"lr": 0.1, "spectra_lr": 0.1, "weight_decay": 0.5, "spectra_decay": kind}
    optimizer = make_optimizer(layer, **settings)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = layer.key_spectrum.raw_zeta.detach().abs() < before.abs()
    assert bool(shrunk.all()) is moves


def test_estimators_let_spectra_decay_inside_the_block_alone():
    with ablations.spectra_that_decay(is_wanted=True):
        assert "raw_zeta" not in Spectrum.no_weight_decay
    assert "raw_zeta" in Spectrum.no_weight_decay


def test_regimes_are_shares_of_channels():
    found = regimes(torch.tensor([0.2, 0.5, 0.99, 1.5], dtype=torch.float64))
    assert found == {"under": 50.0, "near": 25.0, "over": 25.0, "median_zeta": pytest.approx(0.745)}


def test_targets_are_the_sum_of_cosines_and_keys_cannot_see_a_sign():
    data = regression.make_series(50, 0)
    exact = (data.amplitude * (7.0 * regression.OMEGA).cos()).sum(dim=1)
    np.testing.assert_allclose(data.target, exact)
    assert {int(count) for count in (data.amplitude > 0).sum(dim=1)} == {1, 2, 3}
    np.testing.assert_allclose(regression._extrapolate(data), data.target, atol=0.2)
    flipped = data._replace(values=-data.values)
    torch.testing.assert_close(regression.energies(flipped), regression.energies(data))


def test_padding_adds_nothing_to_the_coefficients():
    data = regression.make_series(20, 0)
    one = next(n for n in range(20) if not data.present[n].all())
    count = int(data.present[one].sum())
    short = regression.Data(*(x[one : one + 1] for x in data))
    short = short._replace(times=short.times[:, :count], values=short.values[:, :count])
    for whole, alone in zip(
        regression.coefficients(data), regression.coefficients(short), strict=True
    ):
        torch.testing.assert_close(whole[one : one + 1], alone)


def test_the_lyapunov_exponent_of_the_full_map_is_the_logarithm_of_two():
    assert chaos.lyapunov_exponent(4.0) == pytest.approx(math.log(2), abs=5e-3)
    assert chaos.lyapunov_exponent(3.2) < 0  # a cycle of two


def test_a_free_run_of_the_map_itself_is_the_orbit():
    orbit = chaos.logistic(3.57, chaos.WINDOW + chaos.HORIZON)
    window = orbit[None, : chaos.WINDOW]
    run = chaos.free_run(lambda windows: 3.57 * windows[:, -1] * (1 - windows[:, -1]), window)
    np.testing.assert_allclose(run[0], orbit[chaos.WINDOW :], atol=1e-10)


def test_a_toy_run_of_resonance_has_the_matched_filter_beside_it(run_toy):
    rows, table, pictures = run_toy("resonance", "matched_filter,spectrum,damped_l2")
    assert [row["row"] for row in rows] == ["matched_filter", "spectrum", "damped_l2"]
    assert rows[0]["accuracy"] == 1.0
    assert rows[1]["after"]["correlation_peak"] > 0.9
    assert "| matched filter (no training) | 100.00 |" in table
    assert "Toy size" in table
    assert [path.name for path in pictures] == ["paper_resonance.png"]


def test_a_toy_run_of_regression_has_references(run_toy):
    rows, table, pictures = run_toy("regression", "constant,ridge,cosines,keys,attention")
    error = {row["row"]: row["mse"] for row in rows}
    assert error["cosines"] < error["ridge"] < error["constant"]
    assert "| the mean of the training targets |" in table
    assert len(pictures) == 1


def test_a_toy_run_of_chaos_has_references(run_toy):
    rows, table, pictures = run_toy("chaos", "period,parabola,hold")
    found = {(row["row"], row["rate"]): row for row in rows}
    assert found["parabola", 3.57]["rmse"]["256"] < 1e-6
    assert found["period", 3.57]["rmse"]["16"] < 0.05 < found["period", 3.9]["rmse"]["16"]
    assert "r = 3.9: Lyapunov exponent 0.49" in table
    assert len(pictures) == 1


def test_a_toy_run_of_ablations_changes_one_setting_at_a_time(run_toy, monkeypatch):
    factors = {"base": ablations.FACTORS["base"], "query": {"hold": {"query": "hold"}}}
    monkeypatch.setattr(ablations, "FACTORS", factors)
    rows, table, pictures = run_toy("ablations", "synthetic")
    assert [(row["factor"], row["level"]) for row in rows] == [("base", "base"), ("query", "hold")]
    assert rows[0]["regimes_before"]["under"] == 100
    assert "| query | hold |" in table
    assert len(pictures) == 1


@pytest.mark.parametrize("task", ["synthetic", "heart_rate"])
def test_attention_is_all_that_a_cell_of_the_ablations_has(task):
    cell = ablations.make_estimator(task, "base", 0)
    assert cell.resonators is False
    # What is not given is the estimator's choice, and it chooses them.
    assert {cell.model_options[name] for name in ("variables", "skip", "carry")} == {False}


@pytest.mark.parametrize("name", ["resonance", "regression", "chaos", "ablations"])
def test_a_suite_without_a_finished_row_draws_nothing(name, tmp_path):
    files = ["-o", str(tmp_path / "new.json"), "--table", str(tmp_path / "new.md")]
    assert main([name, *files, "--minutes", "0", "--pictures", str(tmp_path)]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["new.md"]


def test_cells_of_the_ablations_are_shown_before_their_base(tmp_path):
    document = Document(tmp_path / "out.json", {})
    document.runs.append({"command": "toy"})
    found = {"factor": "query", "measure": 61.5, "trivial": 10.0, "epoch_seconds": 1.0}
    document.add({"task": "libras", "level": "hold", "seed": 0}, found)
    table = "\n".join(ablations.tables(document))
    assert "| query | hold | 61.5 | 1.00 |" in table
    assert "| trivial |  | 10.0 | - |" in table
    assert len(ablations.draw(document).axes) == 1


def test_the_table_of_chaos_tells_missing_seeds_and_what_is_never_lost(tmp_path):
    document = Document(tmp_path / "out.json", {})
    document.runs.append({"command": "toy"})
    rmse = {str(h): 0.5 for h in chaos.HORIZONS}
    for name, seed, lost in (
        ("period", 0, 256.0),
        ("hold", 0, 256.0),
        ("hold", 1, 100.0),
        ("modes_8", 0, 9.0),
    ):
        row = {"one_step": 0.5, "rmse": rmse, "lost": lost, "is_bounded": True}
        document.add({"row": name, "rate": 3.9, "seed": seed}, row)
    lines = [line.split(" | ") for line in chaos.tables(document) if line.startswith("|")]
    lost = {line[0].removeprefix("| "): line[6] for line in lines}
    assert "1 step" in lines[0]
    assert lost["the value of 16 steps ago"] == "> 256"
    assert lost["attention, query `hold`"] == "> 178 ± 110"
    assert lost["attention, learned query, J = 8"] == "9 (1)"


def test_heart_rates_without_data_say_what_is_missing(monkeypatch):
    monkeypatch.delenv("OSCIFORMER_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"bidmc\.npz in the folder that OSCIFORMER_DATA"):
        ablations.load_heart_rate(10)
