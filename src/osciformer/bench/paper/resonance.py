"""`osciformer bench resonance`: which of 41 frequencies is it, and is attention resonance?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from osciformer._types import Float, Tensor
from osciformer.bench.documents import Document, mean_of_seeds, spread
from osciformer.bench.paper.suite import (
    NEAR_IN_WORDS,
    Decay,
    Reader,
    band,
    regimes,
    spectra_of,
    train,
    zetas,
)
from osciformer.bench.report import Row, markdown_table
from osciformer.bench.suite import (
    COLOURS,
    REFERENCE,
    Suite,
    jobs_by_seed,
    new_figure,
    of_row,
    rounded,
)
from osciformer.bench.workers import Job
from osciformer.math.banks import frequency_range
from osciformer.math.driven import transfer_function
from osciformer.math.oscillator import propagator
from osciformer.models.forward_fill import positive_gaps
from osciformer.nn import OscillatorAttention, ResonatorLayer

LENGTH, END, NOISE = 32, 5.0, 0.05
STEP = 2 * math.pi * 0.1
#: Frequencies of the classes, in radians per unit of time.
CLASSES = 2 * math.pi * (0.5 + 0.1 * torch.arange(41, dtype=torch.float64))
#: Series to train on, to follow the training with, and to test on; at full and at toy size.
SIZES = ((50_000, 2_000, 10_000), (256, 64, 64))
#: Frequencies and phases at which a trained layer is asked for its response.
ASKED = torch.linspace(0.8 * float(CLASSES[0]), 1.1 * float(CLASSES[-1]), 160, dtype=torch.float64)
PHASES = math.pi * torch.arange(8, dtype=torch.float64) / 8

# Where frequencies start: as the paper says, as the layer's default, from the times alone (two
# rules), or from the spectrum of the training series.
Grid = Literal["paper", "default", "data", "typical", "spectrum"]
#: Damping that resolves two classes: an oscillator rings for 1 / (2 zeta) radians.
SHARP, PAPER = (0.002, 0.02), (0.05, 0.4)


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    title: str
    grid: Grid = "spectrum"
    zeta_range: tuple[float, float] = SHARP
    query: str = "hold"
    value: str = "point"
    dim: int = 64
    hidden_dim: int = 128
    channels: int = 2
    epochs: int = 6
    layer: Literal["attention", "resonator"] = "attention"
    spectra_lr: float = 5e-4
    spectra_decay: Decay = "none"


_PAPER: dict[str, Any] = {"dim": 32, "hidden_dim": 64, "zeta_range": PAPER}
VARIANTS = {
    "spectrum": Variant("frequencies from the data's spectrum"),
    "typical": Variant("frequencies from the times, `typical`", "typical"),
    "data": Variant("frequencies from the times, `data`", "data"),
    "default": Variant("the layer's default range, 0.1 to 200 a span", "default"),
    "damped": Variant("spectrum, the paper's damping 0.05 to 0.4", zeta_range=PAPER),
    "average": Variant("spectrum, values averaged", value="average"),
    "resonator": Variant("spectrum, `ResonatorLayer`", layer="resonator"),
    "spectrum_long": Variant("the same as the first, twice as long", epochs=12),
    "one_channel": Variant("spectrum, one variable (harder)", channels=1),
    "damped_adamw": Variant(
        "the paper's damping, AdamW decays spectra", zeta_range=PAPER, spectra_decay="decoupled"
    ),
    "damped_l2": Variant(
        "the paper's damping, Adam with L2 decay of all", zeta_range=PAPER, spectra_decay="l2"
    ),
    "paper_hold": Variant("the paper's range and sizes, query `hold`", "paper", **_PAPER),
    "paper": Variant("the paper's setting, 2 epochs", "paper", query="learned", epochs=2, **_PAPER),
}
# Numbers of a row beside theory.
_THEORY = (
    *("correlation_H", "correlation_finite", "correlation_peak"),
    *("median_distance", "largest_gap"),
)
# Curves of a channel: their label, width and style.
_CURVES = {
    "measured": ("response of the layer", 1.6, "-"),
    "H": ("|H|", 0.9, ":"),
    "finite": ("|H| of 5 units of time", 0.9, "--"),
}
#: The row whose channels are drawn, of the first seed.
DRAWN = "spectrum"
#: A row that trains nothing: the class whose sinusoid fits best.
MATCHED = "matched_filter"


def make_series(number: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return times `[B, N]`, values `[B, N, 2]` and classes `[B]` of the paper's series."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (number,), generator=generator)
    # Of a Poisson process, given their number, times are sorted uniform numbers.
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    times = END * torch.rand(number, LENGTH, **draw).sort(dim=1).values
    amplitude = 0.8 + 0.4 * torch.rand(number, 1, **draw)
    phase = 2 * math.pi * torch.rand(number, 1, **draw)
    values = amplitude[..., None] * waves(CLASSES[labels][:, None] * times + phase)
    values = values + NOISE * torch.randn(values.shape, **draw)
    return times.float(), values.float(), labels


def waves(angle: Float[Tensor, "*S"]) -> Float[Tensor, "*S 2"]:
    """Return cosine and sine."""
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def power(times: Tensor, values: Tensor, omega: Tensor) -> Float[Tensor, "B W"]:
    """Return the power of series at some frequencies, whatever their phase."""
    if values.shape[-1] == 2:  # the two are real and imaginary part of one rotation
        values = torch.view_as_complex(values.double().contiguous())[..., None]
    turned = torch.polar(torch.ones(()).double(), -times.double()[..., None] * omega)
    return (values * turned).sum(dim=1).abs().square()


def initial_omega(grid: Grid, count: int, times: Tensor, values: Tensor) -> Tensor:
    """Return frequencies to start from, increasing; those of the paper and of ranges at random."""
    if grid == "spectrum":
        # The strongest frequency of each series; equally many series lie between two of ours.
        asked = torch.linspace(*frequency_range(times), 1000, dtype=torch.float64)
        strongest = asked[power(times, values, asked).argmax(dim=1)]
        places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return torch.quantile(strongest, places)
    low, high = {
        "paper": (1e-2 / END, 10.0 / END),
        "default": (0.1 / END, 200.0 / END),
        "data": frequency_range(times),
        "typical": (1 / END, math.pi / float(positive_gaps(times, None).median())),
    }[grid]
    return (low * (high / low) ** torch.rand(count, dtype=torch.float64)).sort().values


def make_model(variant: Variant, times: Tensor, values: Tensor) -> Reader:
    """Return the untrained model of a row."""
    settings: dict[str, Any] = {"zeta_range": variant.zeta_range}
    layer: nn.Module
    if variant.layer == "resonator":
        layer = ResonatorLayer(variant.dim, **settings)
    else:
        settings |= {"query": variant.query, "value": variant.value}
        if variant.query == "learned":
            # Eight of the 41 frequencies, as the paper has it.
            settings |= {"bank": "linear", "omega_range": (float(CLASSES[0]), float(CLASSES[-1]))}
        layer = OscillatorAttention(variant.dim, 1, **settings)
    model = Reader(layer, variant.channels, len(CLASSES), hidden_dim=variant.hidden_dim)
    for spectrum in spectra_of(model):
        omega = initial_omega(variant.grid, variant.dim, times[:2000], values[:2000])
        spectrum.raw_omega.data.copy_(omega.log().view_as(spectrum.raw_omega))
    return model


@torch.no_grad()
def attended(model: Reader, times: Tensor, values: Tensor) -> Float[Tensor, "B C"]:
    """Return what each channel of the layer attends to at the end, before channels are mixed."""
    reads = torch.full_like(times[:, :1], END)
    tokens = model.embedding(values)
    _, found = model.attention(tokens, times, query_times=reads, return_internals=True)
    if not hasattr(found, "weights"):  # driven resonators
        return found.position[:, 0, 0]  # type: ignore[no-any-return]
    at_end = found.value_trajectories(torch.tensor([END]))[:, 0, :, 0]  # [B, N, C]
    return torch.einsum("bn,bnc->bc", found.weights[:, 0, 0], at_end)


def responses(model: Reader, channels: int) -> Float[Tensor, "W C"]:
    """Return the largest response over phases to a sinusoid of each asked frequency."""
    times = make_series(3, seed=9)[0]
    found = []
    for omega in ASKED.split(20):
        angle = omega[:, None, None, None] * times.double()[:, None] + PHASES[:, None]
        series = waves(angle)[..., :channels].float()  # [20, 3, phases, N, F]
        at = times[:, None].expand(series.shape[:-1])
        answer = attended(model, at.flatten(0, 2), series.flatten(0, 2))
        found.append(answer.view(*series.shape[:3], -1).abs().amax(dim=2).mean(dim=1))
    return torch.cat(found)


def theory(omega: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
    """Return |H| at the asked frequencies `[W, C]`, and the same of a record of finite length."""
    asked = ASKED[:, None]
    endless = transfer_function(asked, omega=omega, gamma=zeta * omega).abs()
    s = torch.linspace(0.0, END, 2001, dtype=torch.float64)
    key = propagator(s[:, None], omega, zeta)[0]  # [S, C]
    turned = torch.polar(torch.ones(()).double(), asked * s)
    return endless, torch.trapezoid(turned[..., None] * key, s, dim=1).abs()


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return the correlation of columns."""
    a, b = (x.double() - x.double().mean(dim=0) for x in (a, b))
    return (a * b).sum(dim=0) / (a.square().sum(dim=0) * b.square().sum(dim=0)).sqrt()


