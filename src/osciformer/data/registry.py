"""Public data sets by name.

A data set is looked for in the folder that `OSCIFORMER_DATA` names, then in the cache, and is then
downloaded; `osciformer.data.cache` documents both places. Files are checked against the SHA-256
that the registry states. Where none is known, the first download is trusted, an
`UnverifiedDownloadWarning` says so once, and later uses are checked against what came then.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from osciformer.data.cache import dataset_folder
from osciformer.data.dataset_info import DatasetInfo, Request, Source, Task
from osciformer.data.datasets.events import EVENTS
from osciformer.data.datasets.physionet2012 import PHYSIONET_2012
from osciformer.data.datasets.uea import UEA
from osciformer.data.errors import UnknownDatasetError
from osciformer.data.progress import ProgressCallback, choose_progress, format_bytes
from osciformer.data.store import find_files

_REGISTRY: dict[str, DatasetInfo] = {}


def register_dataset(info: DatasetInfo, *, replace: bool = False) -> None:
    """Add a data set to the registry of this process.

    Args:
        info: The data set.
        replace: Whether it may take the place of one with the same name.
    """
    # A name is also a folder.
    if not info.name or info.name != Path(info.name).name or info.name.startswith("."):
        raise ValueError(f"name must be usable as the name of a folder, got {info.name!r}")
    if info.name in _REGISTRY and not replace:
        raise ValueError(f"data set {info.name!r} exists; pass replace=True to replace it")
    _REGISTRY[info.name] = info


for _dataset in (PHYSIONET_2012, *UEA, *EVENTS):
    register_dataset(_dataset)


def list_datasets(task: Task | None = None) -> tuple[str, ...]:
    """Return the names of the registered data sets, sorted without regard to case.

    Args:
        task: Only those for this task.

    Example:
        >>> list_datasets("classification")[:3]
        ('ArticularyWordRecognition', 'AtrialFibrillation', 'BasicMotions')
    """
    chosen = (info.name for info in _REGISTRY.values() if task in (None, info.task))
    return tuple(sorted(chosen, key=str.casefold))


def dataset_info(name: str) -> DatasetInfo:
    """Return what the registry knows about a data set.

    Raises:
        UnknownDatasetError: If there is no such data set; the message has the nearest names.

    Example:
        >>> dataset_info("physionet2012").splits
        ('set-a', 'set-b', 'set-c')
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        pass
    by_folded = {known.casefold(): known for known in _REGISTRY}
    near = difflib.get_close_matches(str(name).casefold(), by_folded, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(by_folded[item]) for item in near)}? " if near else ""
    raise UnknownDatasetError(f"no data set is called {name!r}; {hint}list_datasets() has them all")


def describe_dataset(name: str) -> str:
    """Return a page of text about a data set: content, splits, licence, citation, files.

    Example:
        >>> print(describe_dataset("BasicMotions").splitlines()[0])
        BasicMotions (classification)
    """
    info = dataset_info(name)
    lines = [f"{info.name} ({info.task})", info.description, ""]
    lines.append(f"splits:   {', '.join(info.splits)}. {info.split_definition}")
    if info.folds:
        lines.append(f"folds:    {', '.join(map(str, info.folds))}")
    lines.append(f"licence:  {info.licence}")
    lines.append(f"citation: {info.citation}")
    if info.homepage:
        lines.append(f"homepage: {info.homepage}")
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
        size = "" if file.size is None else f" ({format_bytes(file.size)})"
        lines.append(f"  {file.path}{size}")
        lines += [f"    {address}" for address in file.addresses]
        lines.append(f"    sha256 {file.sha256 or 'unknown: the first download is trusted'}")
    return lines


def dataset_path(name: str) -> Path:
    """Return the folder of the cache for a data set's public files, which need not exist yet.

    A file that was downloaded by other means is found if it is put there.
    """
    return dataset_folder(dataset_info(name).name)


def fetch_dataset(
    name: str,
    split: str | None = None,
    *,
    fold: int | None = None,
    download: bool = True,
    verify: bool = True,
    progress: bool | ProgressCallback | None = None,
) -> tuple[Path, ...]:
    """Return the files of a data set on this machine, downloaded if need be, without reading them.

    Args:
        name: A name of `list_datasets()`.
        split: One of its splits; None for all.
        fold: One of its folds; None for all.
        download: Whether files may be downloaded.
        verify: As for `get_dataset`.
        progress: As for `get_dataset`.
    """
    info = dataset_info(name)
    _check_choice(info, "split", split, info.splits, is_optional=True)
    _check_choice(info, "fold", fold, info.folds, is_optional=True)
    _, files = find_files(
        info,
        split=split,
        fold=fold,
        may_download=download,
        is_verified=verify,
        progress=choose_progress(progress),
    )
    return tuple(files.values())


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
        split: One of its splits, such as `"train"`; `dataset_info(name).splits` has them.
        fold: One of its folds, for the sets that come in folds.
        download: Whether files may be downloaded; if not, they must be on this machine.
        verify: Whether a file in `OSCIFORMER_DATA` must have the registered hash. Downloads are
            always checked.
        progress: Whether to draw a bar while downloading, or a callback `(file, done, total)`;
            by default a bar if standard error is a terminal.

    Raises:
        UnknownDatasetError: If there is no such data set, split or fold.
        MissingFileError: If a file is not here and cannot or must not be downloaded.
        DownloadError: If a download fails; it goes on where it stopped when called again.
        ChecksumError: If a file is not the expected one.
    """
    info = dataset_info(name)
    _check_choice(info, "split", split, info.splits)
    _check_choice(info, "fold", fold, info.folds, is_optional=not info.folds)
    source, files = find_files(
        info,
        split=split,
        fold=fold,
        may_download=download,
        is_verified=verify,
        progress=choose_progress(progress),
    )
    return source.load(Request(split=split, fold=fold, files=files))


def _check_choice(
    info: DatasetInfo, what: str, value: Any, allowed: tuple[Any, ...], is_optional: bool = False
) -> None:
    if value in allowed or (value is None and is_optional):
        return
    choices = f"must be one of {', '.join(map(repr, allowed))}" if allowed else "does not apply"
    raise UnknownDatasetError(f"{what} {choices} for data set {info.name!r}, got {value!r}")
