"""Spectra, probes and attention of trained networks, judged by integrals and by the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad, solve_ivp

from osciformer import (
    IrregularSeries,
    OsciFormerClassifier,
    OsciFormerEventPredictor,
    ResonatorClassifier,
)
from osciformer.inspection import (
    LayerSpectrum,
    attend_classes,
    attend_series,
    find_spectra,
    probe_channel,
    summarise_spectra,
)
from osciformer.plots import (
    plot_attention,
    plot_class_attention,
    plot_probe,
    plot_resonators,
    plot_spectra,
    plot_trajectories,
)

NAMES = ["$x_1$", "_y"]


def make_series(count: int = 16) -> IrregularSeries:
    rng = np.random.default_rng(0)
    times = [np.sort(rng.uniform(100, 160, size=int(rng.integers(6, 12)))) for _ in range(count)]
    values = [rng.normal(size=(len(t), 2)) + k % 2 for k, t in enumerate(times)]
    labels = [("_a", "$b")[k % 2] for k in range(count)]
    return IrregularSeries.from_arrays(times, values, labels=labels, feature_names=NAMES)


@pytest.fixture(scope="module")
def data() -> IrregularSeries:
    return make_series()


@pytest.fixture(scope="module")
def model(data: IrregularSeries) -> Any:
    settings = {"dim": 8, "num_layers": 2, "num_heads": 2, "max_epochs": 2, "random_state": 0}
    found = OsciFormerClassifier(**settings).fit(data)
    attention = found.model_.backbone.model.encoder.blocks[0].attention
    with torch.no_grad():  # so that velocities are not near zero
        attention.key_velocity += 0.5 * torch.randn_like(attention.key_velocity)
    return found


def test_spectra_are_those_of_the_layers_in_the_unit_of_the_data(model: Any) -> None:
    spectra = find_spectra(model)
    assert [(item.layer, item.role) for item in spectra] == [
        (layer, role) for layer in "12" for role in ("keys", "values")
    ]
    network = model.model_.backbone.model
    scale = float(network.time_scale.scale)
    learned = network.encoder.blocks[1].attention.value_spectrum
    np.testing.assert_allclose(spectra[3].omega * scale, learned.omega.detach(), rtol=1e-6)
    np.testing.assert_allclose(spectra[3].zeta, learned.zeta.detach(), rtol=1e-6)
    assert spectra[0].span == pytest.approx(scale)


def test_networks_without_oscillators_have_no_spectra(data: IrregularSeries) -> None:
    options = {"model_options": {"backbone": "gru_d"}, "dim": 8, "max_epochs": 1}
    other = OsciFormerClassifier(**options, resonators=False, random_state=0).fit(data)
    assert find_spectra(other) == []
    assert attend_series(other, data[:1]) == []
    assert attend_classes(other, data).layers == ()
    assert find_spectra(ResonatorClassifier(families=("summary",)).fit(data)) == []


def test_models_of_events_have_spectra_of_blocks_and_memory() -> None:
    sequences = [(np.arange(6.0) ** 1.5, [0, 1] * 3)] * 12
    model = OsciFormerEventPredictor(dim=8, num_heads=2, max_epochs=1, random_state=0)
    spectra = find_spectra(model.fit(sequences))
    assert [item.name for item in spectra] == [
        "memory, resonators",
        "layer 1, keys",
        "layer 1, values",
    ]
    assert spectra[0].omega.shape == (1, 8)
    assert spectra[1].omega.shape == (2, 4)


def test_table_counts_regimes() -> None:
    zeta = np.array([[0.2, 0.96, 1.04, 3.0], [0.1, 0.2, 0.94, 1.06]])
    omega = np.array([[1.0, 2.0, 4.0, 8.0]] * 2)
    spectrum = LayerSpectrum("1", "keys", omega, zeta, 0 * omega, 10.0, "h")
    found = summarise_spectra([spectrum])
    assert found[["underdamped", "near_critical", "overdamped"]].to_numpy().tolist() == [
        [0.25, 0.5, 0.25],
        [0.75, 0.0, 0.25],
    ]
    assert found.period.tolist() == pytest.approx([2 * np.pi * 0.375] * 2)
    assert found.zeta.tolist() == pytest.approx([1.0, 0.57])


@pytest.mark.parametrize("zeta", [0.1, 1.0, 2.5])
def test_probe_is_the_average_of_cosine_times_key(zeta: float) -> None:
    """Judged by solving the oscillator's equation and integrating numerically."""
    omega, velocity, gap = 1.7, 0.6, 5.0
    arrays = [np.array([[x]]) for x in (omega, zeta, velocity)]
    spectrum = LayerSpectrum("1", "keys", *arrays, 9.0, None)
    w, phase = np.array([0.4, 1.7, 6.0]), np.array([-2.0, 0.0, 1.3])
    found = probe_channel(spectrum, 0, 0, gap=gap, drive_omega=w)

    def motion(_: float, y: np.ndarray) -> list[float]:
        return [y[1], -2 * zeta * omega * y[1] - omega**2 * y[0]]

    solved = solve_ivp(motion, (0, gap), [1.0, velocity], rtol=1e-10, atol=1e-12, dense_output=True)
    expected = [
        [
            quad(lambda s, a=a, p=p: np.cos(a * s + p) * solved.sol(s)[0], 0, gap)[0] / gap
            for p in phase
        ]
        for a in w
    ]
    np.testing.assert_allclose(found.attention(phase), expected, atol=1e-7)
    best = found.attention(found.best_phase)
    np.testing.assert_allclose(np.diag(best), found.best, rtol=1e-10)
    gain = 1 / (omega**2 - w**2 + 2j * zeta * omega * w)
    np.testing.assert_allclose(found.gain, gain)
    assert probe_channel(spectrum, 0, 0).gap == 9.0


