"""Public data sets by name: what is known, where the files lie, and how they are verified.

A data set is looked for in the folder that `OSCIFORMER_DATA` names, which is never written to, then
in the cache, and is then downloaded. `OSCIFORMER_DATA` holds compact copies
(`uea/BasicMotions.npz`), or the public files (`physionet2012/set-a.tar.gz`). The cache has public
files in `datasets/<name>/`, their SHA-256 in `hashes.json`, a `.lock` that is held while a file is
downloaded, and `.<file>.part` with `.<file>.part.json` for an interrupted download.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osciformer._advice import Mention, advise
from osciformer._files import write_json
from osciformer._optional import need
from osciformer._text import did_you_mean
from osciformer.data import download as downloads
from osciformer.data import errors
from osciformer.data.dataset_info import DataFile, DatasetInfo, Request, Source, Task, read_catalog
from osciformer.data.datasets import events, physionet2012, uea
from osciformer.data.download import CACHE_VARIABLE, DATA_VARIABLE, ProgressCallback, file_sha256
from osciformer.data.errors import ChecksumError, DatasetError, MissingFileError

HASHES_NAME = "hashes.json"

_REGISTRY: dict[str, DatasetInfo] = {}


def register_dataset(info: DatasetInfo, *, replace: bool = False) -> None:
    """Add a data set to the registry of this process; `replace` allows a name that is taken."""
    # A name is also a folder.
    if not info.name or info.name != Path(info.name).name or info.name.startswith("."):
        raise ValueError(f"name must be usable as the name of a folder, got {info.name!r}")
    if info.name in _REGISTRY and not replace:
        raise ValueError(f"data set {info.name!r} exists; pass replace=True to replace it")
    _REGISTRY[info.name] = info


for _dataset in read_catalog(
    Path(__file__).with_name("datasets") / "catalog.toml",
    {"events": events, "physionet2012": physionet2012, "uea": uea},
):
    register_dataset(_dataset)


def list_datasets(task: Task | None = None) -> tuple[str, ...]:
    """Return the names of the registered data sets, or of those for a task, sorted."""
    names = (name for name, info in _REGISTRY.items() if task in (None, info.task))
    return tuple(sorted(names, key=str.casefold))


def dataset_info(name: str) -> DatasetInfo:
    """Return what the registry knows about a data set; the error for others suggests near names.

    Example:
        >>> dataset_info("physionet2012").splits
        ('set-a', 'set-b', 'set-c')
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    hint = did_you_mean(name, _REGISTRY)
    raise advise(
        errors.UnknownDatasetError,
        f"no data set is called {name!r}; {hint}{' ' if hint else ''}",
        Mention("data list", python="list_datasets()"),
        " has them all",
    )


def describe_dataset(name: str) -> str:
    """Return a page of text about a data set: content, splits, licence, citation, files."""
    info = dataset_info(name)
    lines = [f"{info.name} ({info.task})", info.description, ""]
    facts = {
        "splits": f"{', '.join(info.splits)}. {info.split_definition}",
        "folds": ", ".join(map(str, info.folds)),
        "licence": info.licence,
        "citation": info.citation,
        "homepage": info.homepage,
    }
    lines += [f"{key + ':':<9} {text}" for key, text in facts.items() if text]
    lines += [f"note:     {note}" for note in info.notes]
    if info.local is not None:
        lines += ["", "compact copy, below OSCIFORMER_DATA:", *_file_lines(info.local)]
    if info.public is not None:
        tried = "" if info.public.is_tried else ", addresses not tried by the authors"
        lines += ["", f"public files{tried}:", *_file_lines(info.public)]
        lines.append(f"kept in {dataset_path(name)}")
    return "\n".join(lines)


def _file_lines(source: Source) -> list[str]:
    lines = []
    for file in source.files:
        size = "" if file.size is None else f" ({downloads.format_bytes(file.size)})"
        lines.append(f"  {file.path}{size}")
        lines += [f"    {address}" for address in file.addresses]
        lines.append(f"    sha256 {file.sha256 or 'unknown: the first download is trusted'}")
    return lines


