"""Classes are found whether they come as text or as numbers; targets may be text of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from osciformer.data import IrregularSeries
from osciformer.estimators.labels import as_targets, encode_classes, read_labels, weigh_classes


@pytest.mark.parametrize(
    ("labels", "classes", "wanted"),
    [
        (["0", "01", "1"], [0, 1], [0, 1, 1]),
        (["1.0", "0"], [0.0, 1.0], [1, 0]),
        (["True", "false"], [False, True], [1, 0]),
        ([1, 0], ["0", "1"], [1, 0]),
        ([1.0, 0.0], ["0", "1"], [1, 0]),
        ([1.0, 0.0], ["0.0", "1.0"], [1, 0]),
        ([True, False], ["false", "true"], [1, 0]),
        (["b", "a"], ["a", "b"], [1, 0]),
        ([10**17 + 1], [10**17, 10**17 + 1], [1]),
        ([str(10**17 + 1)], [10**17, 10**17 + 1], [1]),
    ],
)
def test_classes_match_by_what_they_mean(labels: Any, classes: Any, wanted: list[int]) -> None:
    assert encode_classes(np.array(labels), np.array(classes)).tolist() == wanted


@pytest.mark.parametrize(
    ("label", "classes"),
    [("1_0", [0, 10]), ("x", [0, 1]), ("01", ["1", "2"]), (1, ["01", "x"]), ("nan", [0.0, 1.0])],
)
def test_unknown_classes_are_named(label: Any, classes: Any) -> None:
    with pytest.raises(ValueError, match=f"not there in fit: {label!r}"):
        encode_classes(np.array([label]), np.array(classes))


@pytest.mark.parametrize("classes", [[0, 1], [0.0, 1.0], [False, True], ["0", "1"]])
@pytest.mark.parametrize("key", ["text", "own", "whole"])
def test_class_weights_name_classes_of_any_kind(classes: list[Any], key: str) -> None:
    texts = {False: "false", True: "true"} if isinstance(classes[0], bool) else {}
    name = {"text": texts.get(classes[1], str(classes[1])), "own": classes[1], "whole": 1}[key]
    assert weigh_classes({name: 3.0}, np.array(classes), np.array([0, 1])) == [1.0, 3.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"2": 1.0}, "names '2', which y does not have; its classes are 0, 1"),
        ({"1": 1.0, 1: 2.0}, "names a class twice"),
        ({"1": "much"}, "that of '1' is 'much'"),
        ({"1": -1.0}, "that of '1' is -1.0"),
        ({"1": float("nan")}, "that of '1' is nan"),
    ],
)
def test_wrong_class_weights_are_explained(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weigh_classes(given, np.array([0, 1]), np.array([0, 1]))


def test_targets_may_be_text_of_numbers() -> None:
    assert as_targets(np.array(["1", " 2.5", "-1e3"]), "C").tolist() == [1.0, 2.5, -1000.0]
    with pytest.raises(TypeError, match=r"takes numbers as y; got 'low'\. Use C"):
        as_targets(np.array(["1", "low"]), "C")
    with pytest.raises(ValueError, match="must not be missing or infinite; it is at 1"):
        as_targets(np.array(["1", "nan"]), "C")


def test_dates_are_no_labels() -> None:
    series = IrregularSeries.from_arrays([[0.0], [1.0]], [[1.0], [2.0]])
    with pytest.raises(TypeError, match="y must be numbers or text; got dates"):
        read_labels(series, np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[D]"))


def test_real_targets_as_text_are_no_classes() -> None:
    from osciformer import ResonatorClassifier

    texts = np.array([f"{0.37 * k:.2f}" for k in range(8)])
    series = IrregularSeries.from_arrays([[0.0, 1.0]] * 8, [[1.0, 2.0]] * 8)
    with pytest.raises(ValueError, match=r"looks like a real target, not a class: it holds 0\.37"):
        ResonatorClassifier().fit(series, texts)
