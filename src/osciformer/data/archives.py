"""Reads zip and tar archives without trusting them.

Nothing is unpacked by the archive's own account: members are streamed, every name is checked, only
regular files are given out, and the bytes are counted as they come.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from osciformer.data.cache import CACHE_VARIABLE
from osciformer.data.errors import DiskFullError, UnreadableFileError, UnsafeArchiveError
from osciformer.data.progress import format_bytes

#: An archive that unpacks to more is taken for a bomb.
MAX_BYTES = 4 << 30
MAX_MEMBERS = 200_000

_BLOCK_BYTES = 1 << 20


def iter_members(
    archive: Path,
    wanted: Callable[[str], bool],
    *,
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the members that are wanted, in the order of the archive.

    Args:
        archive: A zip file, or a tar file with or without compression.
        wanted: Whether to read the member of that name.
        max_bytes: The most that may be read in all.
        max_members: The most members that the archive may have.

    Raises:
        UnsafeArchiveError: If any member, wanted or not, has an absolute name, climbs out with
            `..`, or is a link or a device; or if a limit is passed.
        UnreadableFileError: If the file is no archive or is damaged.
    """
    for name, blocks in _wanted_members(archive, wanted, max_bytes, max_members):
        yield name, b"".join(blocks)


def extract(
    archive: Path,
    folder: Path,
    wanted: Callable[[str], bool],
    *,
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
) -> None:
    """Write the wanted members to `folder`, which appears complete or not at all.

    Args:
        archive: A zip or tar file.
        folder: The folder to create. An earlier one is replaced.
        wanted: Whether to write the member of that name.
        max_bytes: The most that may be written in all.
        max_members: The most members that the archive may have.

    Raises:
        UnsafeArchiveError: As `iter_members`; nothing is written.
        DiskFullError: If there is no room; nothing is left behind.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, blocks in _wanted_members(archive, wanted, max_bytes, max_members):
            path = temporary / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as stream:
                for block in blocks:
                    stream.write(block)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(
            f"no room to unpack {archive.name} in {folder.parent}; free some space "
            f"or set {CACHE_VARIABLE} to a folder on another disk"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_Opener = Callable[[], IO[bytes]]


def _wanted_members(
    archive: Path, wanted: Callable[[str], bool], max_bytes: int, max_members: int
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield name and blocks of the wanted members; the blocks are read before the next member."""
    budget = max_bytes

    def blocks(opener: _Opener) -> Iterator[bytes]:
        nonlocal budget
        with _damage_named(archive), opener() as stream:
            # Counted as they come: the size in a header may be a lie.
            while block := stream.read(_BLOCK_BYTES):
                budget -= len(block)
                if budget < 0:
                    raise UnsafeArchiveError(
                        f"{archive} unpacks to more than {format_bytes(max_bytes)}; "
                        "it was left alone"
                    )
                yield block

    members = _checked_members(archive, max_members)
    while True:
        with _damage_named(archive):
            member = next(members, None)
        if member is None:
            return
        name, opener = member
        if wanted(name):
            yield name, blocks(opener)


@contextlib.contextmanager
def _damage_named(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise UnreadableFileError(
            f"{archive} cannot be read as an archive ({error}); delete it and try again"
        ) from error


def _checked_members(archive: Path, max_members: int) -> Iterator[tuple[str, _Opener]]:
    pairs = _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive)
    for count, (name, opener) in enumerate(pairs, start=1):
        if count > max_members:
            raise UnsafeArchiveError(f"{archive} has more than {max_members} members")
        path = PurePosixPath(name.replace("\\", "/"))
        drive = path.parts[0] if path.parts else ""
        if path.is_absolute() or ".." in path.parts or ":" in drive:
            raise UnsafeArchiveError(
                f"{archive} has a member {name!r} that points outside its folder; it was left alone"
            )
        if opener is not None:
            yield path.as_posix(), opener


def _zip_members(archive: Path) -> Iterator[tuple[str, _Opener | None]]:
    with zipfile.ZipFile(archive) as content:
        for info in content.infolist():
            # The upper half of the attributes is the Unix mode.
            if stat.S_ISLNK(info.external_attr >> 16):
                raise UnsafeArchiveError(f"{archive} has a link {info.filename!r}")
            if info.flag_bits & 0x1:
                raise UnreadableFileError(f"{archive} is encrypted ({info.filename!r})")
            yield info.filename, None if info.is_dir() else partial(content.open, info)


def _tar_members(archive: Path) -> Iterator[tuple[str, _Opener | None]]:
    with tarfile.open(archive, "r:*") as content:
        for info in content:
            if not (info.isreg() or info.isdir()):
                raise UnsafeArchiveError(
                    f"{archive} has a link or a device {info.name!r}; it was left alone"
                )
            yield info.name, None if info.isdir() else partial(_tar_file, content, info)


def _tar_file(content: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    stream = content.extractfile(info)
    if stream is None:
        raise UnreadableFileError(f"member {info.name!r} has no content")
    return stream
