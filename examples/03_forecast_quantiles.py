"""Forecast the level of wells at times of your choice, with intervals, and check the intervals.

Each well rises and falls with the tide, by another height and at another phase. Its level is read
at random times.

The trap: an interval is easy to draw and easy to believe. Count, on wells that were not used in
training, how often the truth lies inside: a 90 % interval should hold nine values in ten.

Run `python examples/03_forecast_quantiles.py`. Expect about a minute on a CPU, an error below that
of the last value, a coverage, and a picture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from osciformer import IrregularSeries, OsciFormerForecaster, from_frame
from osciformer._optional import need

SEED = 0
TIDE = 12.4  # hours
HORIZON = 6.0  # hours that are forecast
SPAN = 48.0
NUM_READINGS = 30
NOISE = 0.1
START = pd.Timestamp("2024-06-01")
LAYOUT = {"id": "well", "time": "moment", "unit": "h"}
PICTURE = Path("outputs/forecast_quantiles.png")


def make_table(num_wells: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return a row per reading: which well, when, and its level."""
    parts = []
    for number in range(num_wells):
        hour = np.sort(generator.uniform(0, SPAN, size=NUM_READINGS))
        phase, height = generator.uniform(0, 2 * np.pi), generator.uniform(0.5, 1.5)
        level = height * np.sin(2 * np.pi * hour / TIDE + phase)
        level += NOISE * generator.normal(size=NUM_READINGS)
        moment = START + pd.to_timedelta(hour, unit="h")
        parts.append(pd.DataFrame({"well": number, "moment": moment, "level": level}))
    return pd.concat(parts, ignore_index=True)


def hide_end(table: pd.DataFrame) -> tuple[IrregularSeries, list[np.ndarray], np.ndarray]:
    """Return series without their last hours, the times of what is hidden, and its values."""
    is_hidden = table["moment"] > START + pd.Timedelta(hours=SPAN - HORIZON)
    hidden = table[is_hidden]
    asked = [rows["moment"].to_numpy() for _, rows in hidden.groupby("well", sort=False)]
    wells = hidden["well"].unique()  # some have no reading in those hours
    known = from_frame(table[~is_hidden & table["well"].isin(wells)], **LAYOUT)
    return known, asked, hidden["level"].to_numpy()


def main(num_wells=300, num_test=50, max_epochs=20, dim=16, picture=PICTURE) -> dict[str, float]:
    pyplot = need("matplotlib.pyplot", extra="plot")  # asked for here, not after the training
    generator = np.random.default_rng(SEED)
    train = from_frame(make_table(num_wells, generator), **LAYOUT)
    test_table = make_table(num_test, generator)

    model = OsciFormerForecaster(
        horizon=HORIZON,
        quantiles=(0.05, 0.5, 0.95),
        dim=dim,
        max_epochs=max_epochs,
        batch_size=32,
        learning_rate=1e-2,
        train_options={"patience": None},
        random_state=SEED,
        verbose=1,
    )
    model.fit(train)

    known, asked, truth = hide_end(test_table)
    found = model.predict_quantiles(known, times=asked)  # a list of [times, targets, quantiles]
    low, middle, high = np.concatenate(found)[:, 0].T
    last_value = np.repeat([one.values[-1, 0] for one in known], list(map(len, asked)))
    results = {
        "error of the median": float(np.abs(middle - truth).mean()),
        "error of the last value": float(np.abs(last_value - truth).mean()),
        "coverage of the 90 % interval": float(((low <= truth) & (truth <= high)).mean()),
    }
    print(f"\nthe last {HORIZON:.0f} hours of {len(known)} wells that the model has not seen:")
    print("\n".join(f"  {name:<32}{value:.3f}" for name, value in results.items()))

    # The same model at times of our choice, counted from the last reading of each well.
    ahead = np.linspace(0.1, HORIZON, 60)
    curve = model.predict_quantiles(known[:1], times=ahead, relative=True)[0, :, 0]
    one = known[0]
    hours = one.times[-1] + ahead
    asked_hours = known.encode_times(asked[0], 0)
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    axis.fill_between(hours, curve[:, 0], curve[:, 2], alpha=0.3, label="90 % interval")
    axis.plot(hours, curve[:, 1], label="median")
    axis.plot(one.times, one.values[:, 0], "ko", markersize=3, label="known")
    axis.plot(asked_hours, truth[: len(asked[0])], "rx", label="hidden")
    axis.set(xlabel="hours", ylabel="level", title="A well that the model has not seen")
    axis.legend(ncols=4)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")
    return results


if __name__ == "__main__":
    main()
