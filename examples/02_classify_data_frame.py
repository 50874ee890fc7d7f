"""Tell worn valves from good ones, from a data frame of readings at irregular times.

After each stroke the pressure in a valve falls back: within half an hour if the valve is good,
within an hour and a half if it is worn. A logger reads it now and then, at another pace for each
valve.

The trap: many tools number the rows 0, 1, 2, ... and forget the clock. The shape of the curve over
row numbers says little here, since the pace differs. This script trains the same model on the real
times and on row numbers.

Run `python examples/02_classify_data_frame.py`. Expect about a minute on a CPU, and an area under
the ROC curve that is clearly higher with the real times.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from osciformer import IrregularSeries, OsciFormerClassifier, from_frame

SEED = 0
HOURS_TO_FALL = {"good": 0.5, "worn": 1.5}
NOISE = 0.05
LAYOUT = {"id": "valve", "time": "hour", "label": "state"}


def make_table(num_valves: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return a row per reading: which valve, when, its pressure and sometimes its temperature."""
    parts = []
    for number in range(num_valves):
        state = "worn" if number % 2 else "good"
        pace = generator.uniform(0.05, 0.5)  # mean hours between readings
        hour = np.cumsum(generator.exponential(pace, size=generator.integers(8, 16)))
        pressure = generator.uniform(1, 3) * np.exp(-hour / HOURS_TO_FALL[state])
        pressure += NOISE * generator.normal(size=len(hour))
        temperature = generator.normal(20, 2, size=len(hour))
        temperature[generator.random(len(hour)) < 0.7] = np.nan  # read now and then only
        parts.append(
            pd.DataFrame(
                {
                    "valve": f"valve{number:04d}",
                    "hour": hour,
                    "pressure": pressure,
                    "temperature": temperature,
                    "state": state,
                }
            )
        )
    # The order of rows does not matter.
    return pd.concat(parts).sample(frac=1.0, random_state=SEED)


def number_rows(series: IrregularSeries) -> IrregularSeries:
    """Return the series with 0, 1, 2, ... in place of their times."""
    steps = [np.arange(length, dtype=float) for length in series.lengths]
    return series.replace(times=np.concatenate(steps))


def main(num_valves=400, max_epochs=15, dim=32) -> dict[str, float]:
    table = make_table(num_valves, np.random.default_rng(SEED))
    print(table.head(3).to_string(index=False))
    series = from_frame(table, **LAYOUT)
    print(series)

    # By series, not by rows: a valve that is in both parts would be recognised, not judged.
    train, test = train_test_split(
        series, test_size=0.25, stratify=series.labels, random_state=SEED
    )
    areas = {}
    for name, change in (("real times", lambda part: part), ("row numbers", number_rows)):
        model = OsciFormerClassifier(
            dim=dim,
            max_epochs=max_epochs,
            train_options={"patience": None},
            random_state=SEED,
            verbose=1,
        )
        model.fit(change(train))
        worn = model.predict_proba(change(test))[:, list(model.classes_).index("worn")]
        areas[name] = float(roc_auc_score(test.labels == "worn", worn))
        if name == "real times":
            found = pd.DataFrame({"worn": worn, "truth": test.labels}, index=test.ids)

    print("\nthe valves that are most likely worn:")
    print(found.sort_values("worn", ascending=False).head(3).to_string())
    print(f"\narea under the ROC curve on {len(test)} valves that the model has not seen:")
    print("\n".join(f"  {name:<14}{area:.3f}" for name, area in areas.items()))
    return areas


if __name__ == "__main__":
    main()
