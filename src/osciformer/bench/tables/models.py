"""Models of a table: our estimators, baselines in their place, and classical ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from osciformer._optional import need
from osciformer._text import did_you_mean
from osciformer._types import Float
from osciformer.bench.report import Row
from osciformer.bench.tables.problem import QUERY_TASKS, Part, Problem
from osciformer.config import estimator_arguments
from osciformer.data import IrregularSeries, collate, concatenate
from osciformer.estimators import (
    OsciFormerClassifier,
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
    ResonatorClassifier,
    ResonatorRegressor,
    queries,
)
from osciformer.math.periodogram import variance_shares
from osciformer.models.backbones import backbone_names, find_backbone
from osciformer.resonators.features import ResonatorFeatures
from osciformer.train.sources import Draw

LABEL_TASKS = ("classification", "regression")
#: What the names of ours change in the default estimator, which has no resonators for queries.
OURS: Mapping[str, Mapping[str, Any]] = {
    "osciformer": {},
    "osciformer_network": {"resonators": False},
    "osciformer_selective": {
        **{"resonators": False, "variables": False},
        "blocks": ("selective", "selective"),
    },
    "osciformer_paper": {"resonators": False, "backbone_options": {"preset": "paper"}},
}
#: Tried on the validation part at the first seed.
LEARNING_RATES = (1e-3, 3e-3, 1e-2)
#: Series whose spectra are computed at once, which bounds the memory.
_TOGETHER = 256


class Fitted(NamedTuple):
    """A model that was trained."""

    predict: Callable[[Part], np.ndarray]  #: Labels [n], or values [Q, F].
    facts: Row  #: What its row says of the training.


class Model(NamedTuple):
    """A model of a table."""

    fit: Callable[[Problem, Mapping[str, Any], int], Fitted]  #: Of settings, and a seed.
    grid: Sequence[Mapping[str, Any]] = ({},)  #: Settings, of which validation chooses.
    tasks: Sequence[str] = (*LABEL_TASKS, *QUERY_TASKS)


def model_names(task: str, own: Mapping[str, Model]) -> list[str]:
    """Return the names of all models of a task, ours first; `own` are those of the suite."""
    ours = [n for n in OURS if task in LABEL_TASKS or n != "osciformer_network"]
    others = [n for n in backbone_names() if n != "osciformer"]
    if task in QUERY_TASKS:
        others = [n for n in others if getattr(find_backbone(n).make, "can_read", True)]
    classical = [n for n, model in {**CLASSICAL, **own}.items() if task in model.tasks]
    return [*ours, *others, *classical]


def find_model(name: str, task: str, own: Mapping[str, Model]) -> Model:
    """Return a model by its name; an unknown one is an error with the known ones."""
    known = model_names(task, own)
    if name not in known:
        hint = did_you_mean(name, known) or f"choose among {', '.join(known)}"
        raise ValueError(f"there is no model {name!r} for {task}; {hint}")
    if name in own or name in CLASSICAL:
        return {**CLASSICAL, **own}[name]
    rates = [{"learning_rate": rate} for rate in LEARNING_RATES]
    return Model(functools.partial(fit_network, name), rates)


def fit_network(name: str, problem: Problem, chosen: Mapping[str, Any], seed: int) -> Fitted:
    """Train one of our estimators, or a baseline as the backbone of the same estimator.

    The epochs are given, and the weights are those of the best one on the validation part.
    """
    given: dict[str, Any] = {"accelerator": "cpu", **problem.settings, **chosen, "seed": seed}
    given |= {"patience": None, "logger": "csv"}
    clock = time.process_time if given["accelerator"] == "cpu" else time.perf_counter
    given |= OURS.get(name, {"backbone": name, "resonators": False})
    is_query = problem.task in QUERY_TASKS
    if is_query:
        given = {key: x for key, x in given.items() if key not in ("resonators", "variables")}
    task = "imputation" if problem.task == "interpolation" else problem.task
    arguments = estimator_arguments(task, given)
    parts = problem.train, problem.validation
    started = clock()
    if is_query:
        base = OsciFormerImputer if problem.task == "interpolation" else OsciFormerForecaster
        series, draw = _numbered(parts), functools.partial(_make_draw, parts, problem)
        model = _asked(base, draw)(**arguments).fit(series[0], validation_data=series[1])
    else:
        kind = OsciFormerClassifier if task == "classification" else OsciFormerRegressor
        model = kind(**arguments).fit(parts[0].series, validation_data=parts[1].series)
    seconds = clock() - started
    facts: Row = {
        "epochs": model.n_iter_,
        "best_epoch": model.best_epoch_,
        "epoch_seconds": seconds / model.n_iter_,
        "parameters": sum(p.numel() for p in model.model_.parameters()),
    }
    if getattr(model, "resonator_", None) is not None:
        facts["network_weight"] = model.network_weight_
    return Fitted(functools.partial(_answer, model), facts)


def _answer(model: Any, part: Part) -> np.ndarray:
    if part.asked is None:
        found: np.ndarray = model.predict(part.series.replace(labels=None))
        return found if model.task == "classification" else found.reshape(len(part.series))
    return np.concatenate(model.predict(part.series, [one.times for one in part.asked]))


def _numbered(parts: Sequence[Part]) -> list[IrregularSeries]:
    """Return the series of parts with numbers as ids, by which their questions are found."""
    ends = np.cumsum([0, *(len(part.series) for part in parts)])
    numbered = zip(parts, ends, strict=False)
    return [p.series.replace(ids=start + np.arange(len(p.series))) for p, start in numbered]


def _make_draw(parts: Sequence[Part], problem: Problem, model: Any) -> Draw:
    """Return what asks a model in training what it is asked in tests."""
    asked = concatenate([p.asked for p in parts if p.asked is not None])
    scaled = model.transform_.transform(asked)

    def draw(
        series: IrregularSeries, generator: np.random.Generator
    ) -> tuple[IrregularSeries, IrregularSeries]:
        seen = series if problem.thin is None else problem.thin(series, generator)
        return model._columns.as_inputs(seen), scaled.take(np.asarray(series.ids))

    return draw


def _asked(base: Any, make_draw: Callable[[Any], Draw]) -> Any:
    """Return an estimator that is trained with other questions than its own."""

    class Asked(base):  # type: ignore[misc]
        horizon_ = float("inf")

        def _make_draw(self, sample: IrregularSeries) -> Draw:
            return make_draw(self)

    return Asked


def _fit_resonator(problem: Problem, chosen: Mapping[str, Any], seed: int) -> Fitted:
    kind = ResonatorClassifier if problem.task == "classification" else ResonatorRegressor
    started = time.process_time()
    model = kind(random_state=seed).fit(problem.train.series)
    facts = {"fit_seconds": time.process_time() - started}
    return Fitted(functools.partial(_answer, model), facts)


def _fit_constant(problem: Problem, chosen: Mapping[str, Any], seed: int) -> Fitted:
    truth = problem.train.truth
    if problem.task == "classification":
        classes, counts = np.unique(truth, return_counts=True)
        answer = classes[counts.argmax()]
    else:
        answer = truth.mean(axis=0)
    return Fitted(lambda part: np.broadcast_to(answer, part.truth.shape), {})


def _from_neighbours(answer: Callable[..., np.ndarray]) -> Model:
    """Return a model that says what a function of the series and the questions says."""

    def predict(part: Part) -> np.ndarray:
        return answer(part.series, part.asked)

    task = "interpolation" if answer is queries.interpolate else "forecasting"
    return Model(lambda problem, chosen, seed: Fitted(predict, {}), tasks=(task,))


def spectra(series: IrregularSeries, step: float, lines: int) -> Float[np.ndarray, "n F L"]:
    """Return normalised Lomb-Scargle periodograms of each variable at k f, k = 1, ..., L."""
    found = []
    for start in range(0, len(series), _TOGETHER):
        part = series.take(range(start, min(start + _TOGETHER, len(series))))
        batch = collate(part.replace(labels=None))
        known = ~batch.values.isnan() & batch.mask[..., None]
        shares, *_ = variance_shares(
            batch.times.double(), batch.values.double(), known, step, lines
        )
        found.append(shares.numpy())
    return np.concatenate(found)


def features_and(
    describe: Callable[[Problem], Callable[[IrregularSeries], np.ndarray]],
    make: Callable[[str, Mapping[str, Any], int], Any],
    grid: Sequence[Mapping[str, Any]],
) -> Model:
    """Return a model of scikit-learn on features, which may be fitted to the training part."""

    def fit(problem: Problem, chosen: Mapping[str, Any], seed: int) -> Fitted:
        started = time.process_time()
        features = describe(problem)
        model = make(problem.task, chosen, seed)
        model.fit(features(problem.train.series), problem.train.truth)
        facts = {"fit_seconds": time.process_time() - started}
        return Fitted(lambda part: np.asarray(model.predict(features(part.series))), facts)

    return Model(fit, grid, LABEL_TASKS)


def linear(task: str, chosen: Mapping[str, Any], seed: int) -> Any:
    """Return logistic or ridge regression on standardised features."""
    models = need("sklearn.linear_model", extra="train")
    scaler = need("sklearn.preprocessing", extra="train").StandardScaler()
    strength = chosen["strength"]
    if task == "classification":
        model = models.LogisticRegression(C=1.0 / strength, max_iter=1000)
    else:
        model = models.Ridge(alpha=strength)
    return need("sklearn.pipeline", extra="train").make_pipeline(scaler, model)


STRENGTHS = tuple({"strength": strength} for strength in (0.1, 10.0, 1000.0))


def _boosting(task: str, chosen: Mapping[str, Any], seed: int) -> Any:
    ensemble = need("sklearn.ensemble", extra="train")
    kind = "Classifier" if task == "classification" else "Regressor"
    make = getattr(ensemble, f"HistGradientBoosting{kind}")
    return make(**chosen, early_stopping=False, random_state=seed)


def _summaries(problem: Problem) -> Callable[[IrregularSeries], np.ndarray]:
    features = ResonatorFeatures(families=["summary", "observation"], random_state=0)
    features.fit(problem.train.series.replace(labels=None))
    return lambda series: np.asarray(features.transform(series.replace(labels=None)))


#: Models without a network. Boosted trees see statistics of each variable and of its times.
CLASSICAL: Mapping[str, Model] = {
    "resonator": Model(_fit_resonator, tasks=LABEL_TASKS),
    "boosting": features_and(
        _summaries, _boosting, [{"learning_rate": rate} for rate in (0.03, 0.1, 0.3)]
    ),
    "linear": _from_neighbours(queries.interpolate),
    "last": _from_neighbours(queries.last_value_before),
    "constant": Model(_fit_constant),
}


def spectral(step: float, lines: int) -> Model:
    """Return ridge or logistic regression on Lomb-Scargle spectra."""

    def describe(problem: Problem) -> Callable[[IrregularSeries], np.ndarray]:
        return lambda series: spectra(series, step, lines).reshape(len(series), -1)

    return features_and(describe, linear, STRENGTHS)


def peak(step: float, lines: int, *, first: int = 1, unit: float = 1.0) -> Model:
    """Return a model that answers with the frequency of the highest peak of the first variable.

    Args:
        step: Spacing of the lines, in turns a unit of time.
        lines: Number of lines.
        first: The first line that counts.
        unit: What a turn a unit of time is in the unit of the targets.
    """

    def predict(part: Part) -> np.ndarray:
        power = spectra(part.series, step, lines)[:, 0]
        best = power[:, first - 1 :].argmax(axis=1) + first - 1
        # The top of a parabola through three lines: else the grid would bound the error.
        near = np.clip(best[:, None] + np.arange(-1, 2), 0, lines - 1)
        low, top, high = np.take_along_axis(power, near, axis=1).T
        bend = low - 2.0 * top + high
        shift = np.where(bend < 0, 0.5 * (low - high) / np.where(bend < 0, bend, -1.0), 0.0)
        return unit * step * (best + 1 + shift.clip(-0.5, 0.5))

    return Model(lambda problem, chosen, seed: Fitted(predict, {}), tasks=("regression",))
