"""A file comes from the cache or the network, once, and is what it should be."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from osciformer.data import download as download_module
from osciformer.data import registry
from osciformer.data.errors import (
    ChecksumError,
    DatasetError,
    DownloadError,
    MissingFileError,
    UnverifiedDownloadWarning,
)
from osciformer.data.registry import dataset_path, fetch_dataset, get_dataset, register_dataset

from .file_server import FileServer, closed_address
from .toy_dataset import CONTENT, SHA256, numbers, register_numbers


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


def test_a_second_use_asks_nobody(server: FileServer) -> None:
    register_numbers(server)
    assert get_dataset("numbers", "train") == CONTENT
    assert get_dataset("numbers", "test") == CONTENT
    assert get_dataset("numbers", "test", download=False) == CONTENT
    assert len(server.requests) == 1


def test_a_wrong_download_is_refused_and_not_kept(server: FileServer) -> None:
    register_numbers(server)
    server.files["numbers.txt"] = b"something else"
    with pytest.raises(ChecksumError, match=f"expected {SHA256}, got"):
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
    assert path.with_name("numbers.txt.bad").read_bytes() == b"damaged"

    path.write_bytes(b"damaged")
    server.files["numbers.txt"] = b"replaced by the publisher"
    with pytest.raises(ChecksumError, match=r"hashes\.json; delete that file if"):
        get_dataset("numbers", "train")
    assert not path.exists()


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
