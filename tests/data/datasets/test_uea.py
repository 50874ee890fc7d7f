"""The sets of the UEA archive are read as they are published."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from osciformer.data.errors import MissingFileError, UnreadableFileError, UnverifiedDownloadWarning
from osciformer.data.registry import dataset_info, get_dataset, register_dataset

from ..file_server import FileServer

TS_HEADER = """\
#A comment
@problemName BasicMotions
@timeStamps false
@missing false
@univariate false
@dimensions 2
@equalLength false
@classLabel true Standing Running
@data
"""


def test_the_archive_and_the_copy_give_the_same_series(
    server: FileServer, tmp_path: Path, local: Path
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("BasicMotions.txt", "about")
        archive.writestr("BasicMotions_TEST.ts", TS_HEADER + "9.0:8.0:Running\n")
        archive.writestr(
            "BasicMotions_TRAIN.ts",
            TS_HEADER + "0.1,0.2,0.3:1,2,3:Standing\n4.5,-1:0,0.25:Running\n",
        )
    server.files["BasicMotions.zip"] = content.getvalue()
    info = dataset_info("BasicMotions")
    assert info.public is not None
    file = replace(info.public.files[0], addresses=(server.address("BasicMotions.zip"),))
    public = replace(info.public, files=(file,))
    register_dataset(replace(info, public=public), replace=True)
    with pytest.warns(UnverifiedDownloadWarning):
        original = get_dataset("BasicMotions", "train")
    assert original.labels.tolist() == ["Standing", "Running"]
    assert original.lengths.tolist() == [3, 2]
    assert get_dataset("BasicMotions", "test").values.tolist() == [[9.0, 8.0]]

    padded = np.full((2, 3, 2), np.nan, dtype=np.float32)
    padded[0] = np.float32([[0.1, 1], [0.2, 2], [0.3, 3]])
    padded[1, :2] = np.float32([[4.5, 0], [-1, 0.25]])
    (local / "uea").mkdir()
    np.savez(
        local / "uea" / "BasicMotions.npz",
        X_train=padded,
        len_train=np.int32([3, 2]),
        y_train=np.int16([0, 1]),
        classes=np.array(["Standing", "Running"]),
    )
    assert get_dataset("BasicMotions", "train", verify=False).equals(original)


def test_an_archive_without_the_part_is_named(local: Path) -> None:
    (local / "ERing").mkdir()
    with zipfile.ZipFile(local / "ERing" / "ERing.zip", "w") as archive:
        archive.writestr("ERing_TRAIN.arff", "")
    with pytest.raises(UnreadableFileError, match=r"does not hold ERing_TRAIN\.ts"):
        get_dataset("ERing", "train")


def test_a_fold_of_a_resampled_set_is_chosen_by_its_column(local: Path) -> None:
    (local / "uea").mkdir()
    np.savez(
        local / "uea" / "EthanolConcentration_partial.npz",
        X=np.arange(4, dtype=np.float32).reshape(4, 1, 1),
        y=np.int16([0, 1, 2, 3]),
        split=np.int8([[0, 2], [0, 1], [1, 0], [2, 0]]),
        seeds=np.arange(2),
    )
    parts = {
        split: get_dataset("EthanolConcentration-partial", split, fold=2, verify=False)
        for split in ("train", "val", "test")
    }
    assert {split: part.ids.tolist() for split, part in parts.items()} == {
        "train": [2, 3],
        "val": [1],
        "test": [0],
    }
    assert parts["test"].labels.tolist() == ["e35"]


def test_a_split_that_the_copy_lacks_comes_from_the_network(local: Path) -> None:
    (local / "uea").mkdir()
    (local / "uea" / "Heartbeat_train_only.npz").write_bytes(b"")
    with pytest.raises(MissingFileError, match=r"Heartbeat\.zip"):
        get_dataset("Heartbeat", "test", download=False)
