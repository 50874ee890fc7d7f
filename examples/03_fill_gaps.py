"""Fill in what a weather station did not measure, and see what simpler methods make of it.

A station has two masts that feel the same wind an hour apart. Each instrument fails now and then,
for a while. The model looks at both masts, before and after a gap.

The trap: an error on values that the model was given says nothing. Hide values that you know, fill
them in, and compare with the truth; and do the same with the simplest method, linear interpolation.

Run `python examples/03_fill_gaps.py`. Expect about a minute on a CPU, an error below that of linear
interpolation, an interval that holds a little less than it says, and a picture. Training hides
single values, and a failure takes a whole stretch, so the model is surer of itself than it should
be: hide in the test what will be missing in service.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from osciformer import IrregularSeries, OsciFormerImputer
from osciformer._optional import need

SEED = 0
SPAN = 24.0  # hours
NUM_ROWS = 30
LAG = 1.0  # hours from the first mast to the second
NOISE = 0.05
MASTS = ("west", "east")
PICTURE = Path("outputs/fill_gaps.png")


def make_days(num_days: int, generator: np.random.Generator) -> tuple[IrregularSeries, np.ndarray]:
    """Return days with failures as NaN, and the wind without failures, a row per reading."""
    times, complete, measured = [], [], []
    for _ in range(num_days):
        hour = np.sort(generator.uniform(0, SPAN, size=NUM_ROWS))
        phase = generator.uniform(0, 2 * np.pi, size=2)
        wind = sum(
            np.sin(2 * np.pi * (hour[:, None] - np.array([0.0, LAG])) / period + angle)
            for period, angle in zip((5.0, 11.0), phase, strict=True)
        )
        values = wind + NOISE * generator.normal(size=wind.shape)
        for mast in range(len(MASTS)):
            start = generator.uniform(0, SPAN)  # a failure of two and a half hours
            values[(hour > start) & (hour < start + 2.5), mast] = np.nan
        times.append(hour)
        complete.append(wind)
        measured.append(values)
    series = IrregularSeries.from_arrays(times, measured, feature_names=MASTS)
    return series, np.concatenate(complete)


def interpolate(series: IrregularSeries) -> np.ndarray:
    """Return the values with straight lines in the gaps, mast by mast."""
    filled = []
    for one in series:
        columns = []
        for mast in range(len(MASTS)):
            known = ~np.isnan(one.values[:, mast])
            columns.append(np.interp(one.times, one.times[known], one.values[known, mast]))
        filled.append(np.stack(columns, axis=1))
    return np.concatenate(filled)


def main(num_days=160, num_test=50, max_epochs=16, dim=16, picture=PICTURE) -> dict[str, float]:
    pyplot = need("matplotlib.pyplot", extra="plot")  # asked for here, not after the training
    generator = np.random.default_rng(SEED)
    train, _ = make_days(num_days, generator)
    test, truth = make_days(num_test, generator)
    is_gap = np.isnan(test.values)
    print(f"{train}, {np.isnan(train.values).mean():.0%} missing")

    # What is hidden in training is scattered, so more of it stands in for whole failures.
    model = OsciFormerImputer(
        hidden_fraction=0.3,
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

    filled = {"linear interpolation": interpolate(test), "OsciFormer": model.transform(test).values}
    errors = {n: float(np.abs(v - truth)[is_gap].mean()) for n, v in filled.items()}
    low, _, high = np.moveaxis(np.concatenate(model.predict_quantiles(test)), -1, 0)
    is_inside = ((low <= truth) & (truth <= high))[is_gap]
    print(f"\nmean absolute error in the gaps of {num_test} days that the model has not seen:")
    print("\n".join(f"  {name:<22}{error:.3f}" for name, error in errors.items()))
    print(f"  of the truth, {is_inside.mean():.0%} lies in the 90 % interval")

    hours = np.linspace(0, SPAN, 200)
    curve = model.predict_quantiles(test[:1], times=hours)[0]  # [times, masts, quantiles]
    figure, axes = pyplot.subplots(2, figsize=(9, 6), sharex=True, layout="constrained")
    for mast, axis in enumerate(axes):
        axis.fill_between(hours, curve[:, mast, 0], curve[:, mast, 2], alpha=0.3, label="90 %")
        axis.plot(hours, curve[:, mast, 1], label="median")
        axis.plot(test[0].times, test[0].values[:, mast], "ko", markersize=3, label="measured")
        rows = slice(0, test.lengths[0])
        failed = is_gap[rows, mast]
        axis.plot(test[0].times[failed], truth[rows, mast][failed], "rx", label="not measured")
        axis.set_ylabel(MASTS[mast])
    axes[0].legend(ncols=4)
    axes[1].set_xlabel("hour")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")
    return errors


if __name__ == "__main__":
    main()
