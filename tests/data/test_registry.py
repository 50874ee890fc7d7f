"""Data sets by name: found in the right place, downloaded once, checked, and read."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from osciformer.data import download as download_module
from osciformer.data import registry
from osciformer.data.errors import (
    ChecksumError,
    DatasetError,
    DownloadError,
    MissingFileError,
    UnknownDatasetError,
    UnverifiedDownloadWarning,
)
from osciformer.data.registry import (
    dataset_info,
    dataset_path,
    describe_dataset,
    fetch_dataset,
    get_dataset,
    list_datasets,
    register_dataset,
)

from .file_server import FileServer, closed_address
from .toy_dataset import CONTENT, SHA256, numbers, register_numbers


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCIFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OSCIFORMER_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(download_module.time, "sleep", lambda seconds: None)


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
    monkeypatch.setattr(registry.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert registry.cache_folder() == tmp_path / "xdg" / "osciformer"


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_a_relative_xdg_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.delenv("OSCIFORMER_CACHE")
    monkeypatch.setattr(registry.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert registry.cache_folder() == Path.home() / ".cache" / "osciformer"


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


def test_a_second_use_asks_nobody(server: FileServer) -> None:
    register_numbers(server)
    assert get_dataset("numbers", "train") == CONTENT
    assert get_dataset("numbers", "test") == CONTENT
    assert get_dataset("numbers", "test", download=False) == CONTENT
    assert len(server.requests) == 1


def test_a_wrong_download_is_refused_and_not_kept(server: FileServer) -> None:
    register_numbers(server)
    server.files["numbers.txt"] = b"something else"
    with pytest.raises(ChecksumError, match=f"expected {SHA256} but got"):
        get_dataset("numbers", "train")
    assert [path.name for path in dataset_path("numbers").iterdir()] == [".lock"]


def test_an_interrupted_download_goes_on(server: FileServer) -> None:
    register_numbers(server)
    server.cuts = [20_000] + [0] * 10
    with pytest.raises(DownloadError):
        get_dataset("numbers", "train")
    server.cuts = []
    assert get_dataset("numbers", "train") == CONTENT
    assert server.ranges[-1] == "bytes=20000-"


def test_an_unknown_hash_is_trusted_once_with_a_warning(server: FileServer) -> None:
    register_numbers(server, sha256=None)
    with pytest.warns(UnverifiedDownloadWarning, match=SHA256) as caught:
        get_dataset("numbers", "train")
    assert caught[0].filename == __file__
    recorded = json.loads((dataset_path("numbers") / "hashes.json").read_text())
    assert recorded["numbers.txt"] == {
        "sha256": SHA256,
        "size": len(CONTENT),
        "source": server.address("numbers.txt"),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_dataset("numbers", "train")


def test_a_trusted_file_that_changed_is_fetched_again_and_compared(server: FileServer) -> None:
    register_numbers(server, sha256=None)
    with pytest.warns(UnverifiedDownloadWarning):
        get_dataset("numbers", "train")
    path = dataset_path("numbers") / "numbers.txt"
    path.write_bytes(b"damaged")
    assert get_dataset("numbers", "train") == CONTENT
    assert path.read_bytes() == CONTENT

    path.write_bytes(b"damaged")
    server.files["numbers.txt"] = b"replaced by the publisher"
    with pytest.raises(ChecksumError, match=r"hashes\.json; delete that file if"):
        get_dataset("numbers", "train")
    with pytest.raises(ChecksumError, match="delete it and get it again"):
        get_dataset("numbers", "train", download=False)


def test_a_damaged_file_is_an_error_without_the_network(server: FileServer) -> None:
    register_numbers(server)
    get_dataset("numbers", "train")
    path = dataset_path("numbers") / "numbers.txt"
    path.write_bytes(b"damaged")
    with pytest.raises(ChecksumError, match=f"expected {SHA256}, got"):
        get_dataset("numbers", "train", download=False)
    assert path.read_bytes() == b"damaged"


def test_a_file_put_there_by_hand_is_used(server: FileServer) -> None:
    register_numbers(server)
    dataset_path("numbers").mkdir(parents=True)
    (dataset_path("numbers") / "numbers.txt").write_bytes(CONTENT)
    assert get_dataset("numbers", "train") == CONTENT
    assert server.requests == []


def test_offline_the_message_says_what_to_do() -> None:
    register_dataset(numbers(closed_address()))
    with pytest.raises(DownloadError) as info:
        get_dataset("numbers", "train")
    assert "set OSCIFORMER_DATA" in str(info.value)
    assert str(dataset_path("numbers") / "numbers.txt") in str(info.value)


def test_without_download_nobody_is_asked(server: FileServer) -> None:
    register_numbers(server)
    with pytest.raises(MissingFileError, match="download=False"):
        get_dataset("numbers", "train", download=False)
    assert server.requests == []
    assert not dataset_path("numbers").exists()


def test_files_can_be_fetched_without_being_read(server: FileServer) -> None:
    register_numbers(server)
    seen: list[tuple[str, int, int | None]] = []
    (path,) = fetch_dataset("numbers", progress=lambda *state: seen.append(state))
    assert path == dataset_path("numbers") / "numbers.txt"
    assert seen[-1] == ("numbers.txt", len(CONTENT), len(CONTENT))


def test_a_damaged_record_of_hashes_is_named(server: FileServer) -> None:
    register_numbers(server, sha256=None)
    dataset_path("numbers").mkdir(parents=True)
    (dataset_path("numbers") / "hashes.json").write_text("[")
    with pytest.raises(DatasetError, match="delete it and try again"):
        get_dataset("numbers", "train")


def test_two_threads_download_once(server: FileServer) -> None:
    register_numbers(server)
    server.gate.clear()
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(get_dataset("numbers", "train")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    server.gate.set()
    for thread in threads:
        thread.join()
    assert results == [CONTENT, CONTENT]
    assert len(server.requests) == 1


@pytest.mark.dist
def test_two_processes_download_once(server: FileServer) -> None:
    context = multiprocessing.get_context("spawn")
    address = server.address("numbers.txt")
    with context.Pool(2) as pool:
        results = pool.map(_download_in_process, [address] * 2, chunksize=1)
    assert results == [SHA256, SHA256]
    assert len(server.requests) == 1


def _download_in_process(address: str) -> str:
    register_dataset(numbers(address), replace=True)
    content: bytes = get_dataset("numbers", "train")
    return hashlib.sha256(content).hexdigest()
