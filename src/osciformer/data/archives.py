"""Reads zip and tar archives without trusting them.

Nothing is unpacked to a path that the archive chooses: every name is checked, only regular files
are given out, as streams, and their bytes are counted as they come.
"""

from __future__ import annotations

import contextlib
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from osciformer.data.download import format_bytes
from osciformer.data.errors import UnreadableFileError, UnsafeArchiveError

#: An archive that unpacks to more is taken for a bomb.
MAX_BYTES = 4 << 30
MAX_MEMBERS = 200_000

_BLOCK_BYTES = 1 << 20
_Opener = Callable[[], IO[bytes] | None]


def iter_members(
    archive: Path,
    wanted: Callable[[str], bool],
    *,
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield name and blocks of the wanted members; read the blocks before the next member.

    Raises:
        UnsafeArchiveError: If any member, wanted or not, has an absolute name, climbs out with
            `..`, or is a link or a device; or if a limit is passed.
        UnreadableFileError: If the file is no archive or is damaged.
    """
    budget = max_bytes

    def read_blocks(opener: _Opener) -> Iterator[bytes]:
        nonlocal budget
        with _damage_named(archive), opener() or contextlib.nullcontext() as stream:
            # Counted as they come: the size in a header may be a lie.
            while stream is not None and (block := stream.read(_BLOCK_BYTES)):
                budget -= len(block)
                if budget < 0:
                    raise UnsafeArchiveError(
                        f"{archive} unpacks to more than {format_bytes(max_bytes)}; it was not "
                        "unpacked"
                    )
                yield block

    with _damage_named(archive):
        for name, opener in _checked_members(archive, max_members):
            if wanted(name):
                yield name, read_blocks(opener)


@contextlib.contextmanager
def _damage_named(archive: Path) -> Iterator[None]:
    """Turn errors of the readers into one that names the archive."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise UnreadableFileError(
            f"{archive} cannot be read as an archive ({error}); delete it and try again"
        ) from error


def _checked_members(archive: Path, max_members: int) -> Iterator[tuple[str, _Opener]]:
    """Yield name and opener of the regular files, and refuse members that are not safe."""
    pairs = _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive)
    for count, (name, opener) in enumerate(pairs, start=1):
        if count > max_members:
            raise UnsafeArchiveError(f"{archive} has more than {max_members} members")
        path = PurePosixPath(name.replace("\\", "/"))
        drive = path.parts[0] if path.parts else ""
        if path.is_absolute() or ".." in path.parts or ":" in drive:
            raise UnsafeArchiveError(
                f"{archive} has a member {name!r} that points outside its folder; it was not "
                "unpacked"
            )
        if opener is not None:
            yield path.as_posix(), opener


def _zip_members(archive: Path) -> Iterator[tuple[str, _Opener | None]]:
    with zipfile.ZipFile(archive) as content:
        for info in content.infolist():
            # The upper half of the attributes is the Unix mode; 0 if the writer gave none.
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise UnsafeArchiveError(f"{archive} has a link or a device {info.filename!r}")
            if info.flag_bits & 0x1:
                raise UnreadableFileError(f"{archive} is encrypted ({info.filename!r})")
            yield info.filename, None if info.is_dir() else partial(content.open, info)


def _tar_members(archive: Path) -> Iterator[tuple[str, _Opener | None]]:
    with tarfile.open(archive, "r:*") as content:
        for info in content:
            if not (info.isreg() or info.isdir()):
                raise UnsafeArchiveError(f"{archive} has a link or a device {info.name!r}")
            yield info.name, None if info.isdir() else partial(content.extractfile, info)
