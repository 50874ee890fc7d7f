"""The public addresses still serve what the registry says; run with `-m network`."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from osciformer.data.errors import UnverifiedDownloadWarning
from osciformer.data.registry import dataset_info, get_dataset, list_datasets

PUBLIC = [name for name in list_datasets() if dataset_info(name).public is not None]


@pytest.mark.network
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_set_can_be_downloaded_and_read(name: str, local: Path) -> None:
    info = dataset_info(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnverifiedDownloadWarning)
        for split in info.splits:
            data = get_dataset(name, split, fold=info.folds[0] if info.folds else None)
            assert len(data) > 0
