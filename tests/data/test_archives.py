"""An archive is read without trusting it."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from osciformer.data import archives
from osciformer.data.archives import extract, iter_members
from osciformer.data.errors import DiskFullError, UnreadableFileError, UnsafeArchiveError


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
def test_wanted_members_are_unpacked(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None]
) -> None:
    make(tmp_path / "archive", {"./a/one.txt": b"1", "two.bin": b"2", "three.txt": b"3"})
    extract(tmp_path / "archive", tmp_path / "out", lambda name: name.endswith(".txt"))
    found = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert [path.relative_to(tmp_path / "out").as_posix() for path in found] == [
        "a/one.txt",
        "three.txt",
    ]
    assert names_in(tmp_path) == ["archive", "out"]


@MAKERS
@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/evil", "..\\evil", "C:\\evil", "C:/evil"]
)
def test_a_member_that_points_outside_is_refused(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None], name: str
) -> None:
    (tmp_path / "inner").mkdir()
    make(tmp_path / "archive", {"good": b"1", name: b"2"})
    with pytest.raises(UnsafeArchiveError, match="points outside its folder"):
        extract(tmp_path / "archive", tmp_path / "inner" / "out", lambda name: True)
    assert names_in(tmp_path) == ["archive", "inner"]
    assert names_in(tmp_path / "inner") == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_a_tar_with_a_link_or_a_device_is_refused(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "archive", "w") as archive:
        archive.addfile(info)
    with pytest.raises(UnsafeArchiveError, match="link or a device"):
        list(iter_members(tmp_path / "archive", lambda name: True))


def test_a_zip_with_a_link_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(UnsafeArchiveError, match="link"):
        list(iter_members(tmp_path / "archive", lambda name: True))


@MAKERS
def test_a_bomb_is_refused_and_leaves_nothing(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None]
) -> None:
    make(tmp_path / "archive", {"a": bytes(600_000), "b": bytes(600_000)})
    with pytest.raises(UnsafeArchiveError, match=r"more than 1\.0 MB"):
        extract(tmp_path / "archive", tmp_path / "out", lambda name: True, max_bytes=1_000_000)
    assert names_in(tmp_path) == ["archive"]


@MAKERS
def test_too_many_members_are_refused(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None]
) -> None:
    make(tmp_path / "archive", {str(number): b"" for number in range(11)})
    with pytest.raises(UnsafeArchiveError, match="more than 10 members"):
        list(iter_members(tmp_path / "archive", lambda name: False, max_members=10))


@MAKERS
def test_a_damaged_archive_is_named(
    tmp_path: Path, make: Callable[[Path, dict[str, bytes]], None]
) -> None:
    path = tmp_path / "archive"
    make(path, {"a": os.urandom(10_000)})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UnreadableFileError, match="delete it and try again"):
        list(iter_members(path, lambda name: True))


def test_a_full_disk_while_unpacking_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_zip(tmp_path / "archive", {"a": b"1"})

    def replace(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archives.os, "replace", replace)
    with pytest.raises(DiskFullError, match="no room to unpack"):
        extract(tmp_path / "archive", tmp_path / "out", lambda name: True)
    assert names_in(tmp_path) == ["archive"]
