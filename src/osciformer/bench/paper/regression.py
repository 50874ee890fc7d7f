"""`osciformer bench regression`: the paper's eight oscillator keys, which forecast one value."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss, softplus

from osciformer._types import Bool, Float, Tensor
from osciformer.bench.documents import Document, mean_of_seeds, spread
from osciformer.bench.paper.suite import Reader, train
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
from osciformer.math.driven import transfer_function
from osciformer.nn import OscillatorAttention

OMEGA = torch.tensor([2.0, 3.2, 4.4, 5.6, 6.0, 7.2, 8.0, 9.0], dtype=torch.float64)
TARGET_TIME = 7.0
#: The paper gives none of these: shape and mean of the gamma-distributed gaps, and the noise.
GAP_SHAPE, MEAN_GAP, NOISE = 4.0, 0.12, 0.05
AMPLITUDES = (0.8, 1.2)
#: Series to train on and to validate on; at full and at toy size.
SIZES = ((2000, 400), (256, 64))
ROWS = {
    "constant": "the mean of the training targets",
    "ridge": "ridge regression on (A_j, B_j)",
    "cosines": "least squares of the eight cosines, extrapolated",
    "keys": "eight keys, started at the eight frequencies",
    "keys_random": "eight keys, started log-uniform on [1, 10]",
    "keys_signed": "eight keys; amplitudes of both signs",
    "attention": "`OscillatorAttention` on the observations",
}


class Data(NamedTuple):
    """Series padded with their last row, and what is asked of them."""

    times: Float[Tensor, "B N"]
    values: Float[Tensor, "B N"]
    present: Bool[Tensor, "B N"]
    target: Float[Tensor, " B"]
    amplitude: Float[Tensor, "B 8"]


def make_series(number: int, seed: int, *, is_signed: bool = False) -> Data:
    """Return sums of one to three cosines of distinct frequencies and phase zero, with noise."""
    generator = np.random.default_rng(seed)
    count = 2 * int(TARGET_TIME / MEAN_GAP)  # more than are before the target
    gaps = generator.gamma(GAP_SHAPE, MEAN_GAP / GAP_SHAPE, (number, count))
    times = torch.from_numpy(gaps.cumsum(axis=1))
    present = times < TARGET_TIME
    places = generator.random((number, len(OMEGA))).argsort(axis=1).argsort(axis=1)
    is_in = places < generator.integers(1, 4, (number, 1))
    amplitude = np.where(is_in, generator.uniform(*AMPLITUDES, is_in.shape), 0.0)
    if is_signed:
        amplitude = amplitude * generator.choice([-1.0, 1.0], amplitude.shape)
    weights = torch.from_numpy(amplitude)
    values = ((times[..., None] * OMEGA).cos() * weights[:, None]).sum(dim=-1)
    values = values + NOISE * torch.from_numpy(generator.standard_normal(values.shape))
    last = present.sum(dim=1, keepdim=True) - 1
    place = torch.minimum(torch.arange(count).expand_as(last.expand(-1, count)), last)
    target = (weights * (TARGET_TIME * OMEGA).cos()).sum(dim=1)
    times, values = times.gather(1, place), values.gather(1, place)
    longest = int(present.sum(dim=1).max())
    return Data(times[:, :longest], values[:, :longest], present[:, :longest], target, weights)


def coefficients(data: Data) -> tuple[Tensor, Tensor]:
    """Return A and B `[B, 8]` of the paper, by the trapezoidal rule on the observations."""
    angle = data.times[..., None] * OMEGA  # padding has no gap, so it adds nothing
    found = [
        2
        / TARGET_TIME
        * torch.trapezoid(data.values[..., None] * wave, data.times[..., None], dim=1)
        for wave in (angle.cos(), angle.sin())
    ]
    return found[0], found[1]


def energies(data: Data) -> Float[Tensor, "B 8"]:
    """Return log(1 + A^2 + B^2), blind to phase and sign."""
    a, b = coefficients(data)
    return (a.square() + b.square()).log1p()


class OscillatorKeys(nn.Module):
    """The paper's model: a softmax over eight resonances that a spectrum of queries meets.

    Args:
        omega: Natural frequencies to start from `[K]`.
        values: Values of the keys to start from `[K]`.
    """

    def __init__(self, omega: Float[Tensor, " K"], values: Float[Tensor, " K"]) -> None:
        super().__init__()
        self.raw_omega = nn.Parameter(omega.log())
        self.raw_gamma = nn.Parameter(torch.full_like(omega, -1.0))
        self.values = nn.Parameter(values.clone())
        self.slope = nn.Parameter(torch.ones(len(OMEGA), dtype=omega.dtype))
        self.shift = nn.Parameter(torch.zeros(len(OMEGA), dtype=omega.dtype))

    def response(self, asked: Float[Tensor, " W"]) -> Float[Tensor, "K W"]:
        """Return |H| of each key at some frequencies."""
        omega, gamma = self.raw_omega.exp(), softplus(self.raw_gamma)
        return transfer_function(asked, omega=omega[:, None], gamma=gamma[:, None]).abs()

    def weights(self, features: Float[Tensor, "B 8"]) -> Float[Tensor, "B K"]:
        """Return the attention to the keys."""
        queries = softplus(self.slope * features + self.shift)
        return (queries @ self.response(OMEGA).T).softmax(dim=-1)

    def forward(self, features: Float[Tensor, "B 8"]) -> Float[Tensor, " B"]:
        """Return the forecast."""
        return self.weights(features) @ self.values


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Fit and score one row."""
    row, seed, is_quick = job["row"], job["seed"], settings["quick"]
    make = functools.partial(make_series, is_signed=row == "keys_signed")
    data, val = (make(n, 100 * seed + k) for k, n in enumerate(SIZES[is_quick]))
    torch.manual_seed(seed)
    found: Row = {}
    if row == "constant":
        answer = data.target.mean().expand_as(val.target)
    elif row == "ridge":
        answer = _ridge(torch.cat(coefficients(data), dim=1), data.target)(
            torch.cat(coefficients(val), dim=1)
        )
    elif row == "cosines":
        answer = _extrapolate(val)
    elif row == "attention":
        found, answer = _train_attention(data, val, seed, epochs=1 if is_quick else 40)
    else:
        found, answer = _train_keys(row, data, val, seed, epochs=3 if is_quick else 400)
    return rounded({**found, **_scores(answer, val.target)})