def compare_with_theory(model: Reader, channels: int) -> Row:
    """Return where oscillators respond, beside where their frequency and damping say."""
    spectrum = spectra_of(model)[-1]  # that of the values, which are what is read
    omega, zeta = (x.detach().double().flatten() for x in (spectrum.omega, spectrum.zeta))
    measured = responses(model, channels)
    endless, finite = theory(omega, zeta)
    peak = ASKED[measured.argmax(dim=0)]
    # Elsewhere the largest response asked for is at the edge of what is asked.
    inside = (omega > CLASSES[0]) & (omega < CLASSES[-1])
    found: Row = {"inside": int(inside.sum()), "omega": omega.tolist(), "zeta": zeta.tolist()}
    if found["inside"] < 3:
        return found
    apart = (peak - omega).abs()[inside] / STEP
    gaps = (CLASSES[:, None] - omega).abs().amin(dim=1) / STEP
    return found | {
        "correlation_H": float(correlation(measured, endless)[inside].median()),
        "correlation_finite": float(correlation(measured, finite)[inside].median()),
        "correlation_peak": float(torch.corrcoef(torch.stack((peak, omega))[:, inside])[0, 1]),
        "median_distance": float(apart.median()),
        "largest_gap": float(gaps.max()),
        "peak": peak.tolist(),
    }


