"""Coverage of conformal intervals and sets on series that no one has seen, and their size.

Classification of the clinical stays that come with the package; regression, forecasting and
imputation of simulated series. Each seed shuffles the series anew: a half to train, a quarter to
calibrate, a quarter to test.

Run: python benchmarks/conformal.py --output benchmarks/results/conformal-DATE.json
"""

from __future__ import annotations

import argparse
import platform
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from osciformer import (
    IrregularSeries,
    OsciFormerClassifier,
    OsciFormerForecaster,
    OsciFormerImputer,
    ResonatorClassifier,
    ResonatorRegressor,
    __version__,
)
from osciformer._files import write_json
from osciformer.cli import demo, tables
from osciformer.data import read_parquet
from osciformer.data.series import concatenate

COVERAGES = (0.8, 0.9, 0.95)
NUM_SIMULATED = 1200
SMALL: dict[str, Any] = {"dim": 16, "num_layers": 1, "num_heads": 2, "accelerator": "cpu"}


def stays() -> IrregularSeries:
    """Return the clinical stays that come with the package, training and test part together."""
    folder = Path(str(files("osciformer") / "demo_data"))
    parts = []
    for name in (demo.TRAIN, demo.TEST):
        layout = tables.make_layout(demo.SETTINGS, "classification", Path(name))
        parts.append(read_parquet(folder / name, layout))
    return concatenate(parts)


def oscillations(count: int, seed: int) -> IrregularSeries:
    """Return noisy decaying oscillations whose noise grows; the label is the noisy frequency."""
    generator = np.random.default_rng(seed)
    omega = generator.uniform(0.5, 3.0, count)
    times = [np.sort(generator.uniform(0, 10, generator.integers(15, 30))) for _ in omega]
    values = [
        np.exp(-0.1 * t) * np.sin(w * t + generator.uniform(0, 6.3))
        + generator.normal(0, 0.05 + 0.03 * t)
        for w, t in zip(omega, times, strict=True)
    ]
    labels = omega + generator.normal(0, 0.1 * omega)
    return IrregularSeries.from_arrays(times, values, labels=labels)


def parts_of(data: IrregularSeries, seed: int) -> list[IrregularSeries]:
    order = np.random.default_rng(seed).permutation(len(data))
    cuts = np.array([0.5, 0.75]) * len(data)
    return [data.take(np.sort(part)) for part in np.split(order, cuts.astype(int))]


def of_sets(model: Any, test: IrregularSeries) -> dict[str, Any]:
    numbers = np.searchsorted(model.classes_, test.labels)
    rows, found = np.arange(len(numbers)), {}
    for coverage in COVERAGES:
        for per_class in (False, True):
            sets = model.predict_set(test, coverage, per_class=per_class)
            hit = sets[rows, numbers]
            by_class = [float(hit[numbers == c].mean()) for c in range(len(model.classes_))]
            facts = {"covered": float(hit.mean()), "by_class": by_class}
            facts["size"] = float(sets.sum(axis=1).mean())
            found[f"{coverage:g}{' per class' if per_class else ''}"] = facts
    return found


def of_intervals(model: Any, test: IrregularSeries) -> dict[str, Any]:
    found = {}
    for coverage in COVERAGES:
        low, high = model.predict_interval(test, coverage).T
        covered = float(((low <= test.labels) & (test.labels <= high)).mean())
        found[f"{coverage:g}"] = {"covered": covered, "width": float((high - low).mean())}
    return found


def of_hidden(model: Any, test: IrregularSeries) -> dict[str, Any]:
    """Return the share of hidden values within, each series counting alike; raw is 0.05 to 0.95."""
    scaler = model.transform_.value_scaler
    (hidden,) = model.answer_hidden(test, np.random.default_rng(1))
    quantiles = hidden.quantiles * scaler.scale[:, None] + scaler.center[:, None]
    truth = hidden.truth * scaler.scale + scaler.center

    def facts(low: np.ndarray, high: np.ndarray) -> dict[str, float]:
        inside = np.split((low <= truth) & (truth <= high), hidden.offsets[1:-1])
        covered = float(np.mean([part.mean() for part in inside if len(part)]))
        return {"covered": covered, "width": float((high - low).mean())}

    found = {"raw quantiles 0.9": facts(quantiles[..., 0], quantiles[..., -1])}
    for coverage in COVERAGES:
        ends = model.intervals_of(quantiles, coverage)
        found[f"{coverage:g}"] = facts(ends[..., 0], ends[..., 1])
    return found


def run(seed: int, clinical: IrregularSeries, epochs: int) -> dict[str, Any]:
    """Return what each model reaches with one seed."""
    found: dict[str, Any] = {}
    small = {**SMALL, "max_epochs": epochs, "random_state": seed}
    train, calibration, test = parts_of(clinical, seed)
    numbers = np.unique(test.labels, return_inverse=True)[1]
    for name, model in (
        ("stays, ResonatorClassifier", ResonatorClassifier(random_state=seed)),
        ("stays, OsciFormerClassifier, network", OsciFormerClassifier(resonators=False, **small)),
    ):
        model.fit(train)
        losses = []
        for probabilities in (True, False):  # the sets are those of the last
            before = model.predict_log_proba(test)[np.arange(len(test)), numbers].mean()
            model.calibrate(calibration, probabilities=probabilities)
            after = model.predict_log_proba(test)[np.arange(len(test)), numbers].mean()
            losses += [float(-before), float(-after)]
        found[name] = {
            **of_sets(model, test),
            "log_loss": losses[0],
            "log_loss_tempered": losses[1],
        }
    train, calibration, test = parts_of(oscillations(NUM_SIMULATED, seed), seed)
    model = ResonatorRegressor(random_state=seed).fit(train).calibrate(calibration)
    found["oscillations, ResonatorRegressor"] = of_intervals(model, test)
    for kind in (OsciFormerForecaster, OsciFormerImputer):
        model = kind(**small).fit(train).calibrate(calibration)
        found[f"oscillations, {kind.__name__}"] = of_hidden(model, test)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5, help="of the networks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clinical, by_seed = stays(), {}
    for seed in range(args.seeds):
        by_seed[str(seed)] = run(seed, clinical, args.epochs)
        print(seed, by_seed[str(seed)], flush=True)
    command = f"python benchmarks/conformal.py --seeds {args.seeds} --epochs {args.epochs}"
    versions = {"osciformer": __version__, "torch": torch.__version__}
    versions["python"] = platform.python_version()
    sizes = {"stays": len(clinical), "oscillations": NUM_SIMULATED}
    facts = {"command": command, "versions": versions, "series": sizes, "by_seed": by_seed}
    write_json(args.output, facts)


if __name__ == "__main__":
    main()
