"""Trees as arrays against scikit-learn, their share, and what they add."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from osciformer import load
from osciformer.data import IrregularSeries
from osciformer.estimators import ResonatorClassifier
from osciformer.resonators.linear import LeftOut
from osciformer.resonators.trees import Trees, TreeShare


def draw(count: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return columns with gaps, and classes by a threshold and by what is unknown."""
    generator = np.random.default_rng(seed)
    matrix = generator.normal(size=(count, width)).astype(np.float32)
    matrix[generator.random(matrix.shape) < 0.3] = np.nan
    rule = (np.nan_to_num(matrix[:, 0]) > 0.2) ^ np.isnan(matrix[:, 1])
    return matrix, (rule ^ (generator.random(count) < 0.1)).astype(int)


def grow(matrix: np.ndarray, classes: np.ndarray, seed: int = 0) -> HistGradientBoostingClassifier:
    """Return fitted trees."""
    settings = {"max_leaf_nodes": 6, "max_iter": 20, "early_stopping": False}
    return HistGradientBoostingClassifier(**settings, random_state=seed).fit(matrix, classes)


def test_arrays_say_what_scikit_learn_says():
    """The mean over ensembles, with unknown values, and sums of additions."""
    matrix, classes = draw(400, 5)
    ensembles = [grow(matrix[k::2], classes[k::2], k) for k in range(2)]
    trees = Trees.of(ensembles)
    expected = np.mean([one.decision_function(matrix) for one in ensembles], axis=0)
    np.testing.assert_allclose(trees.logits(matrix), expected, rtol=0, atol=1e-12)
    whole = trees.additions(matrix).sum(axis=1) + trees.value[trees.roots].sum() + trees.intercept
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-12)


def test_trees_count_where_a_linear_model_is_blind():
    """A rule of thresholds gives trees most of the share, and mixed logits are better."""
    matrix, classes = draw(1500, 5)
    noise = np.random.default_rng(1).normal(scale=0.1, size=(1500, 2))
    other = LeftOut(np.arange(1500), noise)
    found, left_out = TreeShare.fit(matrix, np.arange(5), classes, None, other, seed=0)
    assert found is not None
    assert found.share > 0.5
    right = (left_out.outputs.argmax(axis=1) == classes).mean()
    assert right > 0.8
    assert found.effects[1, :2].min() > 3 * found.effects[1, 2:].max()


def test_trees_without_a_say_are_dropped():
    """Another model that knows the classes, or too few series, leave no trees."""
    matrix, classes = draw(1500, 3)
    known = LeftOut(np.arange(1500), 20.0 * np.eye(2)[classes])
    assert TreeShare.fit(matrix, np.arange(3), classes, None, known, seed=0) == (None, known)
    few = LeftOut(np.arange(400), np.zeros((400, 2)))
    some = (matrix[:400], np.arange(3), classes[:400], None, few)
    assert TreeShare.fit(*some, seed=0) == (None, few)


@pytest.fixture(scope="module")
def series() -> IrregularSeries:
    """Series of two variables whose class is whether exactly one of two means is high."""
    generator = np.random.default_rng(0)
    levels = generator.choice([-1.0, 1.0], size=(1200, 2))
    times = [np.sort(generator.random(5)) for _ in levels]
    values = [level + 0.3 * generator.normal(size=(5, 2)) for level in levels]
    labels = np.where(levels.prod(axis=1) < 0, "one", "none")
    return IrregularSeries.from_arrays(times, values, labels=labels)


def test_a_classifier_with_trees_is_saved_whole(series, tmp_path):
    """It predicts the same after loading, explains itself, and refuses damaged trees."""
    families = ["states", "summary"]
    model = ResonatorClassifier(families=families, random_state=0).fit(series)
    assert model.trees_ is not None
    assert model.score(series) > 0.95
    loaded = load(model.save(tmp_path / "model.safetensors") or tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.predict_proba(series), model.predict_proba(series))
    assert loaded.explain(top=3) == model.explain(top=3)
    assert {row["output"] for row in model.explain(series[:50], top=2)} == {"one"}
    plain, arrays = model.trees_.state()
    arrays["left"] = np.zeros_like(arrays["left"])
    with pytest.raises(ValueError, match="trees are damaged"):
        TreeShare.from_state(plain, arrays)


def test_a_head_that_was_asked_for_has_no_trees(series):
    """`head='ridge'` is linear."""
    model = ResonatorClassifier(families=["summary"], head="ridge", random_state=0).fit(series)
    assert model.trees_ is None


def test_a_column_without_a_number_is_passed_over():
    """A variable that no series of a fold has must not end the fit."""
    matrix, classes = draw(1000, 3)
    blank = matrix.copy()
    blank[:, 2] = np.nan
    blank[np.flatnonzero(classes)[:1], 2] = 1.0  # in one fold's training part, it is not there
    other = LeftOut(np.arange(1000), np.random.default_rng(1).normal(scale=0.1, size=(1000, 2)))
    found, _ = TreeShare.fit(blank, np.arange(3), classes, None, other, seed=0)
    assert found is not None
    assert set(found.trees.column[found.trees.left != np.arange(len(found.trees.left))]) <= {0, 1}
