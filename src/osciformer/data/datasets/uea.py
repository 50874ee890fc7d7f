"""Multivariate classification sets of the UEA archive: float32 values at steps 0, 1, ..."""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath

import numpy as np

from osciformer.data.archives import iter_members
from osciformer.data.dataset_info import Request
from osciformer.data.errors import UnreadableFileError
from osciformer.data.files import parse_ts
from osciformer.data.series import IrregularSeries

_ARCHIVED, _RESAMPLED = ("train", "test"), ("train", "val", "test")
# Unpacked, the largest of these sets takes well below a gigabyte.
_MAX_BYTES = 2 << 30


def load_copy(request: Request, classes: tuple[str, ...] | None = None) -> IrregularSeries:
    """Return a part of a compact copy: of the archive's, or of a random split (fold 1 to 5)."""
    (path,) = request.files.values()
    split, fold = request.split, request.fold
    with np.load(path, allow_pickle=False) as arrays:
        try:
            names = np.array(classes) if classes else arrays["classes"]
            if fold is None:
                values, lengths, labels = (arrays[f"{key}_{split}"] for key in ("X", "len", "y"))
                series = IrregularSeries.from_padded(values, lengths=lengths, labels=names[labels])
                return _named(series, split)
            whole = "X" in arrays
            values, labels = (
                arrays[key] if whole else np.concatenate([arrays[f"{key}_{p}"] for p in _ARCHIVED])
                for key in ("X", "y")
            )
            part = arrays["split" if whole else "split5"][:, fold - 1]
        except KeyError as error:
            raise UnreadableFileError(f"{path}: {error}") from error
    ids = np.flatnonzero(part == _RESAMPLED.index(split))
    lengths, labels = np.full(len(ids), values.shape[1]), names[labels[ids]]
    return _named(IrregularSeries.from_padded(values[ids], lengths=lengths, labels=labels, ids=ids))


def load_original(request: Request) -> IrregularSeries:
    """Return a part of the archive's zip file, which holds it as a `.ts` file."""
    (archive,) = request.files.values()
    file = f"{archive.stem}_{request.split.upper()}.ts"
    parts = iter_members(
        archive,
        lambda name: PurePosixPath(name).name == file,
        partial(parse_ts, name=f"{archive}/{file}"),
        max_bytes=_MAX_BYTES,
    )
    for _, series in parts:
        return _named(series, request.split)
    raise UnreadableFileError(f"{archive} does not hold {file}")


def _named(series: IrregularSeries, split: str | None = None) -> IrregularSeries:
    """Return the series with names of channels, and with ids such as `train-0` of a split."""
    ids = series.ids if split is None else np.array([f"{split}-{k}" for k in range(len(series))])
    names = tuple(f"channel_{number}" for number in range(series.num_features))
    return series.replace(ids=ids, feature_names=names)
