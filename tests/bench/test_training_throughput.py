"""The benchmark of the training loop: which epochs it measures, and its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .scripts import load

for package in ("pyarrow", "pytorch_lightning"):
    pytest.importorskip(package)
(script,) = load("training_throughput")


def test_ratios_are_taken_pair_by_pair() -> None:
    # The second epoch was disturbed as a whole, which its own ratio does not show.
    pairs = [
        script.Pair(*(script.Seconds(seconds, 10 * seconds) for seconds in (0.1, 1.0, 1.1))),
        script.Pair(*(script.Seconds(seconds, 10 * seconds) for seconds in (0.3, 3.0, 3.3))),
        script.Pair(*(script.Seconds(seconds, 10 * seconds) for seconds in (0.1, 1.0, 1.1))),
    ]
    report = script.summarise(pairs, 64)
    for clock, factor in (("processor", 1.0), ("wall", 10.0)):
        assert report[clock]["cost_of_data"] == pytest.approx([0.1, 0.1, 0.1])
        assert report[clock]["cost_of_data_and_loop"] == pytest.approx([0.1, 0.1, 0.1])
        assert report[clock]["bare_series_per_second"] == pytest.approx(64 / factor)
        assert report[clock]["bare_seconds"] == pytest.approx([factor, 3 * factor, factor])


@pytest.mark.parametrize("name", ["memory", "disk"])
def test_first_and_last_epoch_are_not_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = script.make_series(6)
    source = script.make_sources(series, 4, tmp_path)[name]
    seen: list[int] = []

    def tiny_model(series: Any) -> Any:
        config = {"input_dim": script.NUM_FEATURES, "static_dim": script.NUM_STATIC}
        config |= {"output_dim": 2, "dim": 8, "num_layers": 1, "num_heads": 1}
        return script.SeriesModel(script.SeriesModelConfig(**config))

    def bare(self: Any, batches: list[Any]) -> Any:
        seen.append(sum(len(batch) for batch in batches))
        return script.Seconds(1.0, 2.0)

    monkeypatch.setattr(script, "make_model", tiny_model)
    monkeypatch.setattr(script.BareSteps, "__call__", bare)
    pairs = script.measure(source, series, script.EPOCHS_A_RUN)
    assert len(pairs) == script.EPOCHS_A_RUN
    assert seen == [6] * (script.EPOCHS_A_RUN + 1)
    assert all(pair.bare == (1.0, 2.0) for pair in pairs)
    assert all(min(*pair.data, *pair.pipeline) > 0 for pair in pairs)
