from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osciformer import saving
from osciformer.saving import ModelFileError, load_model, read_header, save_model

WEIGHTS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(2.5, dtype=torch.float64),
    "c": torch.tensor([True, False]),
    "d": torch.empty(0),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model.safetensors", {"name": "ünïcode", "sizes": [1, 2]}, WEIGHTS)


def rewrite(path: Path, change: Any) -> None:
    """Change the description inside a file and leave the rest as it is."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    description = json.loads(header["__metadata__"][saving.METADATA_KEY])
    change(description)
    header["__metadata__"][saving.METADATA_KEY] = json.dumps(description)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_what_is_loaded_is_what_was_saved(path: Path) -> None:
    found = load_model(path)
    assert found.content == {"name": "ünïcode", "sizes": [1, 2]}
    assert set(found.weights) == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found.weights[name].dtype == tensor.dtype
        assert torch.equal(found.weights[name], tensor)
    assert set(found.versions) == {"osciformer", "torch", "python"}


def test_views_and_shared_tensors_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    save_model(tmp_path / "m", {}, {"whole": base, "turned": base.T, "row": base[1]})
    found = load_model(tmp_path / "m").weights
    assert torch.equal(found["turned"], base.T)
    assert torch.equal(found["row"], base[1])


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    save_model(tmp_path / "m", {"loss": [1.0, float("nan")], "best": float("inf")}, {})
    assert load_model(tmp_path / "m").content == {"loss": [1.0, None], "best": None}


def test_any_other_safetensors_reader_gets_the_weights(path: Path) -> None:
    from safetensors.torch import load_file

    assert torch.equal(load_file(path)["a"], WEIGHTS["a"])


@given(cut=st.floats(0, 0.999))
def test_truncated_file_is_refused(cut: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = save_model(tmp_path_factory.mktemp("cut") / "m", {"a": 1}, WEIGHTS)
    data = path.read_bytes()
    path.write_bytes(data[: int(cut * len(data))])
    with pytest.raises(ModelFileError, match="damaged"):
        load_model(path)


@given(place=st.floats(0, 0.999), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed_in_the_weights(
    place: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = save_model(tmp_path_factory.mktemp("flip") / "m", {"a": 1}, {"w": torch.ones(64)})
    data = bytearray(path.read_bytes())
    data[-256 + int(place * 256)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="its weights are not those that were saved"):
        load_model(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a model file, or its beginning is damaged"),
        (b"hello, this is text and no model", "not a model file, or its beginning is damaged"),
        (b"\xff" * 64, "not a model file, or its beginning is damaged"),
        (b"PK\x03\x04" + b"0" * 64, "pickled checkpoint, which could execute code"),
        (pickle.dumps(Path, protocol=2), "pickled checkpoint, which could execute code"),
    ],
    ids=["empty", "text", "ones", "zip", "pickle"],
)
def test_foreign_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        load_model(tmp_path / "m")


def test_safetensors_of_another_program_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "m", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match="of another program"):
        load_model(tmp_path / "m")
    save_file({"a": torch.ones(1)}, tmp_path / "m")
    with pytest.raises(ModelFileError, match="with metadata was expected"):
        load_model(tmp_path / "m")


def test_newer_file_that_says_so_is_refused(path: Path) -> None:
    def change(description: dict[str, Any]) -> None:
        description.update(version=9, readable_since=7, versions={"osciformer": "5.0"})

    rewrite(path, change)
    with pytest.raises(ModelFileError, match=r"format version 9, written by osciformer 5\.0"):
        load_model(path)


def test_newer_file_that_old_readers_understand_is_read(path: Path) -> None:
    def change(description: dict[str, Any]) -> None:
        description.update(version=9, readable_since=1, licence="free")

    rewrite(path, change)
    assert load_model(path).content["sizes"] == [1, 2]


@pytest.mark.parametrize("key", ["format", "version", "readable_since", "content"])
def test_missing_part_of_the_description_is_named(key: str, path: Path) -> None:
    rewrite(path, lambda description: description.pop(key))
    with pytest.raises(ModelFileError, match=f"damaged: .*{key}"):
        load_model(path)


def test_other_format_is_named(path: Path) -> None:
    rewrite(path, lambda description: description.update(format="something"))
    with pytest.raises(ModelFileError, match="got 'something'"):
        read_header(path)


def test_folder_and_absent_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a folder"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "absent")


def test_failed_write_keeps_the_old_file_and_leaves_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_model(path, {"other": 1}, WEIGHTS)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
