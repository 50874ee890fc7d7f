"""Finds the files of a data set: the local folder first, then the cache, then the network."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from osciformer.data.cache import (
    DATA_VARIABLE,
    HASHES_NAME,
    dataset_folder,
    exclusive,
    file_sha256,
    local_folder,
    make_folder,
    read_hashes,
    record_hash,
)
from osciformer.data.dataset_info import DataFile, DatasetInfo, Source
from osciformer.data.download import download, way_out
from osciformer.data.errors import (
    ChecksumError,
    DownloadError,
    MissingFileError,
    UnverifiedDownloadWarning,
)
from osciformer.data.progress import ProgressCallback


def find_files(
    info: DatasetInfo,
    *,
    split: str | None,
    fold: int | None,
    may_download: bool,
    is_verified: bool,
    progress: ProgressCallback | None,
) -> tuple[Source, dict[str, Path]]:
    """Return the source that serves the request, and its files by `DataFile.path`.

    Args:
        info: The data set.
        split: The split; None for the files of all splits.
        fold: The fold; None for the files of all folds.
        may_download: Whether files may be fetched.
        is_verified: Whether files of the local folder must have the hash that is registered.
        progress: Called while a file is downloaded.
    """
    folder = local_folder()
    if folder is not None:
        for source, base in ((info.local, folder), (info.public, folder / info.name)):
            found = _all_in(source, base, split, fold)
            if source is not None and found:
                if is_verified:
                    for file in source.needed(split, fold):
                        _check_local(file, found[file.path])
                return source, found
    if info.public is None or not info.public.holds(split):
        raise MissingFileError(_no_address(info, split, folder))
    found = {}
    for file in info.public.needed(split, fold):
        found[file.path] = _obtain(info.name, file, may_download, progress)
    return info.public, found


def _all_in(
    source: Source | None, base: Path, split: str | None, fold: int | None
) -> dict[str, Path]:
    """Return the files of `source` below `base` if all that are needed are there."""
    if source is None or not source.holds(split) or (split is None and source.splits):
        return {}
    found = {file.path: base / file.path for file in source.needed(split, fold)}
    return found if all(path.is_file() for path in found.values()) else {}


def _check_local(file: DataFile, path: Path) -> None:
    if file.sha256 is None:
        return
    got = file_sha256(path)
    if got != file.sha256:
        raise ChecksumError(
            f"{path} is not the expected file: SHA-256 expected {file.sha256}, got {got}; replace "
            f"it, pass verify=False to read it all the same, or unset {DATA_VARIABLE}"
        )


def _obtain(
    name: str, file: DataFile, may_download: bool, progress: ProgressCallback | None
) -> Path:
    """Return the checked file in the cache, downloaded if need be."""
    folder = dataset_folder(name)
    target = folder / file.path
    # A file under its final name is complete: no lock is needed to read it, nor a writable cache.
    if target.is_file():
        expected = _expected(folder, file)
        if expected is not None and file_sha256(target) == expected:
            return target
    elif not may_download or not file.addresses:
        raise MissingFileError(
            f"{file.path} of data set {name!r} is not on this machine"
            + (", and download=False" if file.addresses else ", and no public address is known")
            + f". {way_out(target)}"
        )
    make_folder(target.parent)
    with exclusive(folder):
        # Another process may have brought the file while this one waited.
        expected = _expected(folder, file)
        source = f"file found at {target}"
        if target.is_file():
            got = file_sha256(target)
            if expected == got:
                return target
            if expected is not None:
                _set_aside(target, expected, got, file, may_download)
        if not target.is_file():
            got, source = _fetch(folder, target, file, expected, progress)
        record_hash(folder, file.path, sha256=got, size=target.stat().st_size, source=source)
    if expected is None:
        warnings.warn(
            f"no hash is registered for {file.path} of data set {name!r}: this copy is trusted, "
            f"its SHA-256 {got} is kept in {folder / HASHES_NAME} and checked from now on",
            UnverifiedDownloadWarning,
            stacklevel=4,
        )
    return target


def _expected(folder: Path, file: DataFile) -> str | None:
    if file.sha256 is not None:
        return file.sha256
    recorded = read_hashes(folder).get(file.path, {}).get("sha256")
    return recorded if isinstance(recorded, str) else None


def _fetch(
    folder: Path,
    target: Path,
    file: DataFile,
    expected: str | None,
    progress: ProgressCallback | None,
) -> tuple[str, str]:
    origin = "the registry"
    if file.sha256 is None:
        origin = (
            f"the first download, recorded in {folder / HASHES_NAME}; "
            "delete that file if the publisher has replaced this one on purpose"
        )
    result = download(
        file.addresses,
        target,
        sha256=expected,
        sha256_source=origin,
        size=file.size,
        progress=progress,
    )
    return result.sha256, result.address


def _set_aside(target: Path, expected: str, got: str, file: DataFile, may_download: bool) -> None:
    """Move a file with the wrong content out of the way: it may be somebody's work."""
    aside = target.with_name(target.name + ".bad")
    message = f"{target} is not the expected file: SHA-256 expected {expected}, got {got}"
    if not may_download or not file.addresses:
        raise ChecksumError(f"{message}; delete it and get it again. {way_out(target)}")
    try:
        os.replace(target, aside)
    except OSError as error:
        raise DownloadError(f"{message}, and it cannot be moved to {aside} ({error})") from error


def _no_address(info: DatasetInfo, split: str | None, folder: Path | None) -> str:
    part = f"split {split!r} of data set {info.name!r}" if split else f"data set {info.name!r}"
    local = info.local
    if local is None or not local.holds(split):
        return f"{part} has neither a public address nor a form to keep in {DATA_VARIABLE}"
    names = ", ".join(file.path for file in local.needed(split, None))
    where = f"{DATA_VARIABLE} ({folder})" if folder else f"a folder that {DATA_VARIABLE} names"
    return f"{part} has no public address; put {names} into {where}"