def drawn_channels(model: Reader, channels: int) -> list[Row]:
    """Return the responses of some channels beside theory, each over its largest."""
    spectrum = spectra_of(model)[-1]
    omega, zeta = (x.detach().double().flatten() for x in (spectrum.omega, spectrum.zeta))
    curves = dict(zip(_CURVES, (responses(model, channels), *theory(omega, zeta)), strict=True))
    places = np.linspace(0, len(omega) - 1, 5)[:-1].astype(int)
    return [
        {name: (curve[:, c] / curve[:, c].max()).tolist() for name, curve in curves.items()}
        for c in omega.argsort()[places].tolist()
    ]


def by_class(model: Reader, test: tuple[Tensor, ...]) -> Float[Tensor, "K C"]:
    """Return the mean strength of each channel's response to the series of each class."""
    strength = attended(model, *test[:2]).abs()
    return torch.stack([strength[test[2] == k].mean(dim=0) for k in range(len(CLASSES))])


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Train and score one row."""
    seed, (train_size, val_size, test_size) = job["seed"], SIZES[settings["quick"]]
    sizes = {"train": train_size, "val": val_size, "test": test_size}
    parts = {name: make_series(n, 100 * seed + k) for k, (name, n) in enumerate(sizes.items())}
    test = parts["test"]
    if job["row"] == MATCHED:
        found = power(*test[:2], CLASSES).argmax(dim=1)
        return {"accuracy": float((found == test[2]).double().mean()), "parameters": 0}
    variant = VARIANTS[job["row"]]
    parts = {k: (t, x[..., : variant.channels], y) for k, (t, x, y) in parts.items()}
    torch.manual_seed(seed)
    model = make_model(variant, *parts["train"][:2])

    def accuracy(part: str) -> float:
        times, values, labels = parts[part]
        pairs = zip(times.split(500), values.split(500), strict=True)
        answers = torch.cat([model(t, x, END).argmax(dim=1) for t, x in pairs])
        return float((answers == labels).double().mean())

    before = compare_with_theory(model, variant.channels), regimes(zetas(model))
    history = train(
        model,
        lambda batch: cross_entropy(model(*batch[:2], END), batch[2]),
        parts["train"],
        epochs=1 if settings["quick"] else variant.epochs,
        seed=seed,
        score=lambda: accuracy("val"),
        spectra_lr=variant.spectra_lr,
        spectra_decay=variant.spectra_decay,
    )
    with torch.no_grad():
        tested = accuracy("test")
    after = compare_with_theory(model, variant.channels), regimes(zetas(model))
    row = {"accuracy": tested, **history, "before": before[0], "after": after[0]}
    if seed == 0 and job["row"] == DRAWN:
        row["by_class"] = by_class(model, parts["test"]).tolist()
        row["channels"] = drawn_channels(model, variant.channels)
    return rounded({**row, "regimes_before": before[1], "regimes_after": after[1]})


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    seeds = len({row["seed"] for row in document.finished})
    body, theories, damping = [], [], []
    for name in SUITE.rows:
        found = of_row(document, name)
        if not found:
            continue
        title = VARIANTS[name].title if name in VARIANTS else "matched filter (no training)"
        percent = mean_of_seeds([100 * row["accuracy"] for row in found], seeds, "{:.2f}")
        first = found[0]
        cost = [f"{first[key]:,}" if key in first else "-" for key in ("steps", "parameters")]
        seconds = spread([row["fit_seconds"] for row in found if "fit_seconds" in row], "{:.0f}")
        body.append([title, percent, *cost, seconds])
        afters = [row.get("after", {}) for row in found]
        # A layer that answers nothing has no correlation.
        with_theory = [row for row in afters if math.isfinite(row.get(_THEORY[0]) or math.nan)]
        if with_theory:
            entries = [spread([row[key] for row in with_theory]) for key in _THEORY]
            theories.append([title, *entries])
        if "regimes_after" in first:
            shares = [
                " / ".join(f"{first[when][key]:.1f}" for key in ("under", "near", "over"))
                + f", {first[when]['median_zeta']:.3f}"
                for when in ("regimes_before", "regimes_after")
            ]
            damping.append([title, *shares])
    columns = ["row", "test accuracy, %", "steps", "parameters", "processor s"]
    titles = ["row", "r(response, abs H)", "r(response, abs H of 5 units of time)"]
    titles += ["r(peak, omega)", "median distance, classes", "largest gap, classes"]
    return [
        "# Resonance: 41 frequencies",
        "",
        *markdown_table(columns, body),
        "",
        *markdown_table(titles, theories),
        "",
        "Shares of channels under-, near-critically and overdamped in %, and the median zeta",
        f"({NEAR_IN_WORDS}):",
        "",
        *markdown_table(["row", "before training", "after"], damping),
        "",
        *document.origin(),
    ]


def draw(document: Document) -> Any:
    """Return the figure: accuracy, training, responses beside theory, and classes by channel."""
    figure, axes = new_figure(2, 2, (10.5, 8.2))
    shown = [name for name in SUITE.rows if of_row(document, name)]
    accuracy = [[100 * row["accuracy"] for row in of_row(document, name)] for name in shown]
    means = [float(np.mean(x)) for x in accuracy]
    reach = np.array([[m - min(x), max(x) - m] for m, x in zip(means, accuracy, strict=True)]).T
    colours = [REFERENCE if name == MATCHED else COLOURS[0] for name in shown]
    axis = axes[0, 0]
    axis.barh(range(len(shown)), means, color=colours, xerr=reach, ecolor=COLOURS[1], capsize=3)
    for place, mean in enumerate(means):
        axis.text(
            min(mean, 84) + 2,
            place,
            f"{mean:.1f}",
            va="center",
            fontsize=8,
            color="white" if mean > 84 else "black",
        )
    axis.set(yticks=range(len(shown)), xlim=(0, 103), xlabel="test accuracy, %")
    axis.set_yticklabels([name.replace("_", " ") for name in shown])
    axis.invert_yaxis()
    axis.set_title("41 classes; bars: mean, lines: range of seeds", fontsize=10)

    axis = axes[0, 1]
    curves = [
        name
        for name in ("spectrum", "data", "damped", "resonator", "one_channel", "paper_hold")
        if name in shown
    ]
    for name, colour in zip(curves, COLOURS, strict=False):
        scores = [[100 * s for s in row["scores"]] for row in of_row(document, name)]
        steps = of_row(document, name)[0]["steps"] * np.arange(1, len(scores[0]) + 1)
        band(axis, steps / len(scores[0]), scores, colour, name.replace("_", " "))
    axis.axhline(100, color=REFERENCE, lw=0.8, ls=":", label="matched filter")
    axis.set(xlabel="training steps of 128 series", ylabel="validation accuracy, %")
    axis.set_title("Training; shade: range of seeds", fontsize=10)
    axis.set(ylim=(-2, 132), yticks=range(0, 101, 20))
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="upper center")

    first = next((row for row in of_row(document, DRAWN) if "by_class" in row), None)
    if first is None:
        return figure
    axis, hertz = axes[1, 0], ASKED / (2 * math.pi)
    for number, (one, colour) in enumerate(zip(first["channels"], COLOURS, strict=False)):
        for key, (label, width, style) in _CURVES.items():
            label = "_" if number else label  # explained once
            axis.plot(hertz, one[key], color=colour, lw=width, ls=style, label=label)
    axis.set(xlabel="frequency asked, turns a unit of time", ylabel="response / its largest")
    axis.set(ylim=(0, 1.2), yticks=np.arange(0, 1.1, 0.2))
    axis.set_title("Four channels of the trained layer", fontsize=10)
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="upper center")

    axis = axes[1, 1]
    omega = np.array(first["after"]["omega"])
    order = np.argsort(omega)
    strength = np.array(first["by_class"], dtype=float)[:, order]
    strength = strength / np.nanmax(strength, axis=0)
    image = axis.imshow(
        strength,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        extent=(0, len(order), 0.45, 4.55),
        interpolation="nearest",
    )
    axis.plot(
        np.arange(len(order)) + 0.5,
        omega[order] / (2 * math.pi),
        ".",
        ms=4,
        color="#D55E00",
        label="natural frequency of the channel",
    )
    axis.set(xlabel="channel, by its natural frequency", ylim=(0.45, 4.55))
    axis.set_ylabel("class, turns a unit of time")
    axis.legend(fontsize=8, loc="upper left")
    bar = figure.colorbar(image, ax=axis)
    bar.set_label("mean response / largest of the channel")
    return figure


SUITE = Suite(
    name="resonance",
    summary="The paper's classification of 41 frequencies, beside a matched filter.",
    rows=(MATCHED, *VARIANTS),
    jobs=jobs_by_seed,
    work=work,
    tables=tables,
    pictures={"paper_resonance": draw},
)