def dataset_path(name: str) -> Path:
    """Return the folder of the cache for a data set's public files, which need not exist yet."""
    return cache_folder() / "datasets" / dataset_info(name).name


def cache_folder() -> Path:
    """Return the folder for downloads, which need not exist yet."""
    value = os.environ.get(CACHE_VARIABLE, "").strip()
    if value:
        return Path(value).expanduser()
    platform: str = sys.platform
    if platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(folder) / "osciformer" / "Cache"
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "osciformer"
    # The XDG specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "osciformer"


def fetch_dataset(
    name: str,
    split: str | None = None,
    *,
    fold: int | None = None,
    download: bool = True,
    verify: bool = True,
    progress: bool | ProgressCallback | None = None,
) -> tuple[Path, ...]:
    """Return the files of a data set on this machine, downloaded if needed, without reading them.

    Arguments are as for `get_dataset`; without a split or fold, all files are returned.
    """
    info = dataset_info(name)
    _check_choice(info, "split", split, (None, *info.splits))
    _check_choice(info, "fold", fold, (None, *info.folds))
    return tuple(find_files(info, split, fold, download, verify, progress)[1].values())


def get_dataset(
    name: str,
    split: str,
    *,
    fold: int | None = None,
    download: bool = True,
    verify: bool = True,
    progress: bool | ProgressCallback | None = None,
) -> Any:
    """Return one split of a data set: an `IrregularSeries`, or an Arrow table for events.

    Args:
        name: A name of `list_datasets()`.
        split: One of its splits, such as `"train"`; `dataset_info(name).splits` lists them.
        fold: One of its folds, for sets that come in folds.
        download: Whether files may be downloaded; if not, they must be on this machine.
        verify: Whether files in `OSCIFORMER_DATA` must have the registered hash; downloads always.
        progress: Whether to draw a bar (None: on a terminal), or a callback `(file, done, total)`.

    Raises:
        DatasetError: If there is no such part, or a file is missing, wrong or not to be downloaded.
    """
    info = dataset_info(name)
    _check_choice(info, "split", split, info.splits)
    _check_choice(info, "fold", fold, info.folds or (None,))
    source, files = find_files(info, split, fold, download, verify, progress)
    return source.load(Request(split=split, fold=fold, files=files))


def _check_choice(info: DatasetInfo, what: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(item) for item in allowed if item is not None)
        rule = f"must be one of {choices}" if choices else "does not apply"
        raise errors.UnknownDatasetError(f"{what} {rule} for data set {info.name!r}, got {value!r}")


def find_files(
    info: DatasetInfo,
    split: str | None,
    fold: int | None,
    download: bool,
    verify: bool,
    progress: bool | ProgressCallback | None,
) -> tuple[Source, dict[str, Path]]:
    """Return the source that serves the request, and its files by `DataFile.path`."""
    given = os.environ.get(DATA_VARIABLE, "").strip()
    folder = Path(given).expanduser() if given else None
    if folder is not None and not folder.is_dir():
        wrong = f"{DATA_VARIABLE} is {given!r}, which is not a folder"
        raise DatasetError(f"{wrong}; correct the variable or unset it")
    bases = () if folder is None else ((info.local, folder), (info.public, folder / info.name))
    for source, base in bases:
        if source is None or not source.holds(split) or (split is None and source.splits):
            continue
        files = {file: base / file.path for file in source.needed(split, fold)}
        if files and all(path.is_file() for path in files.values()):
            for file, path in files.items():
                if verify and file.sha256 not in (None, file_sha256(path)):
                    advice = "replace it, pass verify=False to read it anyway, or unset"
                    raise _wrong_file(path, file.sha256, f"{advice} {DATA_VARIABLE}")
            return source, {file.path: path for file, path in files.items()}
    if info.public is not None and info.public.holds(split):
        callback = downloads.choose_progress(progress)
        return info.public, {
            file.path: _obtain(info.name, file, download, callback)
            for file in info.public.needed(split, fold)
        }
    part = f"split {split!r} of data set {info.name!r}" if split else f"data set {info.name!r}"
    if info.local is None or not info.local.holds(split):
        neither = f"neither a public address nor a form to keep in {DATA_VARIABLE}"
        raise MissingFileError(f"{part} has {neither}")
    names = ", ".join(file.path for file in info.local.needed(split, None))
    where = f"{DATA_VARIABLE} ({folder})" if folder else f"a folder that {DATA_VARIABLE} names"
    raise MissingFileError(f"{part} has no public address; put {names} into {where}")