def _scores(answer: Tensor, target: Tensor) -> Row:
    mse = float(mse_loss(answer, target))
    has_spread = float(answer.std()) > 1e-9
    r = float(torch.corrcoef(torch.stack((answer, target)))[0, 1]) if has_spread else None
    return {"mse": mse, "rmse": mse**0.5, "correlation": r, "target_std": float(target.std())}


def _ridge(features: Tensor, target: Tensor, strength: float = 1e-3) -> Any:
    center, middle = features.mean(dim=0), target.mean()
    x = features - center
    gram = x.T @ x + strength * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.T @ (target - middle))
    return lambda other: (other - center) @ weights + middle


def _extrapolate(data: Data) -> Tensor:
    """Return forecasts of the amplitudes that fit best, phases known to be zero."""
    waves = (data.times[..., None] * OMEGA).cos() * data.present[..., None]
    gram = waves.mT @ waves + 1e-6 * torch.eye(len(OMEGA), dtype=waves.dtype)
    amplitude = torch.linalg.solve(gram, (waves.mT @ data.values[..., None])[..., 0])
    return amplitude @ (TARGET_TIME * OMEGA).cos()


def _train_keys(row: str, data: Data, val: Data, seed: int, epochs: int) -> tuple[Row, Tensor]:
    if row == "keys_random":
        omega = 10 ** torch.rand(len(OMEGA), dtype=torch.float64)
    else:
        omega = OMEGA.clone()
    model = OscillatorKeys(omega, data.target.std() * torch.randn(len(OMEGA), dtype=torch.float64))
    features, asked = energies(data), energies(val)
    center, scale = features.mean(dim=0), features.std(dim=0)
    features, asked = (features - center) / scale, (asked - center) / scale
    history = train(
        model,
        lambda batch: mse_loss(model(batch[0]), batch[1]),
        (features, data.target),
        epochs=epochs,
        seed=seed,
        score=lambda: float(mse_loss(model(asked), val.target)),
        lr=0.03,
        weight_decay=0.0,
    )
    history["scores"] = history["scores"][:: max(1, epochs // 50)]
    with torch.no_grad():
        answer = model(asked)
        learned, gamma = model.raw_omega.exp(), softplus(model.raw_gamma)
        # To which key attention turns when one frequency is alone, and where its |H| is largest.
        response = model.response(OMEGA)
        loudest = val.amplitude.argmax(dim=1)
        mean_weights = torch.stack(
            [model.weights(asked)[loudest == j].mean(dim=0) for j in range(len(OMEGA))]
        )
    found = {
        **history,
        "omega_before": omega.tolist(),
        "omega": learned.tolist(),
        "gamma": gamma.tolist(),
        "values": model.values.tolist(),
        "response": response.tolist(),
        "mean_weights": mean_weights.tolist(),
    }
    if seed == 0:
        found |= {"answers": answer.tolist(), "targets": val.target.tolist()}
    return found, answer


def _train_attention(data: Data, val: Data, seed: int, epochs: int) -> tuple[Row, Tensor]:
    layer = OscillatorAttention(
        32, 1, value="point", omega_range=(1.0, 10.0), zeta_range=(0.002, 0.02)
    )
    model = Reader(layer, 1, 1)

    def answers(times: Tensor, values: Tensor, present: Tensor) -> Tensor:
        return model(times, values[..., None], TARGET_TIME, present)[:, 0]

    given, asked = ([x.float() for x in part[:2]] + [part[2]] for part in (data, val))
    history = train(
        model,
        lambda batch: mse_loss(answers(*batch[:3]), batch[3]),
        (*given, data.target.float()),
        epochs=epochs,
        seed=seed,
        score=lambda: float(mse_loss(answers(*asked), val.target)),
    )
    with torch.no_grad():
        return history, answers(*asked).double()


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    seeds = len({row["seed"] for row in document.finished})
    body = []
    for name, title in ROWS.items():
        found = of_row(document, name)
        if found:
            entries = [mean_of_seeds([r["mse"] for r in found], seeds)]
            for key in ("rmse", "correlation"):
                entries.append(spread([r[key] for r in found if r[key] is not None]))
            body.append([title, *entries])
    columns = ["row", "validation MSE", "RMSE", "correlation"]
    return [
        "# Regression with eight keys",
        "",
        *markdown_table(columns, body),
        "",
        *document.origin(),
    ]


def draw(document: Document) -> Any:
    """Return the figure: errors, forecasts, the keys and what they attend to."""
    figure, axes = new_figure(2, 2, (10.0, 7.6))
    shown = [name for name in ROWS if of_row(document, name)]
    errors = [[row["mse"] for row in of_row(document, name)] for name in shown]
    means = np.array([np.mean(x) for x in errors])
    reach = np.array([[np.mean(x) - min(x), max(x) - np.mean(x)] for x in errors]).T
    colours = [COLOURS[0] if "keys" in n or n == "attention" else REFERENCE for n in shown]
    axis = axes[0, 0]
    axis.barh(range(len(shown)), means, color=colours, xerr=reach, ecolor=COLOURS[1], capsize=3)
    axis.set(yticks=range(len(shown)), xlabel="MSE on validation series", xlim=(0, None))
    axis.set_yticklabels([name.replace("_", " ") for name in shown])
    axis.invert_yaxis()
    axis.axvline(0.1, color="0.4", lw=0.8, ls=":")
    axis.set_title("Black: references; lines: range of seeds; dots: 0.10", fontsize=10)
    first = next((row for row in of_row(document, "keys") if row["seed"] == 0), None)
    if first is None:
        return figure
    axis = axes[0, 1]
    targets = np.array(first["targets"])
    axis.plot(targets, first["answers"], ".", color=COLOURS[0], ms=4)
    axis.plot(
        [targets.min(), targets.max()], [targets.min(), targets.max()], color=REFERENCE, lw=0.8
    )
    axis.set(xlabel="true value at time 7", ylabel="forecast")
    axis.set_title(
        f"Eight keys, 400 validation series, r = {first['correlation']:.2f}", fontsize=10
    )
    axis = axes[1, 0]
    asked = torch.linspace(1.0, 10.0, 400, dtype=torch.float64)
    order = np.argsort(first["omega"])
    for number, key in enumerate(order):
        omega, gamma = first["omega"][key], first["gamma"][key]
        found = transfer_function(asked, omega=torch.tensor(omega), gamma=torch.tensor(gamma)).abs()
        colour = (*COLOURS, REFERENCE)[number]
        axis.plot(asked, found, color=colour, lw=1.2, ls=("-", "--")[number % 2])
    for omega in OMEGA.tolist():
        axis.axvline(omega, color="0.75", lw=0.7, zorder=0)
    axis.set(yscale="log", xlabel="frequency, radians a unit of time", ylabel="|H|")
    axis.set_title("Trained keys; grey: frequencies of the data", fontsize=10)
    axis = axes[1, 1]
    weights = np.array(first["mean_weights"], dtype=float)[:, order]
    image = axis.imshow(weights, cmap="viridis", origin="lower", aspect="auto", vmin=0)
    axis.set_xticks(range(len(order)), [f"{first['omega'][k]:.1f}" for k in order])
    axis.set_yticks(range(len(OMEGA)), [f"{omega:g}" for omega in OMEGA.tolist()])
    axis.set(xlabel="natural frequency of the key", ylabel="largest component of the series")
    figure.colorbar(image, ax=axis).set_label("mean attention")
    return figure


SUITE = Suite(
    name="regression",
    summary="The paper's forecast of one value by eight oscillator keys.",
    rows=tuple(ROWS),
    jobs=jobs_by_seed,
    work=work,
    tables=tables,
    pictures={"paper_regression": draw},
    seeds=5,
)
