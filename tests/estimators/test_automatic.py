"""How long to train, where that is left open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osciformer.estimators import OsciFormerClassifier
from osciformer.estimators.base import training_length

from .toy import TINY, make, two_levels


@given(st.integers(1, 10**7))
def test_small_sets_get_more_passes_and_smaller_batches(count):
    now, later = training_length(count), training_length(count + 1)
    assert 8 <= now.batch_size <= later.batch_size <= 64
    assert 15 <= now.max_epochs <= 200
    assert now.patience == max(5, now.max_epochs // 4)
    steps = -(-count // now.batch_size)
    assert now.max_epochs * steps >= 600 or now.max_epochs == 200


@pytest.mark.parametrize("patience", [None, 3])
def test_what_is_given_stays(patience):
    assert training_length(40, 16, 2, patience) == (16, 2, patience)


def test_an_estimator_follows_the_number_of_training_series():
    model = make(OsciFormerClassifier, **{**TINY, "batch_size": "auto", "max_epochs": "auto"})
    assert model._train_config(0, 40).max_epochs == 120
    assert model._train_config(0, 3600).batch_size == 64
    model.set_params(max_epochs=1).fit(two_levels(20))
    assert len(model.history_) == 1
    assert model.predict(two_levels(3)).shape == (3,)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="max_epochs must be a number or 'auto'; got 'many'"):
        training_length(40, max_epochs="many")