def _wrong_file(path: Path, expected: str | None, advice: str) -> ChecksumError:
    hashes = f"SHA-256 expected {expected}, got {file_sha256(path)}"
    return ChecksumError(f"{path} is not the expected file: {hashes}; {advice}")


def _obtain(
    name: str, file: DataFile, may_download: bool, progress: ProgressCallback | None
) -> Path:
    """Return the verified file in the cache, downloaded if needed."""
    folder = dataset_path(name)
    target, advice = folder / file.path, downloads.offline_advice(folder / file.path)
    may_download = may_download and bool(file.addresses)
    # A file under its final name is complete: reading it needs neither a lock nor a writable cache.
    if target.is_file() and file_sha256(target) == _expected_sha256(folder, file):
        return target
    if not target.is_file() and not may_download:
        missing = f"{file.path} of data set {name!r} is not on this machine"
        cause = "download=False" if file.addresses else "no public address is known"
        raise MissingFileError(f"{missing}, and {cause}. {advice}")
    with _exclusive(folder):
        # Another process may have brought the file while this one waited.
        expected, address = _expected_sha256(folder, file), f"file found at {target}"
        if target.is_file() and file_sha256(target) == expected:
            return target
        if target.is_file() and expected is not None and not may_download:
            raise _wrong_file(target, expected, f"delete it and get it again. {advice}")
        if not target.is_file() or expected is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            recorded = (
                f"the first download, recorded in {folder / HASHES_NAME}; "
                "delete that file if the publisher has replaced this one on purpose"
            )
            address = downloads.download(
                file.addresses,
                target,
                sha256=expected,
                sha256_source="the registry" if file.sha256 else recorded,
                size=file.size,
                progress=progress,
            ).address
        got = file_sha256(target)
        record = {"sha256": got, "size": target.stat().st_size, "source": address}
        write_json(folder / HASHES_NAME, _read_hashes(folder) | {file.path: record})
    if expected is None:
        warnings.warn(
            f"no hash is registered for {file.path} of data set {name!r}: this copy is trusted, "
            f"its SHA-256 {got} is kept in {folder / HASHES_NAME} and checked from now on",
            errors.UnverifiedDownloadWarning,
            stacklevel=5,
        )
    return target


@contextlib.contextmanager
def _exclusive(folder: Path, *, timeout: float = 3600.0) -> Iterator[None]:
    """Create `folder` and hold its lock against other threads and processes."""
    filelock = need("filelock", extra="data")
    lock = filelock.FileLock(folder / ".lock", timeout=timeout)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock.acquire()
    except filelock.Timeout as error:
        cause = f"another process has held {lock.lock_file} for {timeout:.0f} s"
        raise DatasetError(f"{cause}; end it, or wait for its download, and try again") from error
    except (OSError, NotImplementedError) as error:
        cause = f"the cache folder {folder} cannot be written to or locked ({error})"
        raise DatasetError(f"{cause}; set {CACHE_VARIABLE} to another folder") from error
    with held:
        yield


def _expected_sha256(folder: Path, file: DataFile) -> str | None:
    """Return the registered hash, or the one of the first download."""
    return file.sha256 or _read_hashes(folder).get(file.path, {}).get("sha256")


def _read_hashes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what `hashes.json` in `folder` records, by file name; empty if there is none."""
    path = folder / HASHES_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: dict(record) for name, record in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        wrong = f"{path} is not a record of hashes ({error})"
        raise DatasetError(f"{wrong}; delete it and try again") from error
