"""Draw docs/pictures/resonating.gif: a heart rate drives oscillators, and a classifier listens.

    python docs/pictures/resonating.py

A minute or two on one core. The stay is one of the test table that the package ships; the
classifier learned from the other table. The picture begins and ends with the whole stay.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from PIL import Image

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from sklearn.metrics import roc_auc_score

from osciformer import ResonatorClassifier, from_frame, oscillator_response

PICTURE = Path(__file__).with_name("resonating.gif")
BLUE, GREY = "#2563eb", "#374151"
# From quiet to resonating: lighter and darker as well, so that nobody depends on the hue.
GLOW = mpl.colors.LinearSegmentedColormap.from_list("glow", ["#94a3b8", "#f59e0b", "#c2410c"])
SEED, STAY = 0, 135699
PERIODS, Q = (24.0, 8.0, 5.0, 2.5), 4.0  # hours
FIRST, LAST = 7.0, 48.0  # hours since admission
LOUD = 20.0  # beats/min, the edge of an oscillator's lane
NUM_FRAMES, NUM_FADES, FRAME, STILL = 82, 6, 80, 1600  # milliseconds of one and of the still one
TURNS = 5  # then it rests: nobody needs a page that moves for ever
LAYOUT: dict[str, Any] = {
    **{"id": "record_id", "time": "minute", "label": "in_hospital_death"},
    "static": ["Age", "Gender", "Height", "ICUType", "AdmissionWeight"],
}


class Story(NamedTuple):
    """What is drawn: observations, and what the classifier says after each row of the stay."""

    hours: np.ndarray  # [N]
    beats: np.ndarray  # [N], per minute
    row_hours: np.ndarray  # [T]
    survival: np.ndarray  # [T], probability


def read(name: str) -> pd.DataFrame:
    """Return a table that the package ships, a row for each minute with a measurement."""
    return pd.read_parquet(str(files("osciformer") / "demo_data" / f"stays-{name}.parquet"))


def cut(table: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Return stays that end at random: whoever is asked early must have met beginnings."""
    ids = table["record_id"].unique()
    ends = pd.Series(rng.uniform(6 * 60, 48 * 60, len(ids)), index=ids)
    first = table.groupby("record_id")["minute"].transform("min")
    return table[table["minute"] <= np.maximum(table["record_id"].map(ends), first)]


def tell(num_stays: int | None = None) -> Story:
    """Train the classifier, and return one stay with its answers."""
    rng = np.random.default_rng(SEED)
    train, test = from_frame(cut(read("train"), rng), **LAYOUT), read("test")
    model = ResonatorClassifier(random_state=SEED).fit(train[:num_stays])
    others = from_frame(cut(test, rng), **LAYOUT)
    area = roc_auc_score(others.labels, model.predict_proba(others)[:, 1])
    print(f"AUROC of {len(others)} stays, cut at random: {area:.3f}")
    stay = test[test["record_id"] == STAY]
    minutes = stay["minute"].to_numpy()
    parts = [stay[minutes <= end].assign(record_id=k) for k, end in enumerate(minutes)]
    survival = model.predict_proba(from_frame(pd.concat(parts), **LAYOUT))[:, 0]
    heart = stay[["minute", "HR"]].dropna()
    hours, beats = heart["minute"].to_numpy() / 60, heart["HR"].to_numpy(dtype=float)
    return Story(hours, beats, minutes / 60, survival)


