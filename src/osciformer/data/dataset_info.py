"""What the registry knows about a data set, and the catalog that it is read from."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

Task = Literal["classification", "regression", "forecasting", "events"]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data set.

    Args:
        path: Its path inside the folder of its source, with `/`.
        sha256: Its hash in hexadecimal, or None if it is not known. The first download is then
            trusted, and later uses are checked against it.
        size: Its number of bytes, if known.
        addresses: Where it can be downloaded, in the order in which they are tried.
        splits: The splits that need the file; empty means all of them.
        folds: The folds that need it; empty means all of them.
    """

    path: str
    sha256: str | None = None
    size: int | None = None
    addresses: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    folds: tuple[int, ...] = ()

    def serves(self, split: str | None, fold: int | None) -> bool:
        """Return whether `split` and `fold` need this file; None means any.

        Example:
            >>> file = DataFile("set-a.parquet", splits=("set-a",))
            >>> file.serves("set-a", None), file.serves("set-b", None), file.serves(None, None)
            (True, False, True)
        """
        fits_split = split is None or not self.splits or split in self.splits
        fits_fold = fold is None or not self.folds or fold in self.folds
        return fits_split and fits_fold


@dataclass(frozen=True, slots=True)
class Request:
    """What a loader is asked for.

    Args:
        split: One of the splits of the data set.
        fold: One of its folds, or None if it has none.
        files: The files that are needed, by `DataFile.path`. They exist and were checked.
    """

    split: str
    fold: int | None
    files: Mapping[str, Path]


#: Returns the data for a request: an `IrregularSeries`, or an Arrow table for events.
Loader = Callable[[Request], Any]


@dataclass(frozen=True, slots=True)
class Source:
    """One form in which a data set exists: its files and how to read them.

    Args:
        files: All of its files.
        load: Turns the files of one split into data.
        splits: The splits that this form holds; empty means all of them.
        is_tried: Whether the addresses have been tried by the authors of this package.
    """

    files: tuple[DataFile, ...]
    load: Loader
    splits: tuple[str, ...] = ()
    is_tried: bool = False

    def holds(self, split: str | None) -> bool:
        """Return whether this form has `split`."""
        return split is None or not self.splits or split in self.splits

    def needed(self, split: str | None, fold: int | None) -> tuple[DataFile, ...]:
        """Return the files that `split` and `fold` need."""
        return tuple(file for file in self.files if file.serves(split, fold))


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """A data set: what it is, who may use it, and where it comes from.

    Args:
        name: The name in the registry.
        description: A sentence or two.
        task: What it is mostly used for.
        splits: Names of its parts, the one to train on first.
        split_definition: Who made the split, and how.
        licence: The terms of its publishers.
        citation: What to cite.
        homepage: Where people read about it.
        local: Compact copy, looked for below `OSCIFORMER_DATA`.
        public: The published original, looked for below `OSCIFORMER_DATA/<name>` and in the cache,
            then downloaded. None if there is nothing to download.
        folds: Numbers of the ready-made folds; empty if there are none.
        notes: What a user of the numbers must know.
    """

    name: str
    description: str
    task: Task
    splits: tuple[str, ...]
    split_definition: str
    licence: str
    citation: str
    homepage: str = ""
    local: Source | None = None
    public: Source | None = None
    folds: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_catalog(path: Path, loaders: Mapping[str, Any]) -> list[DatasetInfo]:
    """Return the data sets of a TOML file, whose form its first lines describe.

    `loaders` has the modules whose functions `load = "module.function"` names.
    """
    catalog = tomllib.loads(path.read_text(encoding="utf-8"))
    infos = []
    for name, entry in catalog["sets"].items():
        family = catalog["families"].get(entry.pop("family", None), {})
        sources = {
            kind: family.get(kind, {}) | entry.get(kind, {})
            for kind in ("local", "public")
            if kind in family or kind in entry
        }
        entry = family | entry
        for kind, source in sources.items():
            entry[kind] = _read_source(name, entry, source, loaders)
        entry["homepage"] = entry.get("homepage", "").format(name=name)
        for key in ("splits", "folds", "notes"):
            entry[key] = tuple(entry.get(key, ()))
        for key in ("sha256", "size", "classes"):
            entry.pop(key, None)
        infos.append(DatasetInfo(name=name, **entry))
    return infos


def _read_source(
    name: str, entry: dict[str, Any], source: dict[str, Any], loaders: Mapping[str, Any]
) -> Source:
    """Return a source with one file for each path, split and fold."""
    splits = tuple(source.get("splits", ()))
    base = source.get("base", "").format(name=name)
    files = {}
    for fold, split, pattern in product(
        entry.get("folds", [None]), splits or entry["splits"], source["paths"]
    ):
        path = pattern.format(name=name, split=split, fold=fold)
        files[path] = DataFile(
            path,
            sha256=entry.get("sha256", {}).get(path),
            size=entry.get("size", {}).get(path),
            addresses=(base + path,) if base else (),
            splits=(split,) if "{split" in pattern else (),
            folds=(fold,) if "{fold" in pattern else (),
        )
    module, _, function = source["load"].partition(".")
    load = getattr(loaders[module], function)
    if "classes" in entry and not base:
        load = partial(load, classes=tuple(entry["classes"]))
    return Source(tuple(files.values()), load, splits)
