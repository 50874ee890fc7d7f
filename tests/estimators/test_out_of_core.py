from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from osciformer.data import IrregularSeries, ParquetSeries
from osciformer.estimators import (
    OsciFormerClassifier,
    OsciFormerForecaster,
    OsciFormerImputer,
    OsciFormerRegressor,
)

from .toy import TINY, make, two_levels

pytest.importorskip("pyarrow")


@pytest.fixture
def series() -> IrregularSeries:
    return two_levels(60)


@pytest.fixture
def table(series: IrregularSeries, tmp_path: Path) -> ParquetSeries:
    import pyarrow.parquet as parquet

    path = tmp_path / "table.parquet"
    parquet.write_table(series.to_frame("pyarrow"), path, row_group_size=50)
    columns = {"id": "id", "time": "time", "label": "label", "static": ["age", "height"]}
    return ParquetSeries(path, chunk_rows=60, **columns)


def test_table_on_disk_trains_a_classifier(table: ParquetSeries, series: IrregularSeries) -> None:
    model = make(OsciFormerClassifier, **{**TINY, "max_epochs": 8, "learning_rate": 0.02}).fit(
        table
    )
    assert table.num_blocks > 3
    assert model.score(table) > 0.9
    assert model.predict_proba(table) == pytest.approx(model.predict_proba(series), abs=1e-5)


def test_scales_are_those_of_the_data_in_memory(
    table: ParquetSeries, series: IrregularSeries
) -> None:
    settings = {**TINY, "max_epochs": 1, "validation_fraction": 0.0}
    streamed = make(OsciFormerClassifier, **settings).fit(table)
    whole = make(OsciFormerClassifier, **settings).fit(series)
    for name in ("center", "scale"):
        found = getattr(streamed.transform_.value_scaler, name)
        assert found == pytest.approx(getattr(whole.transform_.value_scaler, name))


def test_same_random_state_gives_the_same_bits(table: ParquetSeries) -> None:
    first, second = (make(OsciFormerClassifier, **TINY).fit(table) for _ in range(2))
    assert (first.predict_proba(table) == second.predict_proba(table)).all()


def test_targets_can_be_given_beside_the_table(table: ParquetSeries) -> None:
    y = np.arange(60.0)
    weight = np.linspace(0.1, 1.0, 60)
    model = make(OsciFormerRegressor, **TINY).fit(table, y, sample_weight=weight)
    assert model.predict(table).shape == (60,)


def test_table_on_disk_trains_a_forecaster(table: ParquetSeries, series: IrregularSeries) -> None:
    model = make(OsciFormerForecaster, **TINY).fit(table)
    times = [[11.0, 12.0]] * 30 + [[13.0]] * 30
    streamed, whole = model.predict(table, times), model.predict(series, times)
    for mine, wanted in zip(streamed, whole, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-4)


def test_table_on_disk_trains_an_imputer(table: ParquetSeries) -> None:
    model = make(OsciFormerImputer, **TINY).fit(table)
    assert not np.isnan(model.transform(table).values).any()