def test_a_key_that_a_blow_starts_has_the_phase_of_the_transfer_function() -> None:
    """The paper's statement, in the limit of a long gap and a velocity that outweighs position."""
    arrays = [np.array([[x]]) for x in (2.0, 0.2, 1e6)]
    spectrum = LayerSpectrum("1", "keys", *arrays, 1e3, None)
    found = probe_channel(spectrum, 0, 0)
    np.testing.assert_allclose(found.best_phase, np.angle(found.gain), atol=1e-4)
    ratio = found.best / np.abs(found.gain)
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)


def test_contributions_of_channels_add_up_to_the_attention(model: Any, data: Any) -> None:
    one = data[3:4]
    for layer in attend_series(model, one):
        for row in (0, 3, len(one.times) - 1):
            logits = layer.contributions(row).sum(axis=2)[: row + 1]
            weights = np.exp(logits) / np.exp(logits).sum(axis=0)
            np.testing.assert_allclose(weights.T, layer.weights[:, row, : row + 1], atol=1e-6)
            assert not layer.contributions(row)[row + 1 :].any()


def test_trajectories_start_at_the_times_of_the_data(model: Any, data: Any) -> None:
    (first, _) = attend_series(model, data[3:4])
    times = data[3].times
    found = first.trajectories("key", times)
    start = first.internals.keys.start[0].numpy()
    rows = np.arange(len(times))
    np.testing.assert_allclose(found[rows, rows], start, atol=1e-4)
    assert np.isnan(found[0, 1:]).all()


def test_attention_by_class_is_the_mean_over_its_series(model: Any, data: Any) -> None:
    found = attend_classes(model, data, num_bins=4)
    assert found.classes == ("$b", "_a")
    assert found.layers == (1, 2)
    np.testing.assert_allclose(found.weights.sum(axis=2), 1.0, atol=1e-5)
    some = np.flatnonzero(data.labels == "_a")
    expected = np.zeros(4)
    for place in some:
        layer, one = attend_series(model, data[[place]])[1], data[int(place)]
        ages = one.times[-1] - one.times
        expected += np.histogram(ages, found.edges, weights=layer.weights[:, -1].mean(axis=0))[0]
    np.testing.assert_allclose(found.weights[1, 1], expected / len(some), atol=1e-5)


def test_bad_calls_say_what_to_do(model: Any, data: Any) -> None:
    with pytest.raises(ValueError, match=r"one series with rows, as X\[k:k\+1\]"):
        attend_series(model, data[:2])
    with pytest.raises(ValueError, match="must not be empty; the model may have no osc"):
        plot_spectra([])
    with pytest.raises(ValueError, match="must not be empty; the model may have no osc"):
        plot_attention([])
    found = attend_classes(model, data)._replace(layers=(), weights=np.empty((0, 2, 20)))
    with pytest.raises(ValueError, match="has no layers; the model may have no osc"):
        plot_class_attention(found)
    with pytest.raises(TypeError, match="must be a fitted classifier; got object"):
        attend_classes(object(), data)
    with pytest.raises(TypeError, match="must have resonators; this object has none"):
        plot_resonators(object(), data[:1])


def test_figures_show_the_results_with_units_and_nothing_cut_off(model: Any, data: Any) -> None:
    spectra, layers = find_spectra(model), attend_series(model, data[3:4])
    figures = {
        "spectra": plot_spectra(spectra),
        "probe": plot_probe(probe_channel(spectra[0]._replace(unit="h"), 1, 2)),
        "attention": plot_attention(layers),
        "trajectories": plot_trajectories(layers[0], role="value"),
        "classes": plot_class_attention(attend_classes(model, data)),
        "resonators": plot_resonators(model, data[3:4], top=1),
    }
    for name, figure in figures.items():
        check_all_is_inside(figure)
        assert all(axis.get_xlabel() for axis in figure.axes[-1:] if name == "attention")
    (points, *_) = figures["spectra"].axes[0].collections
    dots = np.concatenate([x.get_offsets() for x in figures["spectra"].axes[0].collections])
    np.testing.assert_allclose(np.sort(dots[:, 0]), np.sort(spectra[0].omega.ravel()))
    assert points is not None
    labels = {axis.get_xlabel() for axis in figures["probe"].axes}
    assert "ω, radians per h" in labels
    legend = figures["classes"].legends[0].get_texts()
    assert [text.get_text() for text in legend] == [r"\$b", " _a"]
    assert len(figures["resonators"].axes) == 2  # one variable, and the colours


def check_all_is_inside(figure: Any) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for part in (*figure.axes, *figure.legends):
        box = part.get_tightbbox(canvas.get_renderer())
        assert min(box.x0, box.y0) >= -1
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y1 <= figure.bbox.y1 + 1
