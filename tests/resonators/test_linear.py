"""Linear heads: leaving out is refitting, all ways agree, probabilities are honest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osciformer.resonators import linear
from osciformer.resonators.calibration import calibrate, log_softmax, temperature_losses
from osciformer.resonators.gaussian import Gaussian, sharpen
from osciformer.resonators.linear import LinearHead, MatrixRows, Standardiser, _Fit
from osciformer.resonators.logistic import STRENGTHS, fit_logistic
from osciformer.resonators.ridge import (
    Choice,
    Gram,
    Targets,
    center_kernel,
    choose_groups,
    fit_kernel,
    leave_out,
)


def problem(
    count: int = 40, width: int = 30, num_classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return columns, classes and weights."""
    generator = np.random.default_rng(seed)
    classes = np.arange(count) % num_classes
    X = generator.normal(size=(count, width)).astype(np.float32)
    X[:, :4] += generator.normal(size=(num_classes, 4))[classes][:, :width]
    return X, classes, generator.uniform(0.2, 3.0, count)


def refit(Z: np.ndarray, targets: Targets, strength: float) -> np.ndarray:
    """Return scores of each row by solving the problem of all the others."""
    found = []
    for out in range(len(Z)):
        rest = np.arange(len(Z)) != out
        s, z, y = targets.weight[rest], Z[rest], targets.values[rest]
        mean, level = np.average(z, axis=0, weights=s), np.average(y, axis=0, weights=s)
        gram = (z - mean).T @ (s[:, None] * (z - mean)) + strength * np.eye(Z.shape[1])
        slope = np.linalg.solve(gram, (z - mean).T @ (s[:, None] * (y - level)))
        found.append(level + (Z[out] - mean) @ slope)
    return np.array(found)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(5, 30),
    width=st.integers(1, 40),
    exponent=st.floats(-2.0, 2.0),
    is_weighted=st.booleans(),
    num_classes=st.sampled_from((0, 2, 4)),
    seed=st.integers(0, 99),
)
def test_leaving_out_is_refitting_without_the_series(
    count: int, width: int, exponent: float, is_weighted: bool, num_classes: int, seed: int
) -> None:
    Z, classes, weight = problem(count, width, max(num_classes, 2), seed)
    Z = Z.astype(np.float64)
    labels = classes if num_classes else Z[:, :1] + weight[:, None]
    targets = Targets.of(labels, num_classes, weight if is_weighted else None)
    strength = 10.0**exponent
    wanted = refit(Z, targets, strength)
    kernel = center_kernel(Z @ Z.T, targets.weight)
    gram = Gram(Z.shape[1], targets.values.shape[1])
    for part in (slice(0, 3), slice(3, None)):
        gram.add(Z[part], targets.take(part))
    ways = {
        "spectrum": leave_out(kernel, targets, [strength])[0],
        "kernel": fit_kernel(kernel, targets, [strength]).left_out,
        "columns": gram.fit(targets, Z, np.arange(count), [strength]).left_out,
    }
    for name, found in ways.items():
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("num_classes", [0, 3])
def test_many_series_and_few_give_the_same_model(
    num_classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, classes, weight = problem(60, 20)
    labels = classes if num_classes else X[:, :2].astype(np.float64)
    families = np.repeat([0, 1], 10)

    def fit(search: int, largest: int) -> np.ndarray:
        monkeypatch.setattr(linear, "SEARCH_SIZE", search)
        monkeypatch.setattr(linear, "LARGEST_KERNEL", largest)
        # The same choices each time, so that only the ways to the solution differ.
        choices = iter([Choice(0.5, False, np.ones(60)), Choice(0.5, True, np.full(60, 2.0))])
        monkeypatch.setattr(Choice, "of", lambda *_, **__: next(choices))
        monkeypatch.setattr(LinearHead, "_strengths", lambda *_: [0.5])
        head = LinearHead(families, num_classes, "ridge")
        head.fit(MatrixRows(X), labels, weight)
        return head.outputs(X)

    few, some, many = fit(100, 100), fit(40, 100), fit(40, 10)
    np.testing.assert_allclose(some, few, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(many, few, rtol=1e-7, atol=1e-7)


def test_gaussian_by_landmarks_is_the_kernel_itself_if_all_series_are_landmarks() -> None:
    X, *_ = problem(30, 5, 2)
    Z = X.astype(np.float64)
    kernel = Gaussian.of(Z)
    np.testing.assert_allclose(kernel(Z), sharpen(Z @ Z.T), atol=1e-12)
    columns = kernel(Z) @ kernel.expansion()
    np.testing.assert_allclose(columns @ columns.T, kernel(Z), atol=1e-5)


def test_slopes_of_the_gaussian_are_differences() -> None:
    X, *_ = problem(12, 3, 2)
    Z = X.astype(np.float64)
    kernel, coefficients = Gaussian.of(Z), np.arange(12.0)
    found = kernel.slopes(Z, coefficients)
    for column in range(3):
        step = 1e-6 * np.eye(3)[column]
        wanted = (kernel(Z + step) - kernel(Z - step)) @ coefficients / 2e-6
        np.testing.assert_allclose(found[:, column], wanted, rtol=1e-6, atol=1e-6)


def circles(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(count, 2)).astype(np.float32)
    return X, (np.hypot(*X.T) > 1.2).astype(np.int64)


@pytest.mark.parametrize("search", [1000, 100])
def test_rings_need_the_gaussian_kernel_and_get_it(
    search: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SEARCH_SIZE", search)
    X, y = circles(400, 0)
    head = LinearHead(np.zeros(2, dtype=int), 2)
    head.fit(MatrixRows(X), y)
    test, truth = circles(400, 1)
    assert head.gaussian is not None
    assert (head.outputs(test).argmax(axis=1) == truth).mean() > 0.95


def test_lines_are_preferred_where_they_do() -> None:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(200, 5)).astype(np.float32)
    y = X[:, :1] + 0.5 * generator.normal(size=(200, 1))
    head = LinearHead(np.zeros(5, dtype=int))
    head.fit(MatrixRows(X), y)
    assert head.gaussian is None
    assert head.loss == pytest.approx(0.25, rel=0.25)


def kernels_of(*parts: np.ndarray) -> np.ndarray:
    return np.stack([part.astype(float) @ part.T / part.shape[1] for part in parts])


def test_the_group_with_the_signal_is_chosen_wherever_it_stands() -> None:
    X, classes, _ = problem(90, 400)
    targets = Targets.of(classes, 3)
    signal, noise, other = X[:, :4], X[:, 4:200], X[:, 200:]
    assert choose_groups(kernels_of(signal, noise, other), targets) == (0,)
    assert choose_groups(kernels_of(noise, signal, other), targets) == (1,)
    assert choose_groups(kernels_of(noise, other, signal), targets) == (2,)


def test_groups_that_tell_different_things_are_both_chosen() -> None:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(150, 20))
    y = X[:, :1] + X[:, 10:11]
    kernels = kernels_of(X[:, :10], X[:, 10:], generator.normal(size=(150, 10)))
    assert choose_groups(kernels, Targets.of(y, 0)) == (0, 1)


@settings(max_examples=15, deadline=None)
@given(count=st.integers(6, 60), num_classes=st.sampled_from((0, 2)), seed=st.integers(0, 99))
def test_equal_groups_are_the_first(count: int, num_classes: int, seed: int) -> None:
    X, classes, weight = problem(count, 12, 2, seed)
    targets = Targets.of(classes if num_classes else weight[:, None], num_classes)
    assert choose_groups(kernels_of(X, X, X), targets) == (0,)


def test_luck_on_few_series_chooses_nothing_but_the_first_group() -> None:
    targets, found = Targets.of(np.arange(10) % 2, 2), []
    for seed in range(30):
        X = np.random.default_rng(seed).normal(size=(10, 30))
        found.append(choose_groups(kernels_of(*np.split(X, 3, axis=1)), targets) == (0,))
    assert np.mean(found) > 2 / 3


def test_heads_choose_groups_of_families_and_pass_over_constant_ones() -> None:
    X, classes, _ = problem(90, 60)
    X = np.hstack((X[:, 4:], X[:, :4], np.ones((90, 3)))).astype(np.float32)
    families = np.repeat([0, 1, 2, 3], [28, 28, 4, 3])
    head = LinearHead(families, 3, groups=["noise", "noise", "signal", "constant"])
    assert head.choose(X, classes) == ["signal"]
    # Groups that vary weigh the same, families of a group as the roots of their sizes.
    np.testing.assert_allclose(head._weights(), [0.25, 0.25, 0.5, 0.0])
    assert head.choose(np.ones_like(X), classes) == ["noise"]


def test_columns_of_a_family_share_its_weight() -> None:
    X, classes, _ = problem(90, 20)
    head = LinearHead(np.repeat([0, 1], [4, 16]), 3, "ridge", groups=["a", "a"])
    head.fit(MatrixRows(X), classes)
    np.testing.assert_allclose(head.weights, [1 / 3, 2 / 3])
    np.testing.assert_allclose(head.shares, np.repeat([1 / 12, 1 / 24], [4, 16]))


def test_unknown_columns_are_as_good_as_their_mean() -> None:
    X, classes, _ = problem(60, 10)
    X[::3, 5] = np.nan
    filled = np.where(np.isnan(X), np.nanmean(X, axis=0), X)
    standard = Standardiser.fit(X)
    np.testing.assert_allclose(standard.transform(X), standard.transform(filled), atol=1e-6)
    np.testing.assert_allclose(standard.scale, np.nanstd(X.astype(float), axis=0))
    head = LinearHead(np.zeros(10, dtype=int), 3)
    head.fit(MatrixRows(X), classes)
    assert np.isfinite(head.outputs(X)).all()
    everything_missing = Standardiser.fit(np.full((5, 2), np.nan, dtype=np.float32))
    assert np.isinf(everything_missing.scale).all()


def test_columns_that_are_all_constant_give_the_shares_of_the_classes() -> None:
    classes = np.repeat([0, 1], [30, 10])
    head = LinearHead(np.array([0, 1]), 2)
    head.fit(MatrixRows(np.ones((40, 2), dtype=np.float32)), classes)
    chance = np.exp(log_softmax(head.outputs(np.zeros((1, 2)))))[0]
    np.testing.assert_allclose(chance, [0.75, 0.25], atol=0.03)


def test_constant_columns_and_outliers_do_no_harm() -> None:
    X, classes, _ = problem(60, 10)
    X = np.hstack((X, np.full((60, 2), 3.0), np.eye(60)[:, :1] * 1e9)).astype(np.float32)
    head = LinearHead(np.zeros(13, dtype=int), 3, "ridge")
    head.fit(MatrixRows(X), classes)
    assert np.isfinite(head.outputs(X)).all()
    assert np.abs(Standardiser.fit(X).transform(X)).max() <= 8.0
    assert (head.shares[10:12] == 0).all()


def test_columns_that_vary_more_may_count_for_more() -> None:
    X, classes, _ = problem(60, 4)
    X *= np.array([1.0, 2.0, 1.0, 1.0], dtype=np.float32) / X.std(axis=0)
    head = LinearHead(np.array([0, 0, 1, 1]), 3, "ridge", powers=[1.0, 0.0])
    head.fit(MatrixRows(X), classes)
    weights = head._shares_of(np.array([0.5, 0.5]))
    np.testing.assert_allclose(weights, [0.1, 0.4, 0.25, 0.25], rtol=1e-6)


def test_weights_are_as_good_as_copies() -> None:
    X, classes, _ = problem(30, 8)
    copies = np.repeat(np.arange(30), np.arange(30) % 3 + 1)

    def fit(X: np.ndarray, y: np.ndarray, weight: Any) -> np.ndarray:
        targets = Targets.of(y, 3, weight)
        Z = X.astype(np.float64)
        found = fit_kernel(center_kernel(Z @ Z.T, targets.weight), targets, [1.0])
        return Z.T @ (np.sqrt(targets.weight)[:, None] * found.duals)

    weight = np.bincount(copies).astype(float)
    # Weights are scaled to a mean of 1, so that the strength must be, too.
    targets = Targets.of(classes, 3, weight)
    Z = X.astype(np.float64)
    kernel = center_kernel(Z @ Z.T, targets.weight)
    found = fit_kernel(kernel, targets, [1.0 / weight.mean()])
    slopes = Z.T @ (np.sqrt(targets.weight)[:, None] * found.duals)
    np.testing.assert_allclose(slopes, fit(X[copies], classes[copies], None), rtol=1e-8)


def test_logistic_is_that_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    X, classes, weight = problem(80, 6)
    Z = X.astype(np.float64)
    targets = Targets.of(classes, 3, weight)
    strength, found, _ = fit_logistic(Z, targets, np.random.default_rng(0))
    other = LogisticRegression(C=1.0 / strength, tol=1e-10, max_iter=1000)
    other.fit(Z, classes, sample_weight=targets.weight)
    wanted = other.predict_log_proba(Z)
    np.testing.assert_allclose(log_softmax(Z @ found[:-1] + found[-1]), wanted, atol=1e-3)
    assert strength in STRENGTHS


@pytest.mark.parametrize("count", [30, 120])
def test_logistic_head_has_low_loss_with_few_and_many_series(count: int) -> None:
    X, classes, _ = problem(count, 60, 2)
    head = LinearHead(np.zeros(60, dtype=int), 2, "logistic")
    left_out = head.fit(MatrixRows(X), classes)
    assert head.chosen == "logistic"
    assert head.loss < np.log(2.0)
    assert left_out.outputs.shape == (count, 2)


def test_calibration_finds_the_true_temperature_and_bias() -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(4000, 3))
    bias = np.array([0.5, 0.0, -0.5])
    logits = 2.5 * scores + bias
    noise = generator.gumbel(size=logits.shape)
    classes = (logits + noise).argmax(axis=1)
    found, loss = calibrate(scores, classes, np.ones(4000))
    assert found.scale == pytest.approx(2.5, rel=0.06)
    np.testing.assert_allclose(found.bias - found.bias.mean(), bias, atol=0.15)
    best = -log_softmax(logits)[np.arange(4000), classes].mean()
    assert loss <= best + 1e-3


