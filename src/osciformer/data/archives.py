"""Reads zip and tar archives without trusting them: names, kinds and sizes are checked first."""

from __future__ import annotations

import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar

from osciformer.data.download import format_bytes
from osciformer.data.errors import UnreadableFileError, UnsafeArchiveError

#: An archive that unpacks to more is taken for a bomb.
MAX_BYTES = 4 << 30
MAX_MEMBERS = 200_000

_Read = TypeVar("_Read")


class _Member(NamedTuple):
    name: str
    size: int  # neither reader gives out more bytes
    is_folder: bool
    is_plain: bool
    open: Callable[[], Any]


def iter_members(
    archive: Path,
    wanted: Callable[[str], bool],
    read: Callable[[IO[bytes]], _Read],
    *,
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
) -> Iterator[tuple[str, _Read]]:
    """Yield the name of each wanted file of an archive, and what `read` makes of its stream."""
    num_bytes = 0
    members = _zip_members if zipfile.is_zipfile(archive) else _tar_members
    try:
        for number, member in enumerate(members(archive), start=1):
            path = PurePosixPath(member.name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or ":" in "".join(path.parts[:1]):
                outside = f"a member {member.name!r} that points outside its folder"
                raise UnsafeArchiveError(f"{archive} has {outside}; it was not unpacked")
            if not member.is_plain:
                raise UnsafeArchiveError(f"{archive} has a link or a device {member.name!r}")
            if number > max_members:
                raise UnsafeArchiveError(f"{archive} has more than {max_members} members")
            if member.is_folder or not wanted(path.as_posix()):
                continue
            num_bytes += member.size
            if num_bytes > max_bytes:
                limit = format_bytes(max_bytes)
                raise UnsafeArchiveError(
                    f"{archive} unpacks to more than {limit}; it was not unpacked"
                )
            with member.open() as stream:
                yield path.as_posix(), read(stream)
    # An encrypted member of a zip file is a RuntimeError.
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as e:
        advice = "delete it and try again"
        raise UnreadableFileError(f"{archive} cannot be read as an archive ({e}); {advice}") from e


def _zip_members(archive: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as content:
        for info in content.infolist():
            # The upper half of the attributes is the Unix mode; 0 if the writer gave none.
            is_plain = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG, stat.S_IFDIR)
            opener = partial(content.open, info)
            yield _Member(info.filename, info.file_size, info.is_dir(), is_plain, opener)


def _tar_members(archive: Path) -> Iterator[_Member]:
    with tarfile.open(archive, "r:*") as content:
        for info in content:
            is_plain = info.isreg() or info.isdir()
            opener = partial(content.extractfile, info)
            yield _Member(info.name, info.size, info.isdir(), is_plain, opener)
