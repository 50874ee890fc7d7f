"""An exported network answers as the estimator does, in a program that needs the core alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osciformer.data import IrregularSeries
from osciformer.data.batches import collate
from osciformer.estimators import OsciFormerClassifier, OsciFormerRegressor

from .toy import TINY, decays, make, two_levels

LENGTH = 16


def padded(series: IrregularSeries) -> list[torch.Tensor]:
    """Return times, values, mask and static features, in the units of the data."""
    batch = collate(series.replace(labels=None))
    more = LENGTH - batch.mask.shape[1]
    times = torch.nn.functional.pad(batch.times, (0, more))
    values = torch.nn.functional.pad(batch.values, (0, 0, 0, more))
    found = [times, values, torch.nn.functional.pad(batch.mask, (0, more))]
    return found if batch.static is None else [*found, batch.static]


def test_probabilities_are_those_of_the_classifier(tmp_path: Path) -> None:
    series, new = two_levels(60), two_levels(7, seed=1)
    model = make(OsciFormerClassifier, **TINY).fit(series)
    model.calibrate(series, probabilities=True)
    path = model.export(tmp_path / "net.pt2", length=LENGTH)
    found = torch.export.load(path).module()(*padded(new))
    np.testing.assert_allclose(found.detach(), model.predict_proba(new), rtol=0, atol=1e-5)
    assert model.temperature_ != 1.0


def test_targets_are_those_of_the_regressor_without_packages_of_training(tmp_path: Path) -> None:
    series, new = decays(40), decays(5, seed=1)
    labels = np.array([1e3 * one.values[0, 0] for one in (series[k] for k in range(40))])
    model: Any = make(OsciFormerRegressor, **TINY).fit(series, labels)
    path = model.export(tmp_path / "net.pt2", length=LENGTH)
    torch.save(padded(new), tmp_path / "inputs.pt")
    code = (
        "import sys, torch, osciformer.ops; inputs = torch.load('inputs.pt');"
        "found = torch.export.load('net.pt2').module()(*inputs).detach();"
        "assert not {'sklearn', 'pytorch_lightning'} & set(sys.modules);"
        "torch.save(found, 'found.pt')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt")[:, 0]
    np.testing.assert_allclose(found, model.predict(new), rtol=1e-5)
    assert path.name == "net.pt2"


def test_a_joined_model_says_that_its_resonators_cannot_go_along(tmp_path: Path) -> None:
    model = make(OsciFormerClassifier, **TINY).fit(two_levels(20))
    model.resonator_, model.network_weight_ = object(), 0.3
    with pytest.raises(ValueError, match=r"weight 0\.3.*Fit with resonators=False"):
        model.export(tmp_path / "net.pt2", length=LENGTH)


def test_a_program_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(OsciFormerClassifier, **TINY).fit(two_levels(20))
    monkeypatch.setattr("osciformer.estimators.export.TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="differs from the network"):
        model.export(tmp_path / "net.pt2", length=LENGTH)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"end in \.pt2"):
        model.export(tmp_path / "net.onnx", length=LENGTH)
    with pytest.raises(ValueError, match="length must be at least 1; got 0"):
        model.export(tmp_path / "net.pt2", length=0)
    assert list(tmp_path.iterdir()) == []