def test_temperature_is_where_the_loss_is_least() -> None:
    generator = np.random.default_rng(1)
    scores, hits = generator.normal(size=(2, 50, 3)), np.eye(3)[generator.integers(0, 3, 50)]
    scores[0] += hits
    scales, losses = temperature_losses(scores, hits, np.ones(50))
    for factor in (0.9, 1.0, 1.1):
        trial = -(hits * log_softmax((factor * scales)[:, None, None] * scores)).sum(axis=2)
        assert (trial.mean(axis=1) >= losses.mean(axis=1) - 1e-9).all()


def test_perfect_scores_have_a_finite_temperature() -> None:
    classes = np.arange(20) % 2
    found, loss = calibrate(2.0 * np.eye(2)[classes] - 1.0, classes, np.ones(20))
    assert np.isfinite(found.scale)
    assert 0.0 < loss < 0.1


def test_heads_that_cannot_be_are_refused() -> None:
    families = np.zeros(2, dtype=int)
    with pytest.raises(ValueError, match="head must be one of 'auto', 'ridge', 'logistic'"):
        LinearHead(families, 2, "forest")
    with pytest.raises(ValueError, match="head='logistic' is for classes"):
        LinearHead(families, 0, "logistic")


def test_fits_are_compared_on_the_same_series() -> None:
    """The loss of some series is that of their outputs alone, at their own places."""
    classes = np.array([0, 1, 0, 1, 1, 0])
    outputs = np.array([[3.0, 0.0], [0.0, 0.5], [1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [0.0, 2.0]])
    targets = Targets.of(classes, 2, None)
    places = np.arange(6)
    whole = _Fit("logistic", 1.0, np.zeros((1, 2)), np.zeros(2), places, outputs)
    some = np.array([0, 2, 3])
    part = whole._replace(places=some, left_out=outputs[some])
    assert whole.loss(targets, some) == part.loss(targets)
    assert whole.loss(targets, some) < whole.loss(targets)
