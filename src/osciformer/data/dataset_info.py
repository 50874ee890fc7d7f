"""What the registry knows about a data set, and the catalog that it is read from."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

Task = Literal["classification", "regression", "forecasting", "events"]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data set."""

    path: str  #: Its path inside the folder of its source, with `/`.
    sha256: str | None = None  #: None trusts the first download, and checks later uses against it.
    size: int | None = None  #: Its number of bytes, if known.
    addresses: tuple[str, ...] = ()  #: Where it can be downloaded, in the order of trials.
    splits: tuple[str, ...] = ()  #: The splits that need the file; empty means all of them.
    folds: tuple[int, ...] = ()  #: The folds that need it; empty means all of them.


@dataclass(frozen=True, slots=True)
class Request:
    """What a loader is asked for."""

    split: str  #: One of the splits of the data set.
    fold: int | None  #: One of its folds, or None if it has none.
    files: Mapping[str, Path]  #: The verified files that are needed, by `DataFile.path`.


#: Returns the data for a request: an `IrregularSeries`, or an Arrow table for events.
Loader = Callable[[Request], Any]


@dataclass(frozen=True, slots=True)
class Source:
    """One form in which a data set exists: its files and how to read them."""

    files: tuple[DataFile, ...]  #: All of its files.
    load: Loader  #: Turns the files of one split into data.
    splits: tuple[str, ...] = ()  #: The splits that this form holds; empty means all of them.
    is_tried: bool = False  #: Whether the authors of this package have tried the addresses.

    def holds(self, split: str | None) -> bool:
        """Return whether this form has `split`."""
        return _serves(self.splits, split)

    def needed(self, split: str | None, fold: int | None) -> tuple[DataFile, ...]:
        """Return the files that `split` and `fold` need; None means any."""
        files = (file for file in self.files if _serves(file.splits, split))
        return tuple(file for file in files if _serves(file.folds, fold))


def _serves(held: Sequence[Any], wanted: Any) -> bool:
    return wanted is None or not held or wanted in held


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """A data set: what it is, who may use it, and where it comes from."""

    name: str  #: The name in the registry.
    description: str  #: A sentence or two.
    task: Task  #: What it is mostly used for.
    splits: tuple[str, ...]  #: Names of its parts, the one to train on first.
    split_definition: str  #: Who made the split, and how.
    licence: str  #: The terms of its publishers.
    citation: str  #: What to cite.
    homepage: str = ""  #: Where people read about it.
    local: Source | None = None  #: Compact copy, looked for below `OSCIFORMER_DATA`.
    public: Source | None = None  #: The published original, to be downloaded.
    folds: tuple[int, ...] = ()  #: Numbers of the ready-made folds; empty if there are none.
    notes: tuple[str, ...] = ()  #: What a user of the numbers must know.


def read_catalog(path: Path, loaders: Mapping[str, Any]) -> list[DatasetInfo]:
    """Return the data sets of a TOML file; `loaders` are the modules that its `load` names."""
    catalog = tomllib.loads(path.read_text(encoding="utf-8"))
    infos = []
    for name, entry in catalog["sets"].items():
        family = catalog["families"].get(entry.pop("family", None), {})
        own, entry = entry, family | entry
        for kind in {"local", "public"} & entry.keys():
            source = family.get(kind, {}) | own.get(kind, {})
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
    cases = product(entry.get("folds", [None]), splits or entry["splits"], source["paths"])
    for fold, split, pattern in cases:
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
