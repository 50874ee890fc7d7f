"""A download ends in a complete, checked file or in a message that says what to do."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import requests

from osciformer.data import download as download_module
from osciformer.data.download import (
    Downloaded,
    TerminalBar,
    choose_progress,
    download,
    file_sha256,
    part_path,
)
from osciformer.data.errors import ChecksumError, DatasetError, DiskFullError, DownloadError
from osciformer.data.registry import _exclusive as exclusive

from .file_server import FileServer, closed_address

CONTENT = bytes(range(256)) * 1500
HALF = len(CONTENT) // 2
SHA256 = hashlib.sha256(CONTENT).hexdigest()
OTHER = b"another file altogether"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer().running() as running:
        running.files["file"] = CONTENT
        yield running


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def fetch(server: FileServer, target: Path) -> Callable[..., Downloaded]:
    def fetch(*paths: str, **options: Any) -> Downloaded:
        addresses = [server.address(path) for path in paths or ("file",)]
        return download(addresses, target, **{"backoff": 0.0, "sha256": SHA256} | options)

    return fetch


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_arrives_whole_and_alone(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    result = fetch(size=len(CONTENT))
    assert result == Downloaded(server.address("file"), SHA256, len(CONTENT))
    assert target.read_bytes() == CONTENT
    assert names_in(target.parent) == ["file"]
    assert server.ranges == [None]


def test_nothing_is_printed(
    fetch: Callable[..., Downloaded], capfd: pytest.CaptureFixture[str]
) -> None:
    fetch(sha256=None)
    assert capfd.readouterr() == ("", "")


def test_a_missing_pooch_says_what_to_install(
    fetch: Callable[..., Downloaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install \"osciformer\[data\]\""):
        fetch()


def test_progress_rises_to_the_total(fetch: Callable[..., Downloaded]) -> None:
    seen: list[tuple[str, int, int | None]] = []
    fetch(progress=lambda *state: seen.append(state))
    counts = [done for _, done, _ in seen]
    assert counts == sorted(set(counts))
    assert seen[-1] == ("file", len(CONTENT), len(CONTENT))
    assert {total for _, _, total in seen} == {len(CONTENT)}


def test_a_server_that_dies_midway_is_asked_for_the_rest(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.cuts = [HALF, 1000]
    fetch()
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={HALF}-", f"bytes={HALF + 1000}-"]


def test_an_interrupted_download_goes_on_in_the_next_call(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.cuts = [HALF]
    with pytest.raises(DownloadError, match="call again to continue"):
        fetch(attempts=1)
    assert not target.exists()
    assert part_path(target).stat().st_size == HALF
    fetch()
    assert target.read_bytes() == CONTENT
    assert server.ranges[-1] == f"bytes={HALF}-"


def test_an_interrupt_by_the_user_keeps_the_part(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    def interrupt(name: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(progress=interrupt)
    assert not target.exists()
    assert part_path(target).stat().st_size > 0
    fetch()
    assert target.read_bytes() == CONTENT
    assert server.ranges[-1] is not None


def test_a_server_that_ignores_range_starts_the_file_again(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.use_range = False
    server.cuts = [HALF]
    fetch()
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_a_server_that_sends_another_range_starts_the_file_again(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.cuts = [HALF]
    server.headers["Content-Range"] = f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"
    fetch(sha256=None)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={HALF}-", None]


def test_a_part_of_an_older_state_of_the_file_is_not_continued(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.cuts = [HALF]
    with pytest.raises(DownloadError):
        fetch(attempts=1, sha256=None)
    server.files["file"] = CONTENT[::-1]
    server.etag = '"two"'
    fetch(sha256=None)
    assert target.read_bytes() == CONTENT[::-1]


def test_a_part_is_not_continued_where_nothing_shows_that_it_is_the_same_file(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.etag = None
    server.cuts = [HALF]
    fetch(sha256=None)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, None]


def test_a_part_that_belongs_to_another_file_is_dropped_once_the_hash_says_so(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    part_path(target).write_bytes(b"x" * HALF)
    fetch()
    assert target.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={HALF}-", None]


def test_a_part_that_is_already_complete_is_recognised(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    part_path(target).write_bytes(CONTENT)
    fetch()
    assert target.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={len(CONTENT)}-"]


def test_a_part_that_is_too_long_is_dropped(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    part_path(target).write_bytes(CONTENT + b"more")
    fetch()
    assert target.read_bytes() == CONTENT


def test_a_server_that_always_dies_ends_in_an_error(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.cuts = [10] * 20
    with pytest.raises(
        DownloadError, match="the connection ended after 30 of 384000 bytes"
    ) as info:
        fetch(attempts=3)
    assert len(server.requests) == 3
    assert not target.exists()
    assert f"put the file at {target}" in str(info.value)


def test_an_attempt_that_brought_much_does_not_count(
    server: FileServer,
    target: Path,
    fetch: Callable[..., Downloaded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(download_module, "_PROGRESS_BYTES", 1000)
    server.cuts = [2000] * 10
    fetch(attempts=2)
    assert target.read_bytes() == CONTENT
    assert len(server.requests) == 11


def test_a_server_that_starts_over_each_time_brings_nothing(
    server: FileServer, fetch: Callable[..., Downloaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "_PROGRESS_BYTES", 1000)
    server.use_range = False
    server.cuts = [2000, 1000] * 10
    with pytest.raises(DownloadError):
        fetch(attempts=3)
    assert len(server.requests) == 3


def test_a_truncated_file_of_unknown_length_is_noticed_by_its_size(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.use_length = False
    server.cuts = [HALF]
    fetch(size=len(CONTENT))
    assert target.read_bytes() == CONTENT


def test_a_truncated_file_under_its_own_length_is_refused(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.files["file"] = CONTENT[:HALF]
    with pytest.raises(ChecksumError, match=f"has {HALF} bytes, expected {len(CONTENT)}"):
        fetch(size=len(CONTENT))
    assert names_in(target.parent) == []


def test_an_empty_answer_is_no_file(server: FileServer, fetch: Callable[..., Downloaded]) -> None:
    server.files["file"] = b""
    with pytest.raises(DownloadError, match="after 0 of 0 bytes"):
        fetch(sha256=None, attempts=2)


def test_a_wrong_hash_deletes_the_file_and_names_both(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.files["file"] = OTHER
    got = hashlib.sha256(OTHER).hexdigest()
    with pytest.raises(ChecksumError) as info:
        fetch()
    message = str(info.value)
    assert f"expected {SHA256} but got {got}" in message
    assert "OSCIFORMER_DATA" in message
    assert names_in(target.parent) == []
    assert len(server.requests) == 1


def test_a_mirror_is_tried_after_a_wrong_file_and_after_none(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.files["wrong"] = OTHER
    assert fetch("absent", "wrong", "file").address == server.address("file")
    assert target.read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["absent", "wrong", "file"]


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refusal_is_not_repeated(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded], status: int
) -> None:
    server.statuses = [status] * 9
    with pytest.raises(DownloadError, match=f"answered {status}"):
        fetch()
    assert len(server.requests) == 1
    assert names_in(target.parent) == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_fault_is_tried_again(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded], status: int
) -> None:
    server.statuses = [status, status]
    fetch()
    assert target.read_bytes() == CONTENT


def test_waits_double_and_follow_retry_after(
    server: FileServer,
    target: Path,
    fetch: Callable[..., Downloaded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(download_module.time, "sleep", waits.append)
    server.statuses = [503, 503, 503]
    fetch(backoff=0.5)
    target.unlink()
    server.statuses = [503]
    server.headers["Retry-After"] = "7"
    fetch(backoff=0.5)
    assert waits == [0.5, 1.0, 2.0, 7.0]
    target.unlink()
    server.statuses = [503]
    server.headers["Retry-After"] = formatdate(time.time() + 40, usegmt=True)
    fetch(backoff=0.5)
    assert 30 < waits[-1] <= 40


def test_no_network_ends_in_advice(target: Path) -> None:
    with pytest.raises(DownloadError) as info:
        download([closed_address()], target, backoff=0.0, attempts=2)
    assert "set OSCIFORMER_DATA" in str(info.value)
    assert f"put the file at {target}" in str(info.value)


def test_a_silent_server_times_out(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.gate.clear()
    with pytest.raises(DownloadError, match="did not answer in time"):
        fetch(timeout=0.1, attempts=1)
    assert not target.exists()


def test_a_web_page_is_not_taken_for_the_file(
    server: FileServer, fetch: Callable[..., Downloaded]
) -> None:
    server.headers["Content-Type"] = "text/html; charset=utf-8"
    with pytest.raises(DownloadError, match="a web page in place of the file"):
        fetch(sha256=None)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1/file", "file"])
def test_only_http_is_opened(target: Path, address: str) -> None:
    with pytest.raises(ValueError, match="http:// or https://"):
        download([address], target)


def test_a_redirect_to_another_scheme_is_not_followed(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.statuses = [302]
    server.headers["Location"] = "file:///etc/passwd"
    with pytest.raises(DownloadError, match="redirect is not followed"):
        fetch(sha256=None)
    assert names_in(target.parent) == []


def test_a_redirect_from_https_back_to_http_is_not_followed(
    server: FileServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redirect = requests.Response()
    redirect.status_code = 302
    redirect.headers["Location"] = server.address("file")
    redirect.raw = io.BytesIO()

    def answer(adapter: Any, request: Any, **options: Any) -> requests.Response:
        redirect.request, redirect.url = request, request.url
        return redirect

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answer)
    with pytest.raises(DownloadError, match="redirect is not followed"):
        download(["https://example.org/file"], target)
    assert server.requests == []


def test_a_redirect_within_http_is_followed(
    server: FileServer, target: Path, fetch: Callable[..., Downloaded]
) -> None:
    server.statuses = [302]
    server.headers["Location"] = server.address("file")
    fetch("moved")
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind(
    target: Path, fetch: Callable[..., Downloaded], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(download_module.os, "fsync", fail)
    with pytest.raises(DiskFullError, match="set OSCIFORMER_CACHE"):
        fetch()
    assert names_in(target.parent) == []


def test_a_file_that_cannot_fit_is_not_begun(
    target: Path, fetch: Callable[..., Downloaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(target.parent)._replace(free=1000)
    monkeypatch.setattr(download_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match=r"384\.0 kB needed, 1\.0 kB free"):
        fetch()
    assert names_in(target.parent) == []


def test_the_lock_keeps_others_out(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with exclusive(tmp_path):
            entered.set()

    other = threading.Thread(target=enter)
    with exclusive(tmp_path):
        other.start()
        assert not entered.wait(timeout=0.15)
        with (
            pytest.raises(DatasetError, match="another process has held"),
            exclusive(tmp_path, timeout=0.0),
        ):
            pass
    other.join()
    assert entered.is_set()


def test_the_hash_of_a_changed_file_is_computed_again(target: Path) -> None:
    target.write_bytes(CONTENT)
    assert file_sha256(target) == SHA256
    target.write_bytes(OTHER)
    assert file_sha256(target) == hashlib.sha256(OTHER).hexdigest()


def test_the_bar_fills_and_ends_its_line() -> None:
    stream = io.StringIO()
    bar = TerminalBar(stream)
    bar("file", 500, 1000)
    bar("file", 1000, 1000)
    first, last = stream.getvalue().split("\r")[1:]
    assert first.startswith("file [############------------] 500 B of 1.0 kB")
    assert last.startswith("file [########################] 1.0 kB of 1.0 kB")
    assert last.endswith("\n")


def test_a_bar_is_drawn_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert choose_progress(None) is None
    assert isinstance(choose_progress(True), TerminalBar)
