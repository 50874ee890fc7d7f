"""An archive is read without trusting it."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from osciformer.data.archives import iter_members
from osciformer.data.errors import UnreadableFileError, UnsafeArchiveError


def read(stream: IO[bytes]) -> bytes:
    return stream.read()


def read_all(archive: Path, **limits: int) -> dict[str, bytes]:
    return dict(iter_members(archive, lambda name: True, read, **limits))


def make_zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def make_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


MAKERS = pytest.mark.parametrize("make", [make_zip, make_tar], ids=["zip", "tar"])


@MAKERS
def test_wanted_members_are_read(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None]
) -> None:
    make(tmp_path / "archive", {"./a/one.txt": b"1", "two.bin": b"2", "three.txt": b"3"})
    members = iter_members(tmp_path / "archive", lambda name: name.endswith(".txt"), read)
    assert list(members) == [("a/one.txt", b"1"), ("three.txt", b"3")]


@MAKERS
@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/evil", "..\\evil", "C:\\evil", "C:/evil"]
)
@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_member_that_points_outside_is_refused(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None], name: str, is_wanted: bool
) -> None:
    make(tmp_path / "archive", {"good": b"1", name: b"2"})
    with pytest.raises(UnsafeArchiveError, match="points outside its folder"):
        list(iter_members(tmp_path / "archive", lambda name: is_wanted, read))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_a_tar_with_a_link_or_a_device_is_refused(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "archive", "w") as archive:
        archive.addfile(info)
    with pytest.raises(UnsafeArchiveError, match="link or a device"):
        read_all(tmp_path / "archive")


@pytest.mark.parametrize("mode", [0o120777, 0o010666, 0o020666], ids=["link", "pipe", "device"])
def test_a_zip_with_a_link_or_a_device_is_refused(tmp_path: Path, mode: int) -> None:
    info = zipfile.ZipInfo("link")
    info.external_attr = mode << 16
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(UnsafeArchiveError, match="link or a device"):
        read_all(tmp_path / "archive")


@MAKERS
def test_a_bomb_is_refused(tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None]) -> None:
    make(tmp_path / "archive", {"a": bytes(600_000), "b": bytes(600_000)})
    with pytest.raises(UnsafeArchiveError, match=r"more than 1\.0 MB"):
        read_all(tmp_path / "archive", max_bytes=1_000_000)


@MAKERS
def test_too_many_members_are_refused(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None]
) -> None:
    make(tmp_path / "archive", {str(number): b"" for number in range(11)})
    with pytest.raises(UnsafeArchiveError, match="more than 10 members"):
        list(iter_members(tmp_path / "archive", lambda name: False, read, max_members=10))


@MAKERS
def test_a_damaged_archive_is_named(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None]
) -> None:
    path = tmp_path / "archive"
    make(path, {"a": os.urandom(10_000)})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UnreadableFileError, match="delete it and try again"):
        read_all(path)