def respond(story: Story, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and amplitudes [M, K]: each new heart rate kicks by its change."""
    omega = torch.tensor([2 * np.pi / period for period in PERIODS], dtype=torch.float64)
    given = torch.from_numpy(story.beats)[None, :, None], torch.from_numpy(story.hours)[None]
    asked = torch.from_numpy(grid)[None]
    settings: dict[str, Any] = {"drive": "hold", "of": "rate", "query_times": asked}
    found = oscillator_response(*given, omega, torch.full_like(omega, 0.5 / Q), **settings)
    amplitude = torch.hypot(found.position, found.velocity / omega)
    return found.position[0, :, 0].numpy(), amplitude[0, :, 0].numpy()


def draw(story: Story, now: float) -> Image.Image:
    """Return the picture at an hour."""
    figure = plt.figure(figsize=(8.4, 5.8))
    sides = {"left": 0.075, "right": 0.975}
    top = figure.add_subplot(figure.add_gridspec(1, 1, top=0.945, bottom=0.775, **sides)[0])
    bottom = figure.add_subplot(figure.add_gridspec(1, 1, top=0.225, bottom=0.085, **sides)[0])
    middle = figure.add_gridspec(len(PERIODS), 1, top=0.675, bottom=0.27, hspace=0, **sides)
    lanes = [figure.add_subplot(part) for part in middle]
    top.set_title("A heart rate in intensive care, measured at irregular times …", loc="left")
    top.set(ylabel="beats/min", ylim=(68, 102), yticks=[70, 85, 100])
    seen = story.hours <= now
    top.plot(story.hours[seen], story.beats[seen], "-", color=GREY, lw=0.6, alpha=0.6)
    top.plot(story.hours[seen], story.beats[seen], "o", color=GREY, ms=4)

    grid = np.linspace(FIRST, LAST, 1000)
    grid = grid[grid <= now + 1e-9]
    positions, amplitudes = respond(story, grid)
    lanes[0].set_title(
        "… drives oscillators of different periods: those that resonate grow and glow", loc="left"
    )
    for lane, period, x, size in zip(lanes, PERIODS, positions.T, amplitudes.T, strict=True):
        lane.set(ylim=(-LOUD, LOUD), yticks=[], xticks=[])
        lane.spines[["left", "bottom"]].set_visible(False)
        lane.set_ylabel(f"{period:g} h", rotation=0, ha="right", va="center", fontsize=11)
        lane.axhline(0, color="#e5e7eb", lw=0.8, zorder=0)
        loud = np.clip(size / LOUD, 0, 1)
        lane.fill_between(grid, -size, size, color="#fef3c7", lw=0, zorder=0.5)
        points = np.stack((grid, x), axis=1)
        pieces = np.stack((points[:-1], points[1:]), axis=1)
        lines = {"colors": GLOW(loud[1:]), "linewidths": 1.0 + 1.6 * loud[1:]}
        lane.add_collection(LineCollection(pieces, capstyle="round", **lines))
        if now < LAST:
            for halo, alpha in ((22, 0.15), (14, 0.25)):
                lane.plot(now, x[-1], "o", color=GLOW(loud[-1]), ms=halo * loud[-1], alpha=alpha)
            style = {"clip_on": False, "mew": 0}
            lane.plot(now, x[-1], "o", color=GLOW(loud[-1]), ms=5 + 3 * loud[-1], **style)

    known = story.row_hours <= now
    says = story.survival[known][-1]
    bottom.set_title(
        f"What a classifier says so far: leaves hospital alive, {100 * says:.0f} %", loc="left"
    )
    ends = np.append(story.row_hours[known], now)
    bottom.step(ends, 100 * np.append(story.survival[known], says), where="post", color=BLUE)
    bottom.plot(now, 100 * says, "o", color=BLUE, ms=5, clip_on=False)
    bottom.set(ylabel="%", ylim=(50, 101), yticks=[50, 75, 100], xlabel="hours since admission")
    for axis in (top, *lanes, bottom):
        axis.set_xlim(FIRST, LAST)
    for axis in (top, bottom):
        axis.set_xticks(range(8, 49, 8))
    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    plt.close(figure)
    return image


def main(num_stays: int | None = None, num_frames: int = NUM_FRAMES, to: Path = PICTURE) -> None:
    """Train, draw, and write the moving picture."""
    story = tell(num_stays)
    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    with plt.rc_context(style | {"axes.titlesize": 10, "figure.dpi": 100}):
        frames = [draw(story, now) for now in np.linspace(FIRST, LAST, num_frames)]
    fades = [Image.blend(frames[-1], frames[0], k / NUM_FADES) for k in range(1, NUM_FADES)]
    shown = [frames[-1], *fades, *frames[:-1]]
    # One palette for all, from a frame that has halos.
    palette = frames[num_frames * 2 // 3].quantize(128, method=Image.Quantize.MAXCOVERAGE)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in shown]
    durations = [STILL] + [FRAME] * (len(flat) - 1)
    flat[0].save(
        to, save_all=True, append_images=flat[1:], duration=durations, loop=TURNS - 1, optimize=True
    )
    size, seconds = to.stat().st_size / 1000, sum(durations) / 1000
    print(f"drawn: {to.name}, {size:.0f} kB, {len(flat)} frames, {seconds:.1f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
