"""`osciformer bench chaos`: free runs of the logistic map, beside trivial forecasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import mse_loss

from osciformer._types import Float, Tensor
from osciformer.bench.documents import Document, mean_of_seeds
from osciformer.bench.paper.suite import Reader, train
from osciformer.bench.report import Row, markdown_table
from osciformer.bench.suite import COLOURS, REFERENCE, Suite, new_figure, rounded
from osciformer.bench.workers import Job
from osciformer.nn import OscillatorAttention

#: Of the map; the paper's is at the onset of chaos.
RATES = (3.57, 3.9)
FIRST, WINDOW, HORIZON, BURN_IN = 0.6, 16, 256, 1000
#: Windows to train on, and free runs that are scored; at full and at toy size.
SIZES = ((2000, 100), (200, 20))
#: Steps of a free run that are drawn.
SHOWN = 40
HORIZONS = (1, 4, 16, 64, 256)
#: A free run is lost when its error exceeds this part of the standard deviation of the series.
LOST = 0.4
ROWS = {
    "constant": "the mean",
    "period": "the value of 16 steps ago",
    "linear": "linear regression on 16 values",
    "parabola": "the fitted parabola of the last value",
    "modes_8": "attention, learned query, J = 8",
    "modes_16": "attention, learned query, J = 16",
    "hold": "attention, query `hold`",
}
#: Rows that depend on a seed.
TRAINED = ("modes_8", "modes_16", "hold")
Forecast = Callable[[Tensor], Tensor]  # of windows [B, 16]: the next values [B], or features


#: What forecasts by least squares are linear in.
FEATURES: dict[str, Forecast] = {
    "constant": lambda windows: torch.ones_like(windows[:, :1]),
    "linear": lambda windows: torch.cat((windows, torch.ones_like(windows[:, :1])), dim=1),
    "parabola": lambda windows: windows[:, -1:] ** torch.arange(3),
}


def first_of(windows: Float[Tensor, "B 16"]) -> Float[Tensor, " B"]:
    """Return the oldest value."""
    return windows[:, 0]


def logistic(rate: float, count: int) -> Float[Tensor, " T"]:
    """Return an orbit of x' = r x (1 - x) from the paper's start, the first steps left out."""
    x, found = FIRST, []
    for _ in range(BURN_IN + count):
        x = rate * x * (1 - x)
        found.append(x)
    return torch.tensor(found[BURN_IN:], dtype=torch.float64)


def lyapunov_exponent(rate: float, count: int = 100_000) -> float:
    """Return the mean growth of the logarithm of a small error per step."""
    return float((rate * (1 - 2 * logistic(rate, count))).abs().log().mean())


def free_run(forecast: Forecast, windows: Float[Tensor, "B 16"]) -> Float[Tensor, "B T"]:
    """Return forecasts that are fed back."""
    for _ in range(HORIZON):
        windows = torch.cat((windows, forecast(windows[:, -WINDOW:])[:, None]), dim=1)
    return windows[:, WINDOW:]


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Fit one row, run it freely, and say when it is lost."""
    num_windows, num_runs = SIZES[settings["quick"]]
    rate, seed = job["rate"], job["seed"]
    orbit = logistic(rate, 2 * num_windows + HORIZON + WINDOW)
    seen = orbit[: num_windows + WINDOW].unfold(0, WINDOW + 1, 1)
    later = orbit[num_windows + WINDOW :].unfold(0, WINDOW + HORIZON, 1)
    later = later[:: max(1, len(later) // num_runs)][:num_runs]
    x, y, std = seen[:, :-1], seen[:, -1], float(orbit.std())
    found: Row = {}
    if job["row"] == "period":
        forecast: Forecast = first_of
    elif job["row"] in FEATURES:
        forecast = least_squares(FEATURES[job["row"]], x, y)
    else:
        found, forecast = train_attention(job["row"], x, y, seed, 1 if settings["quick"] else 15)
    with torch.no_grad():
        runs = free_run(forecast, later[:, :WINDOW])
        one_step = forecast(later[:, :WINDOW])
    error = (runs - later[:, WINDOW:]).abs() / std
    is_lost = error > LOST
    lost = torch.where(is_lost.any(dim=1), is_lost.int().argmax(dim=1) + 1, HORIZON)
    found |= {
        "one_step": float((one_step - later[:, WINDOW]).square().mean().sqrt()) / std,
        "rmse": {str(h): float(error[:, h - 1].square().mean().sqrt()) for h in HORIZONS},
        "lost": float(lost.double().median()),
        "exponent": lyapunov_exponent(rate),
        "is_bounded": bool(((runs > 0) & (runs < 1)).all()),
        "curve": error.square().mean(dim=0).sqrt().tolist(),
    }
    if seed == 0:
        found |= {"truth": later[0, WINDOW : WINDOW + SHOWN].tolist()}
        found |= {"path": runs[0, :SHOWN].tolist()}
    return rounded(found)


def least_squares(features: Forecast, x: Tensor, y: Tensor) -> Forecast:
    """Return the forecast that is linear in some features of the window."""
    weights = torch.linalg.lstsq(features(x), y[:, None]).solution[:, 0]
    return lambda windows: features(windows) @ weights


def train_attention(row: str, x: Tensor, y: Tensor, seed: int, epochs: int) -> tuple[Row, Forecast]:
    """Return how a small model was trained on one step ahead, and its forecasts."""
    torch.manual_seed(seed)
    query: dict[str, Any] = {"query": "hold"}
    if row != "hold":
        query = {"query": "learned", "num_modes": int(row.removeprefix("modes_"))}
    frequencies = (math.pi / WINDOW, math.pi)  # what a window of unit steps can resolve
    layer = OscillatorAttention(8, 1, value="point", omega_range=frequencies, **query)
    model = Reader(layer, 1, 1, sees_last=True)
    center, scale = y.mean(), y.std()
    steps = torch.arange(WINDOW, dtype=torch.float32)

    def forecast(windows: Tensor) -> Tensor:
        values = ((windows - center) / scale).float()
        at = steps.expand(len(values), -1)
        answer = model(at, values[..., None], float(WINDOW))[:, 0]
        return answer.to(windows.dtype) * scale + center

    history = train(
        model,
        lambda batch: mse_loss(forecast(batch[0]) / scale, batch[1] / scale),
        (x, y),
        epochs=epochs,
        seed=seed,
        batch_size=64,
        score=lambda: float(mse_loss(forecast(x[:200]), y[:200]).sqrt() / scale),
    )
    return history, forecast


def make_jobs(rows: Sequence[str], seeds: int) -> list[Job]:
    """Return a job for each row, rate and seed; what is not random has one."""
    return [
        {"row": row, "rate": rate, "seed": seed}
        for seed in range(seeds)
        for rate in RATES
        for row in rows
        if seed == 0 or row in TRAINED
    ]


def _of(document: Document, name: str, rate: float) -> list[Row]:
    return [row for row in document.finished if (row["row"], row["rate"]) == (name, rate)]


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    seeds, lines = len({row["seed"] for row in document.finished}), ["# Logistic map, free run"]
    for rate in RATES:
        body = []
        for name, title in ROWS.items():
            found = _of(document, name, rate)
            if found:
                count = seeds if name in TRAINED else 1
                entries = [[row["one_step"] for row in found]]
                entries += [[row["rmse"][str(h)] for row in found] for h in HORIZONS[1:]]
                told = [mean_of_seeds(x, count, "{:.4f}") for x in entries]
                lost = [row["lost"] for row in found]
                # What is never lost counts as the horizon, so that a mean is too low.
                sign = "> " if HORIZON in lost else ""
                told.append(sign + mean_of_seeds(lost, count, "{:.0f}"))
                bounded = {row["is_bounded"] for row in found}
                body.append([title, *told, " / ".join("yes" if b else "no" for b in bounded)])
        if not body:
            continue
        exponent = lyapunov_exponent(rate)
        title = f"r = {rate}: Lyapunov exponent {exponent:.4f}, time {1 / exponent:.1f} steps"
        columns = ["row", "1 step", *(f"{h} steps" for h in HORIZONS[1:])]
        columns += ["lost after", "stays in [0, 1]"]
        lines += ["", f"## {title}", "", *markdown_table(columns, body)]
    return [*lines, "", *document.origin()]


def draw(document: Document) -> Any:
    """Return the figure: errors along the free run with the Lyapunov time, and one run."""
    figure, axes = new_figure(2, 2, (11.0, 7.4))
    styles = dict(zip(ROWS, ("-", "--", "-.", ":", "-", "-", "-"), strict=True))
    colours = dict(zip(list(ROWS)[4:], COLOURS, strict=False))
    for column, rate in enumerate(RATES):
        axis = axes[0, column]
        for name in ROWS:
            curves = np.array([row["curve"] for row in _of(document, name, rate)])
            if not len(curves):
                continue
            x, colour = np.arange(1, HORIZON + 1), colours.get(name, REFERENCE)
            curves = np.maximum(curves, 1e-12)
            if len(curves) > 1:
                reach = curves.min(axis=0), curves.max(axis=0)
                axis.fill_between(x, *reach, color=colour, alpha=0.2, lw=0)
            middle = np.exp(np.log(curves).mean(axis=0))
            label = name.replace("_", " ")
            axis.plot(x, middle, color=colour, ls=styles[name], lw=1.2, label=label)
        lyapunov_time = 1 / lyapunov_exponent(rate)
        axis.axvline(lyapunov_time, color=COLOURS[3], lw=1.2)
        axis.text(lyapunov_time * 1.06, 3e-8, "Lyapunov time", color=COLOURS[3], fontsize=8)
        axis.set(xscale="log", yscale="log", ylim=(1e-8, 30), xlabel="steps of the free run")
        axis.set_title(f"r = {rate}", fontsize=10)
        axis = axes[1, column]
        firsts = [r for n in colours for r in _of(document, n, rate) if "path" in r]
        if firsts:
            axis.plot(firsts[0]["truth"], color="0.75", lw=4, label="truth")
            for row in firsts:
                label, colour = row["row"].replace("_", " "), colours[row["row"]]
                axis.plot(row["path"], color=colour, lw=1.1, label=label)
            axis.legend(fontsize=8, frameon=False, ncols=4, loc="upper center")
        axis.set(xlabel="steps of the free run", ylim=(-0.05, 1.25))
    axes[0, 0].set_ylabel("error / standard deviation of the series")
    axes[1, 0].set_ylabel("x")
    lines, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper center", ncols=7, frameon=False, fontsize=8)
    return figure


SUITE = Suite(
    name="chaos",
    summary="Free runs of the logistic map.",
    rows=tuple(ROWS),
    jobs=make_jobs,
    work=work,
    tables=tables,
    pictures={"paper_chaos": draw},
    seeds=2,
)
