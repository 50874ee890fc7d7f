"""Choose settings by cross-validation, with scikit-learn's `GridSearchCV`.

A tank loses pressure, fast if it leaks, and a logger reads it at random times. How wide should the
network be, and how fast should it learn? The grid below says what to try; each candidate is trained
three times, and scored by the tanks that were left out.

The trap: the score of the winner is the best of several noisy ones, and so tends to be too good.
This script keeps tanks apart that the search never sees, and scores the winner by those.

Run `python examples/06_grid_search.py`. Expect about a minute on a CPU. For tables on the command
line there is `osciformer tune`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split

from osciformer import IrregularSeries, OsciFormerClassifier

SEED = 0
HOURS_TO_FALL = {"tight": 2.0, "leaky": 1.2}
NOISE = 0.1
NUM_FOLDS = 3


def make_tanks(num_tanks: int, generator: np.random.Generator) -> IrregularSeries:
    """Return a series per tank: its pressure at random hours, and its state as the label."""
    states = np.array(["tight", "leaky"])[np.arange(num_tanks) % 2]
    lengths = generator.integers(12, 20, size=num_tanks)
    times, values = [], []
    for state, length in zip(states, lengths, strict=True):
        hours = np.sort(generator.uniform(0, 4, size=length))
        pressure = generator.uniform(1, 3) * np.exp(-hours / HOURS_TO_FALL[state])
        times.append(hours)
        values.append(pressure + NOISE * generator.normal(size=length))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return IrregularSeries(
        np.concatenate(times),
        np.concatenate(values)[:, None],
        offsets,
        feature_names=["pressure"],
        labels=states,
    )


def main(num_tanks=240, max_epochs=15, dims=(8, 32)) -> dict[str, float]:
    series = make_tanks(num_tanks, np.random.default_rng(SEED))
    # The test set goes away first, before any choice is made.
    train, test = train_test_split(
        series, test_size=0.25, stratify=series.labels, random_state=SEED
    )

    # resonators=False: the network alone, as its settings are what is searched for.
    model = OsciFormerClassifier(
        max_epochs=max_epochs, resonators=False, validation_fraction=0.0, random_state=SEED
    )
    search = GridSearchCV(
        model,
        # Settings without a keyword are reached by two underscores.
        {
            "dim": list(dims),
            "learning_rate": [1e-3, 4e-3],
            "train_options__weight_averaging": [0.99],
        },
        cv=StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=SEED),
        scoring="accuracy",
        n_jobs=1,  # fits in threads would wait for each other
    )
    search.fit(train, train.labels)

    columns = ["param_dim", "param_learning_rate", "mean_test_score", "std_test_score"]
    found = pd.DataFrame(search.cv_results_)[columns].sort_values("mean_test_score")
    print(found.to_string(index=False))
    print(f"\nbest: {search.best_params_}")

    # `search` was fitted again, with the best settings, to all training tanks.
    scores = {"search": float(search.best_score_), "test": float(search.score(test, test.labels))}
    print(f"accuracy in the search {scores['search']:.3f}, the best of {len(found)} candidates")
    print(f"accuracy on {len(test)} tanks that the search has not seen {scores['test']:.3f}")
    return scores


if __name__ == "__main__":
    main()
