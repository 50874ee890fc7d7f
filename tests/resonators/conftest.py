"""Fewer random filters than in earnest: their laws do not depend on how many there are."""

from __future__ import annotations

import pytest

from osciformer.resonators import shape


@pytest.fixture(autouse=True)
def few_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "NUM_FILTERS", 64)
