"""Sines of random phase in noise: which of some close frequencies is it?

    PYTHONPATH=src python benchmarks/frequencies.py --output freq.json --table freq.md --jobs 16
    PYTHONPATH=src python benchmarks/frequencies.py --output toy.json --quick   # to see it run

`ResonatorClassifier` and `OsciFormerClassifier` with their default settings beside logistic
regression on Lomb-Scargle spectra. A run that ends before all jobs are done is continued by the
same command.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.signal import lombscargle
from shared import (
    TINY,
    accuracies,
    make_parser,
    run_benchmark,
    score_network,
)
from sklearn.linear_model import LogisticRegression

from osciformer.bench.documents import Document, mean_of_seeds
from osciformer.bench.report import Row, markdown_table, names_among
from osciformer.bench.workers import Job
from osciformer.data import IrregularSeries
from osciformer.estimators import ResonatorClassifier

NAN = float("nan")
SPAN = 100.0
NOISE = 0.5
NUM_TRAIN, NUM_TEST = 600, 1000
#: Seeds of data count from here; those from 0 on were seen when the features were chosen.
TRAIN_SEED, TEST_SEED = 50, 1050
FREQUENCIES = {
    "two": (0.35, 0.65),
    "three": (0.45, 0.5, 0.55),
    "ten": tuple(np.arange(30, 76, 5) / 100),
}
#: Settings of `make_series` by case.
CASES: dict[str, dict[str, Any]] = {
    f"{name} x {rows}": {"frequencies": frequencies, "rows": rows}
    for rows in (60, 20, 200)
    for name, frequencies in FREQUENCIES.items()
}
CASES["forty-one x 60"] = {"frequencies": tuple(np.arange(30, 71) / 100)}
#: Times as many training series as the other cases have.
MORE_SERIES = {"forty-one x 60": 7}
CASES |= {
    f"{name} drift": {"frequencies": frequencies, "drift": 0.1}
    for name, frequencies in FREQUENCIES.items()
}
CASES |= {
    f"{name} of 5 variables{times}": {
        "frequencies": frequencies,
        "variables": 5,
        "has_own_times": bool(times),
    }
    for times in ("", " at own times")
    for name, frequencies in FREQUENCIES.items()
}
#: In order of their time; `gru_d` is not run unless it is asked for.
MODELS = ("resonator", "lomb_scargle", "osciformer", "gru_d")
SHOWN = ("resonator", "osciformer", "network", "lomb_scargle", "gru_d")
#: At which spectra are computed.
LINES = np.arange(1, 201) * 0.005

PROTOCOL = """\
Protocol: {train} training and {test} test series. A class is a frequency (two: 0.35, 0.65;
three: 0.45, 0.50, 0.55; ten: from 0.30 to 0.75; forty-one, from 0.30 to 0.70 by 0.01, a turn
over the span apart, with seven times as many training series). A series is a sine of that
frequency, of amplitude 1 and random phase, with normal noise of deviation 0.5, at random times,
uniform on [0, 100], another set for each series. With drift the frequency rises by 10 % from
the first time to the last. Of 5 variables the third carries the signal; the others are, in
turn, random walks and noise; they are seen at the same times, or each at 60 times of its own.
`resonator` is `ResonatorClassifier`, `osciformer` is `OsciFormerClassifier`, both with default
settings; `network` is the latter's network alone, of the same training. `lomb_scargle` is
logistic regression on scipy's normalised spectra with a floating mean, at 200 frequencies from
0.005 to 1, a range that it is told; it has the better, on the test series, of raw spectra with
C = 100 and standardised ones with C = 1. Accuracy, mean ± standard deviation over the seeds; in
brackets the number of seeds where it is not {seeds}."""


def make_series(
    number: int,
    seed: int,
    frequencies: Sequence[float],
    *,
    rows: int = 60,
    drift: float = 0.0,
    variables: int = 1,
    has_own_times: bool = False,
) -> IrregularSeries:
    """Return series whose label is the number of their frequency.

    Args:
        number: How many.
        seed: Of all randomness.
        frequencies: Those of the classes, in turns a unit of time.
        rows: Times of a series, or of each variable if they have their own.
        drift: By how much of itself the frequency rises over the span.
        variables: Of which the middle one carries the signal.
        has_own_times: Whether each variable is seen at its own times.
    """
    generator = np.random.default_rng(seed)
    labels = generator.integers(len(frequencies), size=number)
    labels[: len(frequencies)] = np.arange(len(frequencies))  # each class is there
    frequency = np.array(frequencies)[labels][:, None]

    def draw_times() -> np.ndarray:
        return np.sort(generator.uniform(0, SPAN, (number, rows)), axis=1)

    def signal(times: np.ndarray) -> np.ndarray:
        phase = generator.uniform(0, 2 * np.pi, (number, 1))
        turns = frequency * (times + drift * times**2 / (2 * SPAN))
        sine: np.ndarray = np.sin(2 * np.pi * turns + phase)
        return sine + NOISE * generator.standard_normal(times.shape)

    def other(times: np.ndarray, variable: int) -> np.ndarray:
        normal = generator.standard_normal(times.shape)
        if variable % 2:
            return normal
        return np.cumsum(0.3 * normal * np.sqrt(np.diff(times, axis=1, prepend=0)), axis=1)

    times = [draw_times() for _ in range(variables if has_own_times else 1)]
    values = [
        signal(at) if variable == variables // 2 else other(at, variable)
        for variable, at in enumerate(times if has_own_times else times * variables)
    ]
    if not has_own_times:
        return IrregularSeries.from_arrays(times[0], np.stack(values, axis=-1), labels=labels)
    at, whole = np.concatenate(times, axis=1), np.full((number, rows * variables, variables), NAN)
    for variable, value in enumerate(values):
        whole[:, variable * rows : (variable + 1) * rows, variable] = value
    order = np.argsort(at, axis=1)
    at, whole = (np.take_along_axis(x, i, 1) for x, i in ((at, order), (whole, order[..., None])))
    return IrregularSeries.from_arrays(at, whole, labels=labels)


def spectra(series: IrregularSeries) -> np.ndarray:
    """Return the Lomb-Scargle spectra of all variables [n, F * 200]."""
    found = []
    for one in series:
        seen = ~np.isnan(one.values)
        found.append(
            [
                lombscargle(
                    one.times[rows],
                    values[rows].astype(np.float64),
                    2 * np.pi * LINES,
                    normalize=True,
                    floating_mean=True,
                )
                for rows, values in zip(seen.T, one.values.T, strict=True)
            ]
        )
    return np.array(found).reshape(len(series), -1)


def score_lomb_scargle(train: IrregularSeries, test: IrregularSeries) -> float:
    """Return the better accuracy of logistic regressions on raw and on standardised spectra."""
    first, second = spectra(train), spectra(test)
    center, scale = first.mean(axis=0), np.maximum(first.std(axis=0), 1e-12)
    both = (first, second, 100.0), ((first - center) / scale, (second - center) / scale, 1.0)
    return max(
        float(LogisticRegression(C=C, max_iter=300).fit(a, train.labels).score(b, test.labels))
        for a, b, C in both
    )


def work(job: Job, settings: dict[str, Any]) -> Row:
    """Train and score one classifier."""
    case, seed = CASES[job["case"]], job["seed"]
    size = settings["train_size"] * MORE_SERIES.get(job["case"], 1)
    train = make_series(size, TRAIN_SEED + seed, **case)
    test = make_series(settings["test_size"], TEST_SEED + seed, **case)
    if job["model"] in ("osciformer", "gru_d"):
        return score_network(train, test, job, settings)
    started = time.process_time()
    if job["model"] == "lomb_scargle":
        accuracy = score_lomb_scargle(train, test)
    else:
        accuracy = ResonatorClassifier(random_state=seed).fit(train).score(test)
    # Features of the test series are among them.
    return {"accuracy": accuracy, "cpu_seconds": round(time.process_time() - started, 2)}


def tables(document: Document) -> list[str]:
    """Return the lines of the Markdown file."""
    scores: dict[tuple[str, str], list[float]] = {}
    for row in document.finished:
        for model, accuracy in accuracies(row).items():
            scores.setdefault((row["case"], model), []).append(accuracy)
    seeds = len({row["seed"] for row in document.finished})
    models = [model for model in SHOWN if any(model == key[1] for key in scores)]
    body = [
        [case, *(mean_of_seeds(scores.get((case, model), []), seeds) for model in models)]
        for case in CASES
        if any(case == key[0] for key in scores)
    ]
    sizes = {"train": document.settings["train_size"], "test": document.settings["test_size"]}
    return [
        "# Frequencies in noise",
        "",
        PROTOCOL.format(seeds=seeds, **sizes),
        *document.changes(),
        "",
        *markdown_table(["case", *models], body),
        "",
        *document.origin(),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(__doc__)
    parser.add_argument("--cases", type=names_among(CASES), default=list(CASES))
    parser.add_argument("--models", type=names_among(MODELS), default=list(MODELS[:3]))
    options = parser.parse_args(arguments)
    jobs: list[Job] = [
        {"case": case, "model": model, "seed": seed}
        for seed in range(1 if options.quick else options.seeds)
        for model in options.models
        for case in options.cases
    ]
    train, test = (60, 40) if options.quick else (NUM_TRAIN, NUM_TEST)
    settings = {"estimator": TINY if options.quick else {}, "train_size": train, "test_size": test}
    return run_benchmark("frequencies.py", arguments, options, jobs, work, settings, tables)


if __name__ == "__main__":
    sys.exit(main())
