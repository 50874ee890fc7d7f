"""Data sets by name: found in the right place, checked, and read as they are published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from osciformer.data import cache, registry
from osciformer.data import download as download_module
from osciformer.data.errors import (
    ChecksumError,
    DatasetError,
    MissingFileError,
    UnknownDatasetError,
)
from osciformer.data.registry import (
    dataset_info,
    dataset_path,
    describe_dataset,
    get_dataset,
    list_datasets,
    register_dataset,
)

from .file_server import FileServer
from .toy_dataset import CONTENT, register_numbers


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCIFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OSCIFORMER_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(download_module, "_pause", lambda seconds: None)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer().running() as running:
        running.files["numbers.txt"] = CONTENT
        yield running


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setenv("OSCIFORMER_DATA", str(folder))
    return folder


def test_all_sets_are_listed_and_described() -> None:
    for name in list_datasets():
        info = dataset_info(name)
        text = describe_dataset(name)
        assert text.startswith(f"{name} ({info.task})")
        assert info.licence in text
        assert info.citation in text
        assert info.local is not None or info.public is not None


def test_the_sets_of_the_benchmarks_are_there() -> None:
    wanted = {"physionet2012", "JapaneseVowels", "BasicMotions", "stackoverflow", "taxi"}
    assert wanted <= set(list_datasets())


def test_every_hash_and_address_has_the_right_form() -> None:
    for name in list_datasets():
        info = dataset_info(name)
        for source in filter(None, (info.local, info.public)):
            for file in source.files:
                assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
                assert all(address.startswith("https://") for address in file.addresses)
                assert set(file.splits) <= set(info.splits)
                assert set(file.folds) <= set(info.folds)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("basicmotions", "BasicMotions"),
        ("physionet", "physionet2012"),
        ("JapanesVowels", "JapaneseVowels"),
    ],
)
def test_an_unknown_name_gets_near_ones(given: str, meant: str) -> None:
    with pytest.raises(UnknownDatasetError, match=f"did you mean .*'{meant}'"):
        get_dataset(given, "train")


def test_an_unknown_split_gets_the_known_ones() -> None:
    with pytest.raises(UnknownDatasetError, match=r"'set-a', 'set-b', 'set-c'.*got 'train'"):
        get_dataset("physionet2012", "train")


def test_a_set_in_folds_needs_a_fold() -> None:
    with pytest.raises(UnknownDatasetError, match="fold must be one of 1, 2, 3, 4, 5"):
        get_dataset("bookorder", "train")


def test_a_set_without_folds_takes_none() -> None:
    with pytest.raises(UnknownDatasetError, match="fold does not apply"):
        get_dataset("taxi", "train", fold=1)


def test_a_name_is_not_taken_twice() -> None:
    with pytest.raises(ValueError, match="replace=True"):
        register_dataset(dataset_info("taxi"))


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden"])
def test_a_name_must_be_a_folder(name: str) -> None:
    with pytest.raises(ValueError, match="name of a folder"):
        register_dataset(replace(dataset_info("taxi"), name=name))


def test_default_cache_is_below_the_xdg_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OSCIFORMER_CACHE")
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "osciformer"


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_a_relative_xdg_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.delenv("OSCIFORMER_CACHE")
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache.cache_folder() == Path.home() / ".cache" / "osciformer"


def test_a_local_folder_that_is_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSCIFORMER_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DatasetError, match="not a folder"):
        get_dataset("BasicMotions", "train")


def test_a_cache_that_cannot_be_made_is_named(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OSCIFORMER_CACHE", str(tmp_path / "file"))
    register_numbers(server)
    with pytest.raises(DatasetError, match="set OSCIFORMER_CACHE"):
        get_dataset("numbers", "train")


def test_the_local_copy_wins(server: FileServer, local: Path) -> None:
    register_numbers(server)
    (local / "toy").mkdir()
    (local / "toy" / "numbers.bin").write_bytes(b"copy")
    assert get_dataset("numbers", "train") == b"copy"
    assert server.requests == []
    assert not dataset_path("numbers").exists()


def test_a_public_file_in_the_local_folder_wins_over_the_network(
    server: FileServer, local: Path
) -> None:
    register_numbers(server)
    (local / "numbers").mkdir()
    (local / "numbers" / "numbers.txt").write_bytes(CONTENT)
    assert get_dataset("numbers", "train") == CONTENT
    assert server.requests == []


def test_what_the_local_folder_lacks_is_downloaded(server: FileServer, local: Path) -> None:
    register_numbers(server)
    assert get_dataset("numbers", "train") == CONTENT


def test_a_changed_local_file_is_refused_unless_asked_for(server: FileServer, local: Path) -> None:
    register_numbers(server)
    (local / "toy").mkdir()
    (local / "toy" / "numbers.bin").write_bytes(b"changed")
    with pytest.raises(ChecksumError, match="verify=False"):
        get_dataset("numbers", "train")
    assert get_dataset("numbers", "train", verify=False) == b"changed"


def test_a_set_without_an_address_says_what_to_put_where() -> None:
    with pytest.raises(MissingFileError, match=r"tpp/hawkes_nhp\.parquet into a folder"):
        get_dataset("hawkes_nhp", "train")
